"""Rollout servers that are killed, stopped, slow or broken: no completion is lost, doubled or changed, or the
run stops in time and names the server."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.cli.listening import listening
from covey.comm import LocalComm
from covey.data.text import load_codec
from covey.errors import GuardStop, RunFailed
from covey.learner.backends.single import SingleBackend
from covey.learner.canary import learners_view
from covey.models.lora import plain_weights, tied_names
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.native.engine import NativeEngine
from covey.rollout.publisher import Publisher
from covey.rollout.server.call import Caller
from covey.rollout.server.http import _Handler
from covey.rollout.server.remote import State
from covey.types import GenerationRequest, SamplingParams, TurnId
from faults import covey_run
from support.engines import Plain, sampled
from support.models import VOCAB, policy_of
from support.ranks import run_ranks
from support.servers import Process, Running, covey, engine_on, policy_of_server, processes, running
from support.steps import OPTIMIZER
from support.threads import on_ranks

pytestmark = pytest.mark.multi

WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "accuracy"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "16", "--learning_rate", "1e-4"),
    *("--num_generations", "4", "--reward_trial", "false", "--save_steps", "100"),
]


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """The learner's model, and those of three servers."""
    return [policy_of_server() for _ in range(4)]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Twelve prompts with four siblings each, long enough to be in the middle of for a while."""
    codec = load_codec(task.MODEL_DIR)
    rows = task.training_rows()[:12]
    prompts = codec.encode([codec.render(r["messages"]) for r in rows])
    return [
        GenerationRequest(
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=1.5, max_new_tokens=200 + 20 * sibling, stop_token_ids=()),
            turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling),
        )
        for number, prompt in enumerate(prompts)
        for sibling in range(4)
    ]


@pytest.fixture(scope="module")
def expected(policies: list[Policy], requests: list[GenerationRequest]) -> list[Plain]:
    """What the engine of the process samples."""
    return sampled(NativeEngine(policies[0]), requests)


def tokens(completions: list[Plain]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Two servers in processes of their own, which the tests leave as they found them."""
    with processes(tmp_path_factory.mktemp("pair"), 2) as found:
        yield found


