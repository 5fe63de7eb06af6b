"""Runs of episodes of several turns: the same however a step is cut, on any number of ranks with any backend,
and replayed.

Each run samples its own rollouts, of three turns an episode, with a KL term. With a template that drops the
thoughts of earlier turns most episodes have several sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.selftest.compare import far
from covey.telemetry.rollouts import read_rollouts
from support.exactness import GRADIENT, assert_same_steps, assert_sees
from support.runs import Result, options, train_and_watch, train_in_processes
from support.sums import sums_file, thinking_template

ROWS, STEPS = 16, 4
KINDS = ("one sequence", "several sequences")
TIMES = ("time/", "throughput/", "memory/", "policy_age")


def opts(output: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """A run of four steps of 4 prompts x 4 episodes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {
        "environment_factory": sums_file(output.parent),
        "reward_funcs": [],
        "max_completion_length": 96,
        "num_generations": 4,
        "per_device_train_batch_size": ROWS,
        "mask_truncated_completions": False,
        "max_steps": STEPS,
        "learning_rate": 1e-4,
        "beta": 0.05,
    }
    if kind == "several sequences":
        own["chat_template"] = thinking_template(output.parent)
    return options(Path("quickstart"), output, **{**own, **changes})


def completions(run: Path) -> list[dict[str, Any]]:
    """The records of a run but for the times."""
    timeless = []
    for record in (r for _, records in read_rollouts(run / "rollouts") for r in records):
        turns = [{k: v for k, v in turn.items() if k != "seconds"} for turn in record["turns"]]
        timeless.append({**record, "turns": turns, "seconds": 0.0})
    return timeless


def tokens(run: Path) -> list[Any]:
    """What was sampled, and what stood between."""
    return [(r["prompt_ids"], r["completion_ids"], r.get("sequences")) for r in completions_of_tokens(run)]


def completions_of_tokens(run: Path) -> list[dict[str, Any]]:
    """Records whose sequences have their tokens alone."""
    found = completions(run)
    for record in found:
        if record.get("sequences"):
            record["sequences"] = [
                {k: v for k, v in own.items() if k != "sampler_logprobs"} for own in record["sequences"]
            ]
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Result]]:
    """The reference: each step of one process in as few passes as there may be."""
    root = tmp_path_factory.mktemp("whole")
    runs = {kind: root / kind.replace(" ", "-") / "run" for kind in KINDS}
    return {kind: (run, train_and_watch(opts(run, kind))) for kind, run in runs.items()}


def assert_same(run: Path, actual: Result, expected: tuple[Path, Result]) -> None:
    assert tokens(run) == tokens(expected[0])
    assert_same_steps(actual, expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_have_several_turns(kind: str, whole: Mapping[str, tuple[Path, Result]]) -> None:
    """The comparisons below are not blind."""
    run, result = whole[kind]
    rows = completions(run)
    assert len(rows) == STEPS * ROWS
    assert sum(len(row["turns"]) == 3 for row in rows) > 0.9 * len(rows)
    several = sum(len(row.get("sequences") or ()) > 0 for row in rows)
    assert several > 0.7 * len(rows) if kind == "several sequences" else several == 0
    assert all(m["kl"] is not None and m["grad_norm"] > 0 for m in metrics(run))
    assert metrics(run)[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    assert_sees(lambda got, due: assert_same(run, got, (run, due)), result)


@pytest.mark.parametrize("split", [(8, 2), (4, 4), (1, 16)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_of_a_step(
    kind: str, split: tuple[int, int], whole: Mapping[str, tuple[Path, Result]], tmp_path: Path
) -> None:
    batch, accumulation = split
    cut = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    run = tmp_path / "run"
    result = train_and_watch(opts(run, kind, **cut))
    assert_same(run, result, whole[kind])
    assert min(result.forwards) >= accumulation // 2 and sum(result.forwards) > sum(whole[kind][1].forwards)


BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": "full_shard"},
    "zero3": {"deepspeed": "zero3"},
}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend: str, whole: Mapping[str, tuple[Path, Result]], tmp_path: Path) -> None:
    """Each rank plays half of the episodes with tools and environments of its own."""
    runs = {kind: tmp_path / kind.replace(" ", "-") for kind in KINDS}
    shared = {"per_device_train_batch_size": ROWS // 2, **BACKENDS[backend]}
    found = train_in_processes([opts(run, kind, **shared) for kind, run in runs.items()], tmp_path / "work")
    for (kind, run), result in zip(runs.items(), found, strict=True):
        assert_same(run, result, whole[kind])
        for step in range(STEPS):
            assert far(result.gradients[step], whole[kind][1].gradients[step]) <= 3 * GRADIENT
        weights = [(result.after[n] - due).abs().max() for n, due in whole[kind][1].after.items()]
        assert float(max(weights)) < 2e-6


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_is_the_same_run(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    sampled = train_and_watch(opts(tmp_path / "sampled", kind, **changes))
    again = train_and_watch(
        opts(tmp_path / "again", kind, replay_rollouts=str(tmp_path / "sampled" / "rollouts"), **changes)
    )
    assert metrics(tmp_path / "again") == metrics(tmp_path / "sampled")
    assert all(torch.equal(again.after[name], sampled.after[name]) for name in sampled.after)
    assert any(not torch.equal(again.after[name], again.before[name]) for name in again.after)


def test_generate_samples_the_same_run(whole: Mapping[str, tuple[Path, Result]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train_and_watch(opts(run, KINDS[0], engine="generate"))
    assert_same(run, result, whole[KINDS[0]])
