"""What a rollout server grants to whoever has not shown its token, and what it says of its work."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import save

from covey.data.text import load_codec
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.server import http as server_http
from covey.rollout.server.http import ROUTES
from covey.rollout.server.unproven import Unproven
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import sampled
from support.servers import TOKEN, Running, engine_on, policy_of_server, running

_OWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """The model of a server, and that of its run."""
    return [policy_of_server() for _ in range(2)]


@pytest.fixture
def server(policies: list[Policy]) -> Iterator[Running]:
    """One server, without weights."""
    with running(policies[0]) as found:
        yield found
        assert found.failed == []


def connection(server: Running) -> socket.socket:
    parts = urlsplit(server.address)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def get(server: Running, path: str, headers: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Status, content type and text of an answer."""
    client = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=10)
    client.request("GET", path, headers=headers or {})
    answer = client.getresponse()
    text = answer.read().decode()
    client.close()
    return answer.status, answer.getheader("Content-Type", ""), text


def is_over(one: socket.socket, seconds: float) -> bool:
    """Whether the server ends a connection in time."""
    one.settimeout(seconds)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def wait_until(holds: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_silent_connections_are_few_and_the_oldest_make_room(server: Running) -> None:
    server.http.unproven = Unproven(most=8, longest_s=600.0)
    silent = [connection(server) for _ in range(40)]
    assert get(server, "/v1/status", _OWN)[0] == 200
    assert all(is_over(one, 5.0) for one in silent[:32])
    # Counting the one with the token, which was one of them until its token was read.
    assert sum(not is_over(one, 0.05) for one in silent[-8:]) >= 7
    assert len(server.http.unproven) <= 8
    for one in silent:
        one.close()
    wait_until(lambda: len(server.http.unproven) == 0)


@pytest.mark.parametrize("head", [b"", b"GET /v1/status HTTP/1.1\r\nAuthorization: Bea"])
def test_a_connection_that_never_shows_the_token_ends_however_it_spends_its_time(
    server: Running, head: bytes
) -> None:
    server.http.unproven = Unproven(longest_s=0.5)
    one = connection(server)
    one.sendall(head)
    end = time.monotonic() + 10
    while not is_over(one, 0.1):
        assert time.monotonic() < end
        with contextlib.suppress(OSError):
            one.sendall(b"x")
    one.close()


def test_a_connection_that_has_shown_the_token_may_stay(server: Running) -> None:
    server.http.unproven = Unproven(most=2, longest_s=0.3)
    caller = server.caller("run-1")
    with caller.open("POST", "/v1/attend", {"run": "run-1", "name": "test"}) as attending:
        assert attending.json() == {"run": "run-1"}
        others = [connection(server) for _ in range(5)]
        assert all(is_over(one, 5.0) for one in others)
        assert not attending.is_over() and server.front.uses("run-1")
        for one in others:
            one.close()


class Full:
    """A listening socket for which no files are left."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening, self.is_full, self.tries = listening, True, 0

    def accept(self) -> Any:
        self.tries += 1
        if self.is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listening.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)


def test_where_no_files_are_left_older_connections_make_room_and_the_server_does_not_spin(
    server: Running,
) -> None:
    silent = [connection(server) for _ in range(4)]
    wait_until(lambda: len(server.http.unproven) == 4)
    full = Full(server.http.socket)
    server.http.socket = full  # type: ignore[assignment]
    waiting = connection(server)
    waiting.sendall(b"GET /health HTTP/1.1\r\n\r\n")
    assert all(is_over(one, 5.0) for one in silent)
    before = full.tries
    time.sleep(0.5)
    assert full.tries - before <= 0.5 / server_http._FULL_S + 2
    full.is_full = False
    waiting.settimeout(5.0)
    assert b"200" in waiting.recv(100)
    for one in (*silent, waiting):
        one.close()


@pytest.mark.needs("openssl")
def test_a_silent_client_of_tls_ends_as_well(tmp_path: Path, policies: list[Policy]) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(cert), "-subj", "/CN=x"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with running(policies[0]) as server:
        server.http.socket = context.wrap_socket(
            server.http.socket, server_side=True, do_handshake_on_connect=False
        )
        server.http.unproven = Unproven(longest_s=0.5)
        raw, shaken = connection(server), connection(server)
        own = ssl.create_default_context()
        own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
        secure = own.wrap_socket(shaken)
        assert is_over(raw, 10.0) and is_over(secure, 10.0)
        raw.close()
        secure.close()


def test_health_needs_no_token_and_says_nothing_of_the_run(server: Running) -> None:
    said = get(server, "/health")
    assert said[0] == 200 and json.loads(said[2]) == {"status": "ok"}
    with server.caller("run-1").open("POST", "/v1/attend", {"run": "run-1", "name": "secret"}):
        assert get(server, "/health") == said
        assert get(server, "/health", {"Authorization": "Bearer wrong"}) == said
    client = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=10)
    client.request("POST", "/health", body=b"{}")
    assert client.getresponse().status == 401
    client.close()


def values(text: str) -> dict[str, float]:
    """The samples of a text that Prometheus reads, each described by the lines before it."""
    found: dict[str, float] = {}
    described: set[str] = set()
    for line in text.removesuffix("\n").split("\n"):
        if about := re.fullmatch(r"# (HELP [a-z_]+ \S.*|TYPE [a-z_]+ (counter|gauge))", line):
            described.add(" ".join(about[1].split()[:2]))
            continue
        sample = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[a-z]+"\})? (-?[0-9.e+-]+)', line)
        assert sample is not None, line
        assert {f"HELP {sample[1]}", f"TYPE {sample[1]}"} <= described
        found[sample[1].removeprefix("covey_rollout_") + (sample[2] or "")] = float(sample[3])
    return found


def test_metrics_are_what_the_server_has_done(server: Running, policies: list[Policy]) -> None:
    assert ("GET", "/metrics") in ROUTES

    def metrics() -> dict[str, float]:
        status, kind, text = get(server, "/metrics", _OWN)
        assert status == 200 and kind.startswith("text/plain; version=0.0.4") and text.endswith("\n")
        return values(text)

    first = metrics()
    assert first.pop("weights_version") == -1 and not any(first.values())
    codec = load_codec(task.MODEL_DIR)
    prompts = codec.encode([codec.render(row["messages"]) for row in task.training_rows()[:3]])
    params = SamplingParams(temperature=1.0, max_new_tokens=20, stop_token_ids=codec.stop_token_ids)
    key = TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=0)
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(prompt),
            sampling=params,
            turn=replace(key, prompt_id=number, sibling=sibling),
        )
        for number, prompt in enumerate(prompts)
        for sibling in range(2)
    ]
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies[1]), 3)
    during: list[dict[str, float]] = []
    completions = sampled(engine, requests, lambda: during.append(metrics()))
    found = metrics()
    assert during[0]["requests_total"] == found["requests_total"] == 6
    assert found["completion_tokens_total"] == sum(len(c.token_ids) for c in completions)
    assert found["computed_tokens_total"] > found["completion_tokens_total"]
    assert found["completion_seconds_total"] == pytest.approx(sum(c.seconds for c in completions))
    for finish in ("stop", "length"):
        ended = sum(c.finish == finish for c in completions)
        assert found[f'completions_total{{finish="{finish}"}}'] == ended
    assert found["requests_running"] == found["requests_queued"] == 0
    assert found["weights_version"] == 3 and found["run_processes"] == 1
    assert found['publishes_total{result="whole"}'] == 1 and found["publish_seconds_total"] > 0

    caller = server.caller("run-1")
    transfer = caller.post("/v1/publish/begin", {"version": 4, "form": "whole"})["transfer"]
    name, tensor = next(iter(plain_weights(policies[1])))
    with pytest.raises(OSError):
        caller.post(f"/v1/publish/tensors?transfer={transfer}", save({f"{name}.old": tensor.clone()}))
        caller.post("/v1/publish/end", {"transfer": transfer, "tensors": 1})
    wait_until(lambda: metrics()['publishes_total{result="failed"}'] == 1)
    assert metrics()["weights_version"] == -1
    engine.close()


def test_requests_beyond_the_rows_of_the_server_wait(policies: list[Policy]) -> None:
    with running(policies[0], rows=2) as server:
        is_held, may_go_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            may_go_on.wait(10)

        engine = engine_on([server.address])
        engine.publish(plain_weights(policies[1]), 0)
        params = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=())
        key = TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=0)
        request = GenerationRequest(prompt_token_ids=(1, 2), sampling=params, turn=key)
        for sibling in range(5):
            engine.submit(replace(request, turn=replace(key, sibling=sibling)))
        server.engine.on_turn = lambda real=server.engine.on_turn: (real(), hold())
        sampling = threading.Thread(target=lambda: list(engine.results()))
        sampling.start()
        assert is_held.wait(10)
        found = values(get(server, "/metrics", _OWN)[2])
        assert (found["requests_running"], found["requests_queued"]) == (2, 3)
        may_go_on.set()
        sampling.join(20)
        engine.close()
