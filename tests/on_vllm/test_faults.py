"""vLLM behind servers that are stopped or killed in a rollout, and behind a run that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.rollout.server.call import Caller
from covey.types import GenerationRequest
from support.engines import Plain, sampled
from support.servers import TOKEN, engine_on
from support.vllm_learner import Learner, prompts, request_of

pytestmark = pytest.mark.vllm

ROLLOUT = (
    "rollout --model quickstart --engine vllm --port 0 --vllm_max_model_len 256 --max_rows 16 "
    "--vllm_enforce_eager true --token_file t.token"
)
TRAIN = (
    "train --model quickstart --dataset quickstart#64 --reward_funcs accuracy --max_completion_length 16 "
    "--learning_rate 1e-3 --per_device_train_batch_size 8 --max_steps 1000 --save_steps 1000 "
    "--num_generations 4 --use_vllm true --vllm_mode server --rollout_token_file t.token --output_dir out"
)
CLOSE = 1e-4
# A machine with other work needs seconds for a step of vLLM.
TIMEOUT_S = 10.0
# Short ones end while the others run.
REQUESTS = [
    request_of(prompt, 10 * number + sibling, max_new_tokens=8 if sibling == 0 else 120)
    for number, prompt in enumerate(prompts(4))
    for sibling in range(8)
]


@dataclass
class Served:
    """A server's process, and where it listens."""

    process: subprocess.Popen[bytes]
    said: Path
    address: str = ""

    def status(self) -> Any:
        return Caller(address=self.address, token=TOKEN, timeout_s=TIMEOUT_S).status()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the servers and of the run, with their token."""
    made = tmp_path_factory.mktemp("servers")
    (made / "t.token").touch(mode=0o600)
    (made / "t.token").write_text(TOKEN)
    return made


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[list[Served]]:
    """Three servers that start at once; the last one ends with its run."""
    started = []
    try:
        for name, more in (("a", ()), ("b", ()), ("c", ("--end_with_run", "true"))):
            started.append(Served(start(folder, name, *ROLLOUT.split(), *more), folder / name))
        for server in started:
            wait_for(lambda s=server: "ready " in s.said.read_text(), server.process, server.said, 400)
            server.address = server.said.read_text().split("ready ")[1].split()[0]
        yield started
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def start(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    """A command of covey in the directory; what it says goes to the file of its name."""
    with (folder / name).open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "covey", *words], cwd=folder, stdout=out, stderr=out)


def wait_for(holds: Callable[[], object], process: Any, said: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < until, said.read_text()[-3000:]
        time.sleep(0.2)


def assert_whole(
    learner: Learner, requests: Sequence[GenerationRequest], found: list[Plain], version: int
) -> None:
    """Every completion is as long as was asked for, of one version, and the learner's."""
    assert [len(c.token_ids) for c in found] == [r.sampling.max_new_tokens for r in requests]
    assert {v for c in found for v in c.versions} == {version}
    assert max(map(learner.gap, requests, found)) < CLOSE


def test_a_server_that_is_stopped_is_given_up_and_comes_back(three: list[Served], learner: Learner) -> None:
    first, second = three[:2]
    engine = engine_on([first.address, second.address], timeout_s=TIMEOUT_S, noise_keys=False)
    assert len(engine.publish(learner.weights(), 0).members) == 2
    started = time.monotonic()
    found = sampled(engine, REQUESTS, lambda: second.process.send_signal(signal.SIGSTOP))
    assert_whole(learner, REQUESTS, found, 0)
    other = learner.changed(1)
    assert list(engine.publish(other.weights(), 1).members) == [first.address]
    assert time.monotonic() - started < 8 * TIMEOUT_S
    said = [notice.seen for notice in engine.take_notices()]
    assert said and all(second.address in words and "did not respond in time" in words for words in said)
    second.process.send_signal(signal.SIGCONT)
    wait_for(lambda: second.status(), second.process, second.said, 60)
    assert len(engine.publish(other.weights(), 2).members) == 2
    assert_whole(other, REQUESTS[:8], sampled(engine.members[second.address], REQUESTS[:8]), 2)
    engine.close()


def test_a_run_that_is_killed_leaves_its_servers(three: list[Served], folder: Path, learner: Learner) -> None:
    """One waits for the next run, which samples from its own weights; one ends, as was typed."""
    waits, ends = three[0], three[2]
    run = start(folder, "run", *TRAIN.split(), "--vllm_server_base_url", waits.address, ends.address)
    metrics = folder / "out" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.is_file() and metrics.read_text(), run, folder / "run", 300)
        assert waits.status().run
    finally:
        run.kill()
        run.wait()
    assert ends.process.wait(60) == 0
    wait_for(lambda: not waits.status().run, waits.process, waits.said, 30)
    engine = engine_on([waits.address], timeout_s=TIMEOUT_S, noise_keys=False, run="run-2")
    engine.publish(learner.weights(), 5)
    assert_whole(learner, REQUESTS[:8], sampled(engine, REQUESTS[:8]), 5)
    engine.close()


def test_a_server_that_is_killed_in_a_rollout_loses_nothing(three: list[Served], learner: Learner) -> None:
    first, second = three[:2]
    engine = engine_on([first.address, second.address], timeout_s=TIMEOUT_S, noise_keys=False)
    assert len(engine.publish(learner.weights(), 0).members) == 2
    assert_whole(learner, REQUESTS, sampled(engine, REQUESTS, second.process.kill), 0)
    assert list(engine.publish(learner.weights(), 1).members) == [first.address]
    notices = engine.take_notices()
    assert notices and all(n.code == "W180" and second.address in n.seen for n in notices)
    engine.close()