def test_a_server_that_is_killed_in_a_rollout_loses_nothing_and_comes_back(
    tmp_path: Path, policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    with processes(tmp_path, 2) as (first, second):
        engine = engine_on([first.address, second.address], token=first.token)
        engine.publish(plain_weights(policies[0]), 0)
        started = time.monotonic()
        assert tokens(sampled(engine, requests, second.kill)) == tokens(expected)
        assert time.monotonic() - started < 60
        engine.publish(plain_weights(policies[0]), 1)
        (notice,) = engine.take_notices()[:1]
        assert notice.code == "W180" and second.address in notice.seen
        assert list(engine.members) == [first.address]
        with processes(tmp_path, 1, port=second.port) as (again,):
            assert again.address == second.address
            # It has no weights: until the next publish it is not asked for anything.
            assert tokens(sampled(engine, requests[:8])) == tokens(expected[:8])
            receipt = engine.publish(plain_weights(policies[0]), 2)
            assert list(receipt.members) == [first.address, again.address] == list(engine.members)
            assert tokens(sampled(engine.members[again.address], requests[:8])) == tokens(expected[:8])
        engine.close()


def test_a_server_that_is_stopped_is_given_up_in_time_and_comes_back(
    pair: list[Process],
    policies: list[Policy],
    requests: list[GenerationRequest],
    expected: list[Plain],
) -> None:
    first, second = pair
    engine = engine_on([p.address for p in pair], token=first.token, timeout_s=3.0)
    engine.publish(plain_weights(policies[0]), 0)
    assert tokens(sampled(engine, requests, lambda: second.send(signal.SIGSTOP))) == tokens(expected)
    started = time.monotonic()
    engine.publish(plain_weights(policies[0]), 1)
    assert time.monotonic() - started < 10
    assert list(engine.members) == [first.address]
    said = [notice.seen for notice in engine.take_notices()]
    assert any(second.address in words and "did not respond in time" in words for words in said)
    second.send(signal.SIGCONT)
    engine.publish(plain_weights(policies[0]), 2)
    assert len(engine.members) == 2
    assert tokens(sampled(engine, requests)) == tokens(expected)
    engine.close()


def test_no_server_left_stops_in_time_and_names_each(
    pair: list[Process], policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    engine = engine_on([p.address for p in pair], token=pair[0].token, timeout_s=2.0)
    engine.publish(plain_weights(policies[0]), 0)

    def stop() -> None:
        for server in pair:
            server.send(signal.SIGSTOP)

    started = time.monotonic()
    try:
        with pytest.raises(RunFailed, match="F140") as failed:
            sampled(engine, requests, stop)
    finally:
        for server in pair:
            server.send(signal.SIGCONT)
    assert time.monotonic() - started < 20
    assert all(server.address in str(failed.value) for server in pair)
    engine.close()


GARBAGE: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "no JSON": lambda body: b"<html>nginx</html>\n",
    "no object": lambda body: b"[1, 2]\n",
    "another's id": lambda body: line({**body, "id": "1/train/0/0/99/0"}),
    "other tokens than logprobs": lambda body: line({**body, "logprobs": body["logprobs"][1:]}),
    "tokens of no vocabulary": lambda body: line({**body, "token_ids": [1 << 20] * len(body["token_ids"])}),
    "logprobs that are NaN": lambda body: line({**body, "logprobs": [float("nan")] * len(body["logprobs"])}),
    "another version": lambda body: line({**body, "versions": [[7, len(body["token_ids"])]]}),
    "an end before the end": lambda body: line({"done": True}),
    "a name too many": lambda body: line({**body, "reward": 1.0}),
}


def line(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() + b"\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@pytest.mark.parametrize("what", GARBAGE)
def test_a_server_that_answers_garbage_is_left_out(
    what: str, policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    class Broken(_Handler):
        def _chunk(self, body: Any) -> None:
            data = GARBAGE[what](dict(body)) if "id" in body else line(dict(body))
            self.wfile.write(chunk(data))

    with running(policies[1]) as good, running(policies[2]) as bad:
        bad.http.RequestHandlerClass = Broken
        engine = engine_on([good.address, bad.address])
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        seen = " ".join(notice.seen for notice in engine.take_notices())
        assert bad.address in seen and good.address not in seen
        engine.close()


@pytest.mark.parametrize("data", [b"zzz\r\n", b"5\r\n{\r\n", b"ffffffff\r\n"], ids=["hex", "short", "long"])
def test_a_stream_that_breaks_off_is_sampled_elsewhere(
    data: bytes, policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    class Broken(_Handler):
        def _chunk(self, body: Any) -> None:
            self.wfile.write(data)
            raise ConnectionError("cut")

    with running(policies[1]) as good, running(policies[2]) as bad:
        bad.http.RequestHandlerClass = Broken
        engine = engine_on([good.address, bad.address], timeout_s=5.0)
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        engine.close()


def test_a_completion_that_comes_twice_counts_once(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    class Doubled(_Handler):
        def _chunk(self, body: Any) -> None:
            self.wfile.write(chunk(line(dict(body)) * (2 if "id" in body else 1)))

    with running(policies[1]) as server:
        server.http.RequestHandlerClass = Doubled
        engine = engine_on([server.address])
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        engine.close()


def test_a_server_that_is_slow_is_waited_for(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    """A sign of the engine every second is enough, however long a completion takes."""
    with running(policies[1]) as server:
        server.engine.on_turn = lambda real=server.engine.on_turn: (  # type: ignore[misc]
            real(),
            time.sleep(0.3),
        )
        engine = engine_on([server.address], timeout_s=2.5)
        engine.publish(plain_weights(policies[0]), 0)
        started = time.monotonic()
        assert tokens(sampled(engine, requests[:4])) == tokens(expected[:4])
        assert time.monotonic() - started > 3.5
        assert engine.take_notices() == []
        engine.close()


def test_an_engine_that_stands_still_is_given_up(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    """The signs are the engine's: HTTP alone that still answers says nothing."""
    over = threading.Event()
    with running(policies[1]) as good, running(policies[2]) as bad:
        bad.engine.on_turn = lambda real=bad.engine.on_turn: (  # type: ignore[misc]
            real(),
            over.wait() if bad.front._id_of else None,
        )
        engine = engine_on([good.address, bad.address], timeout_s=2.0)
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        over.set()
        engine.close()


class Talking(_Handler):
    """Says for ever that it lives, and completes nothing."""

    def _stream(self, call: Any) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(chunk(line({"computed": 5})))
            time.sleep(0.1)


def test_a_server_that_talks_and_computes_nothing_is_given_up(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    with running(policies[1]) as good, running(policies[2]) as bad:
        bad.http.RequestHandlerClass = Talking
        engine = engine_on([good.address, bad.address], timeout_s=1.0)
        engine.publish(plain_weights(policies[0]), 0)
        started = time.monotonic()
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        assert time.monotonic() - started < 20
        engine.publish(plain_weights(policies[0]), 1)
        bad_alone = engine_on([bad.address], timeout_s=1.0)
        bad_alone.publish(plain_weights(policies[0]), 1)
        with pytest.raises(RunFailed, match=r"F140.*computed nothing for 1 s"):
            sampled(bad_alone, requests[:4])
        engine.close()


def test_an_engine_that_turns_and_computes_nothing_is_given_up(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    with running(policies[1]) as good, running(policies[2]) as bad:
        bad.engine._engine._advance = lambda: time.sleep(0.01) or []  # type: ignore
        engine = engine_on([good.address, bad.address], timeout_s=1.0)
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        engine.close()


def test_a_consumer_that_takes_its_time_gives_up_nobody(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    """What a server said while nobody looked was said in time."""
    with running(policies[1]) as server:
        engine = engine_on([server.address], timeout_s=0.5)
        engine.publish(plain_weights(policies[0]), 0)
        assert tokens(sampled(engine, requests[:8], lambda: time.sleep(3))) == tokens(expected[:8])
        assert engine.take_notices() == []
        engine.close()


class LosesTheEnd(_Handler):
    """Takes the weights, and its answer is lost."""

    def _say(self, status: int, body: Any) -> None:
        if self.path.startswith("/v1/publish/end"):
            raise ConnectionError("cut")
        super()._say(status, body)


def test_a_server_that_the_first_rank_could_not_confirm_is_used_by_no_rank(
    policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    with running(policies[1]) as good, running(policies[2]) as bad:
        bad.http.RequestHandlerClass = LosesTheEnd

        def rank(comm: Any) -> tuple[list[tuple[int, ...]], list[str]]:
            engine = engine_on([good.address, bad.address], publishes=comm.rank == 0)
            owner = SimpleNamespace(weights=lambda dtype=None: plain_weights(policies[0]))
            with Publisher(owner, engine, comm).serve(0):  # type: ignore[arg-type]
                done = tokens(sampled(engine, requests[:16][comm.rank :: 2]))
            used = [s.address for s in engine._servers if s.state is State.IN_USE]
            engine.close()
            return done, used

        answers = on_ranks(2, rank)
        # It has the version, and nobody has checked with which weights.
        assert bad.front.status().version == 0
        for number, answer in enumerate(answers):
            assert answer == (tokens(expected[:16][number::2]), [good.address]), answer


FAILURES: dict[str, Callable[[Running], object]] = {
    "the engine refuses": lambda server: setattr(server.engine, "publish", refuse),
    "HTTP breaks": lambda server: setattr(server.http, "RequestHandlerClass", Cut),
    "it is used by another run": lambda server: server.front.attend("other", "the other"),
}


def refuse(weights: Any, version: int) -> Any:
    next(weights)
    raise ValueError("no memory is left for the weights")


class Cut(_Handler):
    """Breaks in the middle of a publish."""

    def tensors(self) -> None:
        raise ConnectionError("cut")

    def _answer(self, method: str) -> None:
        if self.path.startswith("/v1/publish/tensors"):
            raise ConnectionError("cut")
        super()._answer(method)


@pytest.mark.parametrize("how", FAILURES)
def test_a_publish_that_fails_on_one_of_three_goes_on_with_two(
    how: str, policies: list[Policy], requests: list[GenerationRequest], expected: list[Plain]
) -> None:
    with running(policies[1]) as one, running(policies[2]) as two, running(policies[3]) as three:
        engine = engine_on([one.address, two.address, three.address])
        kept = two.engine.publish, two.http.RequestHandlerClass
        FAILURES[how](two)
        receipt = engine.publish(plain_weights(policies[0]), 0)
        assert list(receipt.members) == [one.address, three.address]
        (notice,) = engine.take_notices()
        assert notice.code == "W180" and two.address in notice.seen
        assert tokens(sampled(engine, requests[:16])) == tokens(expected[:16])
        assert two.front.status().version == -1
        two.engine.publish, two.http.RequestHandlerClass = kept  # type: ignore[method-assign]
        two.front.leave("other")
        assert len(engine.publish(plain_weights(policies[0]), 1).members) == 3
        engine.close()


class Mute(_Handler):
    """Samples nothing."""

    def _stream(self, call: Any) -> None:
        raise ConnectionError("cut")


def test_a_server_that_is_gone_before_the_canary_is_left_out() -> None:
    """It took the weights; what the canary says of the others holds."""
    learner = policy_of("llama")
    backend = SingleBackend(learner, OPTIMIZER)
    with running(copy.deepcopy(learner)) as good, running(copy.deepcopy(learner)) as bad:
        engine = engine_on([good.address, bad.address])
        canary = Canary(
            requests=canary_requests(VOCAB),
            view=learners_view(backend, lambda: None),
            bound=Bound(torch.float32, torch.float32),
        )
        publisher = Publisher(backend, engine, LocalComm(), canary=canary, tied=tied_names(learner))
        bad.http.RequestHandlerClass = Mute
        with publisher.serve(0):
            assert list(engine.members) == [good.address]
        assert [bad.address in notice.seen for notice in engine.take_notices()] == [True]
        good.http.RequestHandlerClass = Mute
        with pytest.raises(RunFailed, match="F140"), publisher.serve(1):
            pass
        engine.close()


def test_a_server_with_other_weights_stops_the_run_by_its_name() -> None:
    learner = policy_of("llama")
    backend = SingleBackend(learner, OPTIMIZER)
    with running(copy.deepcopy(learner)) as good, running(copy.deepcopy(learner)) as bad:
        engine = engine_on([good.address, bad.address])
        publisher = Publisher(backend, engine, LocalComm(), tied=tied_names(learner))
        real = bad.engine.publish

        def keeps_one(named: Any, version: int) -> Any:
            first, *others = list(named)
            return real(iter([(first[0], torch.zeros_like(first[1])), *others]), version)

        bad.engine.publish = keeps_one  # type: ignore[method-assign]
        with pytest.raises(GuardStop, match=re.escape(bad.address)), publisher.serve(0):
            pass
        engine.close()


# -- whole runs


def start(folder: Path, servers: list[Process], *words: str) -> tuple[BaseProcess, Path]:
    """`covey train` on the servers, in `folder`, and the file of what it says."""
    own = []
    if servers:
        own = ["--rollout_servers", *(server.address for server in servers)]
        own += ["--rollout_token_file", str(servers[0].token_file)]
    return covey(folder, "train", *WORDS, *own, *words)


def ended(run: BaseProcess, seconds: float = 120.0) -> int | None:
    run.join(seconds)
    return run.exitcode


def wait_for(holds: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def test_a_run_goes_on_bit_for_bit_where_a_server_is_killed(tmp_path: Path) -> None:
    """Against the same run on the engine of the process."""
    (tmp_path / "own").mkdir()
    words = ["--max_steps", "12", "--output_dir", "run"]
    alone, log = start(tmp_path / "own", [], *words)
    with processes(tmp_path, 2) as servers:
        run, said = start(tmp_path, servers, *words)
        wait_for(lambda: steps(tmp_path) >= 2 or run.exitcode is not None)
        servers[1].kill()
        assert ended(run) == 0, said.read_text()
    assert ended(alone) == 0, log.read_text()
    assert_same(tmp_path / "own/run/checkpoint-12", tmp_path / "run/checkpoint-12")
    assert "W180" in said.read_text() and servers[1].address in said.read_text()
    events = [json.loads(x) for x in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert any(event.get("code") == "W180" for event in events)


def assert_same(one: Path, two: Path) -> None:
    """The same weights to the bit."""
    for file in sorted(one.glob("*.safetensors")):
        ours, theirs = load_file(str(file)), load_file(str(two / file.name))
        assert ours and all(ours[name].equal(theirs[name]) for name in ours)


def test_ranks_share_servers_and_evaluate_on_them(tmp_path: Path, pair: list[Process]) -> None:
    """Two ranks on two servers, with evaluations, against two ranks with an engine each."""
    words = [*WORDS, "--max_steps", "3", "--split_dataset_ratio", "0.1", "--eval_steps", "2"]
    words += ["--output_dir", "run"]
    served = ["--rollout_servers", *(server.address for server in pair)]
    served += ["--rollout_token_file", str(pair[0].token_file)]
    for name, more in (("own", []), ("served", served)):
        (tmp_path / name).mkdir()
        done = run_ranks(covey_run.__file__, "train", *words, *more, folder=tmp_path / name)
        assert done.code == 0, done.said
    own, theirs = tmp_path / "own/run", tmp_path / "served/run"
    assert_same(own / "checkpoint-3", theirs / "checkpoint-3")
    evaluated = [
        [line["eval_reward"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
         if "eval_reward" in line]
        for run in (own, theirs)
    ]  # fmt: skip
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 2


def test_the_status_names_the_server_that_is_waited_for_and_the_run_stops(
    tmp_path: Path, pair: list[Process]
) -> None:
    server = pair[0]
    words = ["--max_steps", "1000", "--output_dir", "run", "--rollout_timeout", "3"]
    run, said = start(tmp_path, [server], *words)
    wait_for(lambda: steps(tmp_path) >= 2 or run.exitcode is not None)
    try:
        server.send(signal.SIGSTOP)
        stopped = time.monotonic()
        status = tmp_path / "run/status-rank-0.json"
        wait_for(lambda: status.is_file() and json.loads(status.read_text())["service"], 10)
        assert json.loads(status.read_text())["service"] == server.address
        code = ended(run, 30)
        assert time.monotonic() - stopped < 25
    finally:
        server.send(signal.SIGCONT)
        run.kill()
    # In the middle of a rollout its completions are lost (F138); else it takes no weights.
    expected = {3: "F138", 1: "F14[01]"}[code or 0]
    words = " ".join(said.read_text().split())
    assert re.search(rf"{expected} .*{re.escape(server.address)}: it did not respond in time", words), words


def test_a_server_waits_for_the_next_run_where_its_run_is_killed(tmp_path: Path, pair: list[Process]) -> None:
    """And while a run uses it, another one is refused before it loads weights."""
    words = ["--output_dir", "run", "--max_steps", "1000"]
    first, _ = start(tmp_path, pair, *words)
    wait_for(lambda: steps(tmp_path) >= 1 or first.exitcode is not None)
    other = tmp_path / "other"
    other.mkdir()
    second, said = start(other, pair, *words)
    assert ended(second) == 2
    assert "E424" in said.read_text() and "is used by the run" in said.read_text()
    first.kill()
    first.join()
    third, said = start(other, pair, "--output_dir", "run", "--max_steps", "1")
    assert ended(third) == 0, said.read_text()
    assert all(server.code is None for server in pair)


def test_a_server_ends_with_its_run_where_that_was_typed(tmp_path: Path) -> None:
    with processes(tmp_path, 1, "--end_with_run") as (server,):
        engine = engine_on([server.address], token=server.token)
        engine.publish(plain_weights(policy_of_server()), 0)
        assert server.code is None
        engine.close()
        assert server.ends_with(20) == 0


def test_hundreds_of_silent_connections_leave_a_server_with_few_files_to_its_run(tmp_path: Path) -> None:
    with processes(tmp_path) as (server,):
        pid = server.process.pid
        assert pid is not None
        caller = Caller(address=server.address, token=server.token, timeout_s=20.0)
        num_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        # Fewer than the connections that it would grant to those without a token.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open + 40, num_open + 40))
        silent = [socket.socket() for _ in range(400)]
        for one in silent:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", server.port))
        seconds = []
        for _ in range(5):
            started = time.monotonic()
            assert caller.status().engine == "native"
            seconds.append(time.monotonic() - started)
        assert statistics.median(seconds) < 5.0, seconds
        before, started = cpu_seconds(pid), time.monotonic()
        time.sleep(1.0)
        assert cpu_seconds(pid) - before < 0.5 * (time.monotonic() - started)
        for one in silent:
            one.close()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.needs("openssl")
def test_over_tls_the_certificate_is_checked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policies: list[Policy],
    requests: list[GenerationRequest],
    expected: list[Plain],
) -> None:
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2"
    make += " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    with processes(tmp_path, 1, "--ssl_certfile", "cert.pem", "--ssl_keyfile", "key.pem") as (server,):
        assert server.address.startswith("https://")
        engine = engine_on([server.address], token=server.token)
        with pytest.raises(RunFailed, match="certificate verify failed"):
            engine.publish(plain_weights(policies[0]), 0)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        engine.publish(plain_weights(policies[0]), 1)
        assert tokens(sampled(engine, requests[:8])) == tokens(expected[:8])
        engine.close()


def test_only_this_machine_reaches_a_server(pair: list[Process]) -> None:
    found = listening(os.getpid())
    # What listens in the tests' other processes is none of this.
    ports = {server.port for server in pair}
    assert ports <= set(found["127.0.0.1"])
    assert not ports & {port for address, own in found.items() if address != "127.0.0.1" for port in own}
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in {*others, "127.0.0.2"} - {"127.0.0.1"}:
        for port in ports:
            with pytest.raises(OSError), socket.create_connection((str(address), port), 2):
                pass


def test_signals_end_a_server(tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        with processes(tmp_path, 1) as (server,):
            server.send(number)
            assert server.ends_with(15) == code
