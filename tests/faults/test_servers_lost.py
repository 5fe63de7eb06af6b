"""All rollout servers are gone in the middle of a rollout or an evaluation.

The missing completions do not count as a reward of 0: the run stops with one message that names each server,
and goes on to the bits of an undisturbed one when the servers are back.
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

from covey.telemetry.rollouts import read_rollouts
from faults import server_run
from faults.test_ranks import assert_same_tensors
from support.ranks import Ended, run_ranks
from support.servers import Process, processes

pytestmark = pytest.mark.multi

WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "accuracy", "format"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "16", "--learning_rate", "1e-4"),
    *("--num_generations", "4", "--reward_trial", "false", "--max_steps", "4", "--save_steps", "2"),
    *("--output_dir", "run", "--resume_from_checkpoint", "auto"),
]
EVALUATED = ["--val_dataset", "quickstart#8", "--eval_steps", "2", "--eval_on_start", "no"]
OPTIONS = {"rollout": WORDS, "evaluate": [*WORDS, *EVALUATED]}


@contextmanager
def at_ports(folder: Path, ports: list[int]) -> Iterator[list[Process]]:
    """A server at each of these ports, as it was before."""
    with ExitStack() as stack:
        yield [stack.enter_context(processes(folder, 1, port=port))[0] for port in ports]


def run(
    folder: Path, servers: list[Process], phase: str, left: int = 0, *, world: int = 1, rank: int = 0
) -> Ended:
    """A run of four steps on the servers, which begins at its newest checkpoint; all of them are killed when
    `left` completions of a rank are missing (0: none is killed)."""
    pids = ",".join(str(server.process.pid) for server in servers) if left else ""
    on = ["--rollout_servers", *(server.address for server in servers)] if servers else []
    on += ["--rollout_token_file", str(servers[0].token_file)] if servers else []
    words = [*OPTIONS[phase], *on]
    plan = (phase, left, rank, pids) if left else ("", 0, -1, "")
    return run_ranks(server_run.__file__, *plan, "train", *words, folder=folder, world=world)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The run that nothing happens to, on engines of its own."""

    @functools.cache
    def of(phase: str, world: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = run(folder, [], phase, world=world)
        assert ended.code == 0, ended.said
        return folder / "run"

    return of


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file of the run."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def assert_stopped(ended: Ended, out: Path, code: str, exit_code: int, addresses: list[str]) -> str:
    """It ended with one message that names each server and why it was lost; returns what the message saw."""
    assert ended.code == exit_code, ended.said
    assert ended.left == []
    assert re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE) == [code], ended.said
    (found,) = [e for e in lines(out, "events.jsonl") if e["kind"] == "finding" and e["code"] == code]
    for address in addresses:
        assert re.search(rf"{re.escape(address)}: [^;]*Connection refused", found["seen"]), found["seen"]
    return str(found["seen"])


@pytest.mark.parametrize(
    ("left", "world", "rank"),
    [
        *((8, 1, 0), pytest.param(3, 1, 0, marks=pytest.mark.slow)),
        *((8, 2, 1), pytest.param(3, 2, 0, marks=pytest.mark.slow)),
    ],
    ids=["all", "some", "all of rank 1", "some of rank 0"],
)
def test_a_rollout_without_servers_stops_and_goes_on_when_they_are_back(
    left: int, world: int, rank: int, undisturbed: Callable[[str, int], Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with processes(tmp_path, 2) as servers:
        ended = run(tmp_path, servers, "rollout", left, world=world, rank=rank)
        addresses, ports = [s.address for s in servers], [s.port for s in servers]
    seen = assert_stopped(ended, out, "F138", 3, addresses)
    counted = re.search(r"(\d+) of (\d+) completions were lost", seen)
    # The other rank may lose some, too.
    assert counted is not None and int(counted[1]) >= left and int(counted[2]) == 8 * world, seen
    # Nothing was learned from the rollout, and it left no records.
    assert [line["step"] for line in lines(out, "metrics.jsonl")] == [1, 2]
    assert [number for number, _ in read_rollouts(out / "rollouts")] == [0, 1]
    with at_ports(tmp_path, ports) as servers:
        again = run(tmp_path, servers, "rollout", world=world)
    assert again.code == 0, again.said
    assert_same_tensors(out, undisturbed("rollout", world), 4)


def test_one_lost_completion_is_left_out_and_the_next_publish_stops(
    undisturbed: Callable[[str, int], Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with processes(tmp_path, 2) as servers:
        ended = run(tmp_path, servers, "rollout", 1)
        addresses, ports = [s.address for s in servers], [s.port for s in servers]
    assert_stopped(ended, out, "F140", 1, addresses)
    said = [e["seen"] for e in lines(out, "events.jsonl") if e.get("code") == "W180"]
    assert all(any(address in seen for seen in said) for address in addresses)
    *_, last = lines(out, "metrics.jsonl")
    assert last["step"] == 3 and last["outcome/infrastructure"] == 1 and last["rows/masked"] == 1
    assert last["n"]["reward"] == 7
    *_, (_, records) = read_rollouts(out / "rollouts")
    (lost,) = [r for r in records if r["finish"] == "infrastructure"]
    assert (lost["masked"], lost["reward"], lost["completion_ids"]) == ("infrastructure", None, [])
    assert all(address in lost["failure"] for address in addresses)
    assert [p["value"] for p in lost["parts"]] == [None, None]
    with at_ports(tmp_path, ports) as servers:
        again = run(tmp_path, servers, "rollout")
    assert again.code == 0, again.said
    # It begins at the checkpoint before that rollout.
    assert_same_tensors(out, undisturbed("rollout", 1), 4)


@pytest.mark.parametrize(("left", "world"), [(1, 1), pytest.param(8, 2, marks=pytest.mark.slow)])
def test_an_evaluation_without_servers_stops_and_is_made_when_they_are_back(
    left: int, world: int, undisturbed: Callable[[str, int], Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with processes(tmp_path, 2) as servers:
        ended = run(tmp_path, servers, "evaluate", left, world=world)
        addresses, ports = [s.address for s in servers], [s.port for s in servers]
    assert_stopped(ended, out, "F138", 3, addresses)
    # The step has been taken; it has no evaluation.
    assert [(m["step"], "eval_reward" in m) for m in lines(out, "metrics.jsonl")] == [(1, False), (2, False)]
    with at_ports(tmp_path, ports) as servers:
        again = run(tmp_path, servers, "evaluate", world=world)
    assert again.code == 0, again.said
    assert_same_tensors(out, undisturbed("evaluate", world), 4)
    expected = [m["eval_reward"] for m in lines(undisturbed("evaluate", world), "metrics.jsonl")[1::2]]
    ours = [e["eval_reward"] for e in lines(out, "events.jsonl") if "eval_reward" in e]
    assert [*ours, lines(out, "metrics.jsonl")[-1]["eval_reward"]] == expected
