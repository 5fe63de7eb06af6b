"""Servers behind a network that is cut, on a full disk, and with fewer positions than a prompt needs."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.errors import RunFailed
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server import bucket
from covey.rollout.server.call import Caller
from covey.rollout.server.token import own_token
from covey.rollout.server.wire import MARKER
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import sampled
from support.machines import Machine, two_machines
from support.needs import need
from support.servers import TOKEN, engine_on, policy_of_server, running

pytestmark = pytest.mark.multi

TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """The learner's model, and those of two servers."""
    return [policy_of_server() for _ in range(3)]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return [request_of(range(20 + number, 40), number) for number in range(8)]


def request_of(prompt: range, number: int) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=24, stop_token_ids=()),
        turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=number, sibling=0),
    )


@pytest.fixture(scope="module")
def expected(policies: list[Policy], requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    return tokens_of(NativeEngine(policies[0]), requests)


def tokens_of(engine: Any, requests: list[GenerationRequest]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in sampled(engine, requests)]


# -- the network


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def answers_again(address: str) -> None:
    """Wait for the network, which looks for the other machine anew."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            Caller(address=address, token=TOKEN, timeout_s=TIMEOUT_S).status()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"{address} does not answer")


@contextmanager
def server_on(node: Machine, folder: Path) -> Iterator[str]:
    """`covey rollout` over TLS on another machine; its certificate is `cert.pem` of the folder."""
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    make += f" -subj /CN={node.host} -addext subjectAltName=IP:{node.address}"
    subprocess.run(make.split(), cwd=folder, check=True, capture_output=True)
    token_file, said = folder / "a.token", folder / "said"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    words = (
        "--model quickstart --port 8000 --token_file a.token --ssl_certfile cert.pem --ssl_keyfile key.pem"
    )
    command = [sys.executable, "-m", "covey", "rollout", *words.split(), "--host", node.address]
    process = node.start(command, folder, said, {})
    try:
        until = time.monotonic() + 120
        while "ready" not in said.read_text():
            assert process.poll() is None and time.monotonic() < until, said.read_text()
            time.sleep(0.1)
        yield f"https://{node.address}:8000"
    finally:
        process.kill()
        process.wait()


@pytest.mark.needs("openssl")
def test_a_network_that_is_cut_in_the_middle_of_a_publish(
    nodes: tuple[Machine, Machine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: list[Policy],
    requests: list[GenerationRequest],
    expected: list[tuple[int, ...]],
) -> None:
    """The server behind it is left out in time and named, and takes part again; alone it ends the run. The
    cable is pulled out, and packets are lost without a word."""
    here, there = nodes
    # So that tensors of this small model come in many calls.
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 1 << 17)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))

    def until_cut(cut: Callable[[], None]) -> Iterator[Any]:
        for number, named in enumerate(plain_weights(policies[0])):
            if number == 9:
                cut()
            yield named

    with server_on(there, tmp_path) as remote, here.entered(), running(policies[1]) as near:
        engine = engine_on([near.address, remote], timeout_s=TIMEOUT_S)
        assert list(engine.publish(plain_weights(policies[0]), 0).members) == [near.address, remote]
        started = time.monotonic()
        assert list(engine.publish(until_cut(lambda: there.link("down")), 1).members) == [near.address]
        assert time.monotonic() - started < 3 * TIMEOUT_S
        (notice,) = engine.take_notices()
        assert notice.code == "W180" and remote in notice.seen and near.address not in notice.seen
        assert tokens_of(engine, requests) == expected
        there.link("up")
        answers_again(remote)
        assert list(engine.publish(plain_weights(policies[0]), 2).members) == [near.address, remote]
        assert tokens_of(engine.members[remote], requests) == expected
        alone = engine_on([remote], timeout_s=TIMEOUT_S)
        started = time.monotonic()
        with pytest.raises(RunFailed, match="F141") as failed:
            alone.publish(until_cut(lambda: there.answers(here, does=False)), 3)
        # No answer comes, and nothing says that none will.
        assert time.monotonic() - started < 3 * TIMEOUT_S
        assert f"{remote}: it did not respond in time" in str(failed.value)
        engine.close()
        alone.close()


# -- the disk


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A directory with room for 100 kB."""
    need("a small disk")
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_directory_of_weights_without_room_is_named(
    full: Path,
    tmp_path: Path,
    policies: list[Policy],
    requests: list[GenerationRequest],
    expected: list[tuple[int, ...]],
) -> None:
    """One server's: the run goes on with the other. That of all: it ends, and says why."""
    (full / f"{MARKER}{'1' * 16}").touch()
    with running(policies[1]) as good, running(policies[2], full, instance="1" * 16) as bad:
        engine = engine_on([good.address, bad.address])
        assert list(engine.publish(plain_weights(policies[0]), 0).members) == [good.address]
        (notice,) = engine.take_notices()
        assert notice.code == "W180" and bad.address in notice.seen
        assert f"{full} takes no file of weights" in notice.seen and "No space left" in notice.seen
        assert tokens_of(engine, requests) == expected
        # Nothing is left of what was begun, and the server still waits for a publish.
        assert [p.name for p in full.iterdir()] == [f"{MARKER}{'1' * 16}"]
        assert bad.failed == [] and bad.front.status().version == -1
        alone = engine_on([bad.address])
        with pytest.raises(RunFailed, match=r"F141[\s\S]*No space left"):
            alone.publish(plain_weights(policies[0]), 1)
        engine.close()
        alone.close()


def test_a_token_that_finds_no_room_leaves_no_empty_file(full: Path) -> None:
    (full / "filled").write_bytes(b"x" * (100 << 10))
    with pytest.raises(OSError, match=r"No space left on device: .*a.token") as failed:
        own_token(full / "a.token")
    assert failed.value.errno == errno.ENOSPC and not (full / "a.token").exists()
    (full / "filled").unlink()
    assert own_token(full / "a.token") == (full / "a.token").read_text().strip()


# -- the model


def test_a_prompt_that_a_server_has_no_positions_for_goes_to_another_or_is_named(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[tuple[int, ...]]
) -> None:
    with running(policies[1]) as good, running(policies[2], max_len=40) as short:
        engine = engine_on([good.address, short.address])
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens_of(engine, requests) == expected
        engine.publish(plain_weights(policies[0]), 1)
        alone = engine_on([short.address])
        alone.publish(plain_weights(policies[0]), 2)
        # 16 and 24 tokens are as many as it has.
        assert tokens_of(alone, requests[4:]) == expected[4:]
        with pytest.raises(RunFailed, match=r"F140[\s\S]*20 tokens and 24 new ones are more than the 40"):
            tokens_of(alone, requests[:1])
        engine.close()
        alone.close()
