"""Servers and ranks that are lost in the middle of an episode of several turns.

The file is told apart by its name: runs here have an environment of three turns, and what is compared is the
run that nothing happened to.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.data.text import load_codec
from covey.models.lora import plain_weights
from covey.quickstart import task
from covey.rollout.native.engine import NativeEngine
from covey.telemetry.rollouts import read_rollouts
from covey.types import Completion, Outcome
from faults import turns_run
from faults.test_ranks import assert_same_tensors
from support.ranks import Ended, run_ranks
from support.servers import Process, engine_on, policy_of_server, processes
from support.sums import Played, play, sum_prompts, sums_agents, sums_file

pytestmark = pytest.mark.multi

WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#64", "--num_generations", "4"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "64", "--learning_rate", "1e-4"),
    *("--max_steps", "4", "--save_steps", "2", "--output_dir", "run", "--resume_from_checkpoint", "auto"),
]
NUM = 8
"""Episodes of a rank in a rollout."""


# -- the turns of one rollout


def soon(key: int, turn: int) -> float:
    return 0.005 * ((7 * key + 3 * turn) % 9)


def played(engine: Any, on_completion: Callable[[Completion], None] = lambda completion: None) -> Played:
    codec = load_codec(task.MODEL_DIR)
    prompts = sum_prompts(codec, 4)
    return play(engine, prompts, codec, sums_agents(codec, soon), on_completion=on_completion)


class Kills:
    """Kills servers when so many completions have come, which are in the second turn or further."""

    def __init__(self, servers: list[Process], after: int) -> None:
        self.servers, self.left = servers, after

    def __call__(self, completion: Completion) -> None:
        self.left -= 1
        if self.left == 0:
            for server in self.servers:
                server.kill()


# Of 48 completions 32 are first and second turns.
@pytest.mark.parametrize("after", [20, 31, 40], ids=["early", "late", "in turn three"])
def test_the_other_server_goes_on_with_the_turns_of_one_that_is_killed(after: int, tmp_path: Path) -> None:
    """It has no row that they extend, and computes them from their first token on; they are the same."""
    policy = policy_of_server()
    expected = played(NativeEngine(policy))
    with processes(tmp_path, 2) as servers:
        engine = engine_on([server.address for server in servers], token=servers[0].token)
        engine.publish(plain_weights(policy), 0)
        found = played(engine, Kills(servers[:1], after))
        engine.close()
    assert found.tokens == expected.tokens and found.texts == expected.texts
    assert {len(episode.turns) for episode in found.episodes} == {3}


def test_without_a_server_what_has_not_ended_is_lost(tmp_path: Path) -> None:
    """Episodes that ended before stay; the others have no tokens, and say what was lost."""
    policy = policy_of_server()
    expected = played(NativeEngine(policy))
    with processes(tmp_path, 2) as servers:
        engine = engine_on([server.address for server in servers], token=servers[0].token)
        engine.publish(plain_weights(policy), 0)
        found = played(engine, Kills(servers, 40))
        engine.close()
    kinds = [episode.outcome for episode in found.episodes]
    lost = [episode for episode in found.episodes if episode.outcome is Outcome.INFRASTRUCTURE]
    assert 0 < len(lost) < len(kinds)
    for server in servers:
        assert all(server.address in episode.failure for episode in lost)
    assert all("no rollout server is left" in episode.failure for episode in lost)
    for own, due in zip(found.episodes, expected.episodes, strict=True):
        if own.outcome is Outcome.INFRASTRUCTURE:
            assert own.sequences == () and own.turns == ()
        else:
            assert [s.token_ids.tolist() for s in own.sequences] == [
                s.token_ids.tolist() for s in due.sequences
            ]


# -- whole runs


def run(
    folder: Path,
    fault: str = "none",
    *,
    servers: list[Process] = [],  # noqa: B006 - never changed
    kills: int = 0,
    world: int = 1,
) -> Ended:
    """A run of four steps, on servers or on engines of its own; so many of the servers are killed."""
    words = [*WORDS, "--environment_factory", sums_file(folder)]
    if servers:
        words += ["--rollout_servers", *(server.address for server in servers)]
        words += ["--rollout_token_file", str(servers[0].token_file)]
    pids = ",".join(str(server.process.pid) for server in servers[:kills])
    return run_ranks(turns_run.__file__, fault, world - 1, pids, "train", *words, folder=folder, world=world)


@contextmanager
def at_ports(folder: Path, ports: list[int]) -> Iterator[list[Process]]:
    """A server at each of these ports, as it was before."""
    with ExitStack() as stack:
        yield [stack.enter_context(processes(folder, 1, port=port))[0] for port in ports]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The run that nothing happens to, on engines of its own."""

    @functools.cache
    def of(world: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = run(folder, world=world)
        assert ended.code == 0, ended.said
        return folder / "run"

    return of


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def records_of(out: Path) -> list[dict[str, Any]]:
    """All rollout records, rollout by rollout in the order of their slots, but for what a clock says."""
    every = [
        record
        for _, records in read_rollouts(out / "rollouts")
        for record in sorted(records, key=lambda record: (record["group"], record["sibling"]))
    ]
    found: list[dict[str, Any]] = json.loads(re.sub(r'"seconds": [^,}]*', '"seconds": 0', json.dumps(every)))
    return found


def assert_same_records(out: Path, expected: Path) -> None:
    """The same to the letter, but that a conversation that is computed anew, as a whole, may have other last
    digits of what it was sampled with."""
    found, due = records_of(out), records_of(expected)
    for own, other in zip(found, due, strict=True):
        logprobs = own.pop("sampler_logprobs"), other.pop("sampler_logprobs")
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert found == due


def test_a_run_goes_on_with_the_server_that_is_left(
    undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    with processes(tmp_path, 2) as servers:
        ended = run(tmp_path, "servers", servers=servers, kills=1)
        lost = servers[0].address
    assert ended.code == 0, ended.said
    seen = [e["seen"] for e in lines(tmp_path / "run", "events.jsonl") if e.get("code") == "W180"]
    assert any(lost in words for words in seen) and f"{lost} is not used again" in ended.said
    assert_same_records(tmp_path / "run", undisturbed(1))
    assert_same_tensors(tmp_path / "run", undisturbed(1), 4)


def test_a_run_without_servers_stops_and_goes_on_when_they_are_back(
    undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with processes(tmp_path, 2) as servers:
        ended = run(tmp_path, "servers", servers=servers, kills=2)
        ports = [server.port for server in servers]
    (code,) = re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE)
    assert code == "F138" and ended.code == 3 and ended.left == [], ended.said
    (found,) = [e for e in lines(out, "events.jsonl") if e.get("code") == code]
    assert re.search(rf"\d of {NUM} completions were lost", found["seen"]), found["seen"]
    assert [line["step"] for line in lines(out, "metrics.jsonl")] == [1, 2]
    with at_ports(tmp_path, ports) as servers:
        again = run(tmp_path, servers=servers)
    assert again.code == 0, again.said
    assert_same_tensors(out, undisturbed(1), 4)


@pytest.mark.parametrize(("fault", "code"), [("kill", "F133"), ("stop", "F134")])
def test_a_rank_that_is_lost_while_its_environments_work(
    fault: str, code: str, undisturbed: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends within seconds, no environment is left, and the run goes on to the same bits."""
    monkeypatch.setenv("COVEY_TEST_SLOW_S", "0.2")
    ended = run(tmp_path, fault, world=2)
    assert ended.code == {"kill": 1, "stop": 3}[fault], ended.said
    assert re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE) == [code], ended.said
    assert "rank 1" in ended.said and ended.left == []
    monkeypatch.delenv("COVEY_TEST_SLOW_S")
    again = run(tmp_path, world=2)
    assert again.code == 0, again.said
    assert_same_tensors(tmp_path / "run", undisturbed(2), 4)
