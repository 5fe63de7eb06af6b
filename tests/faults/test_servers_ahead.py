"""Servers, the run, or both are killed while rollouts are sampled ahead.

What a version samples depends on the clock here, so no bits are compared: prompts come in the order of a run
that nothing happens to, each with all of its completions, and none is there twice.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from covey.rollout.server.call import Caller
from covey.telemetry.rollouts import read_rollouts
from faults import ahead_run
from faults.test_ranks import REWARD
from faults.test_restarts import started
from faults.test_server_groups import free_ports
from support.ranks import Ended, run_ranks
from support.servers import Process, processes, program
from support.sums import sums_file, thinking_template

pytestmark = pytest.mark.multi
# Takes minutes in all; of each kind the hardest case is among the others.
SLOW = pytest.mark.slow

AHEAD, STEPS, REST_S = 2, 6, 0.1
WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "mine.py:judge"),
    *("--per_device_train_batch_size", "8", "--max_completion_length", "96", "--learning_rate", "1e-4"),
    *("--num_generations", "4", "--reward_trial", "false", "--save_steps", "2", "--output_dir", "run"),
]
# Completions at this temperature seldom end before their limit.
LONG = ("--temperature", "2")
# A few rows side by side, so that rollouts that are ahead wait for those before.
ROWS = ("--max_rows", "4")


def words_of(servers: list[Process], more: tuple[str, ...] = LONG, steps: int = STEPS) -> list[str]:
    """The words of a run that samples ahead on these servers; without any on an engine of its own, in
    turn."""
    words = [*WORDS, "--max_steps", str(steps), *more]
    if servers:
        words += ["--rollout_servers", *(server.address for server in servers)]
        words += ["--rollout_token_file", str(servers[0].token_file), "--max_staleness", str(AHEAD)]
    return words


def run(
    folder: Path,
    servers: list[Process],
    fault: str = "none",
    *,
    kills: int = 0,
    world: int = 1,
    more: tuple[str, ...] = LONG,
) -> Ended:
    """A run of six rollouts; in the middle of the fifth, or of a publish, so many of the servers are killed
    or stopped, and the last rank with the fault `kill`; or it is sent SIGTERM with `term`."""
    (folder / "mine.py").write_text(REWARD)
    pids = ",".join(str(server.process.pid) for server in servers[:kills])
    words = [*words_of(servers, more), "--resume_from_checkpoint", "auto"]
    return run_ranks(
        ahead_run.__file__, fault, 4, 2, world - 1, pids, "train", *words, folder=folder, world=world
    )


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[list[Process]]:
    with processes(tmp_path, 2, *ROWS, rest_s=REST_S) as servers:
        yield servers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run that nothing happens to, in turn on engines of its own."""

    @functools.cache
    def of(world: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = run(folder, [], world=world)
        assert ended.code == 0, ended.said
        return folder / "run"

    return of


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file of the run."""
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def kept(out: Path) -> list[list[dict[str, Any]]]:
    """The records of each rollout, in the order of its slots."""
    key = ("group", "sibling")
    return [
        sorted(records, key=lambda r: [r[n] for n in key]) for _, records in read_rollouts(out / "rollouts")
    ]


def drawn(out: Path) -> list[list[tuple[int, int]]]:
    """The prompt and sibling of each completion, rollout by rollout."""
    return [[(r["prompt_id"], r["sibling"]) for r in records] for records in kept(out)]


def assert_whole(out: Path, expected: Path) -> None:
    """The prompts of the other run in its order, each completion once, sampled, and not older than it may
    be."""
    assert drawn(out) == drawn(expected)[: len(drawn(out))] and len(drawn(out)) >= STEPS
    for number, records in enumerate(kept(out)):
        assert {r["finish"] for r in records} <= {"stop", "length"}
        assert all(r["reward"] is not None for r in records)
        assert all(max(0, number - AHEAD) <= v <= number for r in records for v in r["versions"])
    found = lines(out, "metrics.jsonl")
    assert [m["step"] for m in found] == list(range(1, len(found) + 1))
    gaps = [m["sampling/sampling_logp_difference/mean"] for m in found]
    assert all(gap is None or gap < 1e-5 for gap in gaps) and any(gap is not None for gap in gaps)
    assert max(m["age/max"] for m in found) > 0


def is_mixed(out: Path) -> bool:
    """Whether versions changed in the middle of an episode."""
    return any(len(set(r["versions"])) > 1 for records in kept(out) for r in records)


def notices(out: Path) -> list[str]:
    """What was said of servers that were lost."""
    return [e["seen"] for e in lines(out, "events.jsonl") if e.get("code") == "W180"]


# -- servers


@pytest.mark.parametrize(
    ("fault", "world"),
    [
        ("servers", 1),
        *(pytest.param(*case, marks=SLOW) for case in (("servers", 2), ("publish", 1), ("stop", 2))),
    ],
)
def test_a_server_that_is_lost_loses_nothing(
    fault: str, world: int, slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """Killed in a rollout or in a publish, or stopped, so that it gives no sign."""
    more = ("--rollout_timeout", "5") if fault == "stop" else ()
    ended = run(tmp_path, slow, fault, kills=1, world=world, more=(*LONG, *more))
    assert ended.code == 0 and ended.left == [], ended.said
    assert (slow[0].code is not None) == (fault != "stop") and slow[1].code is None
    assert any(slow[0].address in seen for seen in notices(tmp_path / "run"))
    assert_whole(tmp_path / "run", undisturbed(world))


@pytest.mark.parametrize("how", ["ddp", *(pytest.param(how, marks=SLOW) for how in ("fsdp2", "group"))])
def test_two_ranks_sample_ahead_on_two_servers(
    how: str, slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where ranks hold parts of the weights, and where these come through process groups."""
    port = str(max(free_ports(2)))
    words = {"fsdp2": ("--fsdp", "full_shard"), "group": ("--vllm_server_group_port", port)}
    ended = run(tmp_path, slow, world=2, more=(*LONG, *words.get(how, ())))
    assert ended.code == 0 and ended.left == [], ended.said
    # Of servers that are lost, and of groups that are (W183).
    codes = {e.get("code") for e in lines(tmp_path / "run", "events.jsonl")}
    assert not codes & {"W180", "W183"}
    assert_whole(tmp_path / "run", undisturbed(2))
    assert is_mixed(tmp_path / "run")


@SLOW
def test_without_servers_the_run_stops_and_goes_on_when_they_are_back(
    slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    ended = run(tmp_path, slow, "servers", kills=2)
    # Which part of the run finds them gone first is up to the clock.
    (code,) = re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE)
    assert code in ("F138", "F140", "F141") and ended.left == [], ended.said
    with ExitStack() as stack:
        back = [
            stack.enter_context(processes(tmp_path, 1, *ROWS, port=server.port, rest_s=REST_S))[0]
            for server in slow
        ]
        again = run(tmp_path, back)
    assert again.code == 0, again.said
    assert_whole(tmp_path / "run", undisturbed())


def test_a_server_that_comes_back_is_used_after_the_next_publish(
    slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """And SIGTERM ends the run within seconds, with a checkpoint."""
    out = tmp_path / "run"
    (tmp_path / "mine.py").write_text(REWARD)
    process, said = program(
        tmp_path, ahead_run.__file__, "none", "0", "0", "0", "", "train", *words_of(slow, steps=1000)
    )
    try:
        wait_for(lambda: (out / "metrics.jsonl").is_file() and len(lines(out, "metrics.jsonl")) >= 2, said)
        slow[0].kill()
        wait_for(lambda: notices(out), said)
        with processes(tmp_path, 1, *ROWS, port=slow[0].port, rest_s=REST_S) as (back,):
            caller = Caller(address=back.address, token=back.token, timeout_s=10.0)
            wait_for(lambda: caller.status().version > 0, said)
            num_before = len(lines(out, "metrics.jsonl"))
            wait_for(lambda: len(lines(out, "metrics.jsonl")) >= num_before + 3, said)
            wait_for(lambda: sampled_by(back) > 0, said)
            began = time.monotonic()
            process.terminate()
            process.join(20)
            assert process.exitcode == 143, said.read_text()
            assert time.monotonic() - began < 10.0
    finally:
        process.kill()
    num = len(lines(out, "metrics.jsonl"))
    assert f"checkpoint-{num}" in {path.name for path in out.glob("checkpoint-*")}
    assert drawn(out)[:STEPS] == drawn(undisturbed())[:num]


def sampled_by(server: Process) -> int:
    """Completions that a server has ended, by its own count."""
    caller = Caller(address=server.address, token=server.token, timeout_s=10.0)
    with caller.open("GET", "/metrics", None) as answer:
        said = answer.response.read().decode()
    return sum(map(int, re.findall(r'completions_total\{finish="(?:stop|length)"\} (\d+)', said)))


def wait_for(holds: Callable[[], object], said: Path) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, said.read_text()[-3000:]
        time.sleep(0.1)


# -- the run


@pytest.mark.parametrize("kills", [pytest.param(0, marks=SLOW), 1], ids=["the run", "the run and a server"])
def test_a_run_that_is_killed_goes_on(
    kills: int, slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """From its newest checkpoint, on the servers that it had, of which one may have to be started again."""
    ended = run(tmp_path, slow, "kill", kills=kills)
    assert ended.code != 0 and ended.left == [], ended.said
    assert 2 <= len(lines(tmp_path / "run", "metrics.jsonl")) < STEPS
    with ExitStack() as stack:
        back = list(slow)
        for number in range(kills):
            started = processes(tmp_path, 1, *ROWS, port=slow[number].port, rest_s=REST_S)
            back[number] = stack.enter_context(started)[0]
        again = run(tmp_path, back)
        assert all(server.code is None for server in back)
    assert again.code == 0, again.said
    assert_whole(tmp_path / "run", undisturbed())
    assert len(drawn(tmp_path / "run")) == STEPS


@SLOW
def test_a_rank_that_is_killed_is_started_again(
    slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """By the command, which goes on from its newest checkpoint on the same servers."""
    ranks = ("--nproc_per_node", "2", "--max_restarts", "1")
    done = started(tmp_path / "it", "covey", "train", *words_of(slow), *ranks, rank="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "it" / "killed").exists()
    (seen,) = [e["seen"] for e in lines(tmp_path / "it" / "run", "events.jsonl") if e.get("code") == "W162"]
    assert "F133" in seen and "rank 1" in seen
    assert_whole(tmp_path / "it" / "run", undisturbed(2))


@SLOW
@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_in_the_middle_of_a_rollout(
    world: int, slow: list[Process], undisturbed: Callable[..., Path], tmp_path: Path
) -> None:
    """Ends the run with a checkpoint, as where rollouts are sampled in turn, and it goes on."""
    ended = run(tmp_path, slow, "term", world=world)
    seconds = time.time() - (tmp_path / "signalled").stat().st_mtime
    assert ended.code == 128 + signal.SIGTERM and ended.left == [], ended.said
    num = len(lines(tmp_path / "run", "metrics.jsonl"))
    assert num >= 3 and (tmp_path / "run" / f"checkpoint-{num}").is_dir()
    assert seconds < 8.0
    again = run(tmp_path, slow, world=world)
    assert again.code == 0, again.said
    assert_whole(tmp_path / "run", undisturbed(world))


# -- turns


@pytest.mark.parametrize(
    ("kills", "template"), [(1, ""), *(pytest.param(0, name, marks=SLOW) for name in ("", "thinking"))]
)
def test_versions_change_between_and_within_turns(
    kills: int, template: str, slow: list[Process], tmp_path: Path
) -> None:
    """Episodes of three turns, one of whose servers may be lost; with a template that drops thoughts each
    turn is a sequence of its own."""
    more = ("--environment_factory", sums_file(tmp_path), "--reward_funcs", "environment")
    more += ("--chat_template", thinking_template(tmp_path)) if template else ()
    ended = run(tmp_path, slow, "servers", kills=kills, more=more)
    assert ended.code == 0 and ended.left == [], ended.said
    assert bool(notices(tmp_path / "run")) == bool(kills)
    (tmp_path / "other").mkdir()
    other = run(tmp_path / "other", [], more=more)
    assert other.code == 0, other.said
    assert_whole(tmp_path / "run", tmp_path / "other" / "run")
    assert is_mixed(tmp_path / "run")
    records = [record for records in kept(tmp_path / "run") for record in records]
    assert sum(len(record["turns"]) == 3 for record in records) > len(records) / 2


def test_conversations_without_a_server_stop_the_run(slow: list[Process], tmp_path: Path) -> None:
    """Within seconds, and both servers are named."""
    more = ("--environment_factory", sums_file(tmp_path), "--reward_funcs", "environment")
    ended = run(tmp_path, slow, "servers", kills=2, more=more)
    # Which part of the run finds them gone first is up to the clock.
    (code,) = re.findall(r"^([EF]\d{3}) ", ended.said, re.MULTILINE)
    assert code in ("F138", "F140", "F141") and ended.left == [], ended.said
    (seen,) = [e["seen"] for e in lines(tmp_path / "run", "events.jsonl") if e.get("code") == code]
    assert all(server.address in seen for server in slow)
    assert len(lines(tmp_path / "run", "metrics.jsonl")) < STEPS
