"""Runs whose groups without signal are replaced: steps stay whole, wherever they run, and can be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.selftest.compare import far
from covey.telemetry.rollouts import read_rollouts
from support.runs import options, train_and_watch, train_in_processes

REWARD = '''
def half(prompts, completion_ids, **columns):
    """Some prompts always get 0; of the others most completions differ."""
    pairs = zip(prompts, completion_ids)
    return [0.0 if sum(map(ord, str(prompt))) % {of} else sum(ids) % 7.0 for prompt, ids in pairs]
'''
DYNAMIC = {"dynamic_sample": True, "max_resample_times": 12}


def opts(output: Path, of: int = 2, **changes: Any) -> dict[str, Any]:
    """Three steps of 8 prompts x 4 completions; of `of` prompts one has signal."""
    output.parent.mkdir(parents=True, exist_ok=True)
    reward = output.parent / "half.py"
    reward.write_text(REWARD.replace("{of}", str(of)))
    base = options(
        Path("quickstart"),
        output,
        max_steps=3,
        learning_rate=1e-4,
        per_device_train_batch_size=32,
        reward_funcs=[f"{reward}:half"],
        reward_trial=False,
    )
    return {**base, "mask_truncated_completions": False, **changes}


def rollouts(run: Path) -> list[list[dict[str, Any]]]:
    return [records for _, records in read_rollouts(run / "rollouts")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    output = tmp_path_factory.mktemp("dynamic") / "run"
    return output, train_and_watch(opts(output, **DYNAMIC)).metrics


def test_without_it_half_of_the_groups_are_flat(tmp_path: Path) -> None:
    result = train_and_watch(opts(tmp_path / "run"))
    assert sum(m["frac_reward_zero_std"] for m in result.metrics) >= 1.0
    assert not [name for m in result.metrics for name in m if name.startswith(("select/", "sampled/"))]


def test_every_group_has_signal_and_steps_are_whole(run: tuple[Path, list[dict[str, Any]]]) -> None:
    output, metrics = run
    assert [m["frac_reward_zero_std"] for m in metrics] == [0.0] * 3
    assert sum(m["sampled/frac_reward_zero_std"] for m in metrics) > 1.0
    assert [m["sampled/reward"] < m["reward"] for m in metrics] == [True] * 3
    assert [m["select/frac_signal"] for m in metrics] == [1.0] * 3
    ours = [frozenset(n for n in m if n.startswith(("select/", "sampled/"))) for m in metrics]
    assert len(set(ours)) == 1 and len(ours[0]) == 13, "the same metrics in every step"
    for m, records in zip(metrics, rollouts(output), strict=True):
        assert [(r["group"], r["sibling"]) for r in records] == [(g, s) for g in range(8) for s in range(4)]
        assert len({r["prompt_id"] for r in records}) == 8, "no prompt twice"
        assert {r["attempt"] for r in records} > {0}
        assert max(r["attempt"] for r in records) == m["select/attempts"] <= 12
        sampled = m["n"]["select/attempts"]
        assert sampled - 8 == m["select/dropped_equal"] > 0


def test_the_main_order_is_untouched(run: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """What the first draw of each rollout took is what a run without the option takes."""
    plain = tmp_path / "run"
    train_and_watch(opts(plain))
    for found, usual in zip(events(run[0], "groups_selected"), rollouts(plain), strict=True):
        first = {r["prompt_id"] for r in usual}
        records = rollouts(run[0])[found["rollout"]]
        kept = {r["prompt_id"] for r in records if r["attempt"] == 0}
        assert kept < first
        assert first - kept <= set(found["dropped"]["equal"])
        assert found["step"] == found["rollout"] + 1


def test_too_few_draws_leave_groups_without_signal(tmp_path: Path) -> None:
    output = tmp_path / "run"
    metrics = train_and_watch(opts(output, 6, dynamic_sample=True, max_resample_times=1)).metrics
    assert all(m["select/without_signal"] > 0 and m["select/attempts"] == 1 for m in metrics)
    assert [m["frac_reward_zero_std"] for m in metrics] == [m["select/without_signal"] / 8 for m in metrics]
    assert [len(records) for records in rollouts(output)] == [32] * 3


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_select_as_one(run: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """The same prompts, completions and choices; a draw of one prompt leaves a rank with half a group."""
    both = {**DYNAMIC, "replay_buffer_size": 4, "max_resample_times": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    alone = train_and_watch(opts(one, **both))
    (split,) = train_in_processes([opts(two, per_device_train_batch_size=16, **both)], tmp_path / "work")
    for name in ("prompt_id", "attempt", "completion_ids", "versions", "reward", "advantage", "age"):
        mine, theirs = ([r.get(name) for x in rollouts(p) for r in x] for p in (one, two))
        assert mine == theirs, name
    assert any(r.get("age") for x in rollouts(two) for r in x)
    assert events(one, "groups_selected") == events(two, "groups_selected")
    assert far(split.after, alone.after) < 1e-4
    chosen = [[{k: v for k, v in m.items() if k.startswith(("select/", "sampled/"))} for m in r.metrics]
              for r in (alone, split)]  # fmt: skip
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    "changes", [DYNAMIC, {"replay_buffer_size": 8, "beta": 0.1}], ids=["dynamic", "buffer"]
)
def test_its_rollouts_train_the_same_again(changes: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, replayed groups with their own old log probabilities."""
    first = train_and_watch(opts(tmp_path / "run", **changes))
    rest = {k: v for k, v in changes.items() if k == "beta"}
    again = train_and_watch(opts(tmp_path / "again", replay_rollouts=str(tmp_path / "run/rollouts"), **rest))
    assert [m["loss"] for m in again.metrics] == [m["loss"] for m in first.metrics]
    assert far(again.after, first.after) == 0.0


# -- groups of earlier rollouts ----------------------------------------------------------------------------


def test_replayed_groups_are_older_and_their_ratio_is_not_one(tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = {"replay_buffer_size": 8, "learning_rate": 1e-3, "max_steps": 4}
    metrics = train_and_watch(opts(output, **changes)).metrics
    assert (metrics[0]["select/replayed"], metrics[0]["select/replayed_age"]) == (0, None)
    assert metrics[0]["clip_ratio/region_mean"] == 0.0
    for step, m in enumerate(metrics[1:], start=1):
        assert m["select/replayed"] > 0
        assert 1 <= m["select/replayed_age"] <= step
        assert m["frac_reward_zero_std"] < m["sampled/frac_reward_zero_std"]
        assert m["clip_ratio/region_mean"] > 0.0
        stale = [r for r in rollouts(output)[step] if r.get("age")]
        assert len(stale) == 4 * m["select/replayed"]
        assert all(set(r["versions"]) == {r["rollout"]} and r["rollout"] < step for r in stale)
        ages = [step - r["rollout"] for r in stale]
        assert m["select/replayed_age"] == pytest.approx(sum(ages) / len(ages))
        fresh = [r for r in rollouts(output)[step] if not r.get("age")]
        assert all(set(r["versions"]) == {step} for r in fresh)


def test_both_together_leave_nothing_flat(tmp_path: Path) -> None:
    changes = {"dynamic_sample": True, "max_resample_times": 1, "replay_buffer_size": 16}
    metrics = train_and_watch(opts(tmp_path / "run", 4, **changes)).metrics
    assert metrics[0]["select/without_signal"] > 0
    left = [m["frac_reward_zero_std"] for m in metrics]
    assert left[0] > left[1] >= left[2] == 0.0
    assert all(m["select/attempts"] == 1 and m["select/replayed"] > 0 for m in metrics[1:])


PARTS = [
    {"loss_type": "real"},
    {"kl_in_reward": True, "beta": 0.1},
    {"num_iterations": 2, "advantage_estimator": "rloo"},
]


@pytest.mark.parametrize("changes", PARTS, ids=str)
def test_with_other_parts_of_the_algorithm(changes: dict[str, Any], tmp_path: Path) -> None:
    """No guard takes a replayed group for a fresh one."""
    metrics = train_and_watch(
        opts(tmp_path / "run", replay_buffer_size=8, max_steps=4, **{**changes})
    ).metrics
    assert len(metrics) == 4 and metrics[-1]["select/replayed"] > 0


def test_a_stream_draws_its_further_prompts_too(tmp_path: Path) -> None:
    rows = [json.dumps({"query": f"{n}+3=", "solution": str(n + 3)}) for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    changes = {**DYNAMIC, "dataset": [str(tmp_path / "rows.jsonl")], "streaming": True}
    metrics = train_and_watch(opts(tmp_path / "run", **changes)).metrics
    assert [m["frac_reward_zero_std"] for m in metrics] == [0.0] * 3
    for records in rollouts(tmp_path / "run"):
        assert len({r["prompt_id"] for r in records}) == 8


def test_the_forecast_of_a_checkpoint_knows_the_groups_held(tmp_path: Path) -> None:
    """Never less than there is; with the longest completions, not many times as much."""
    output = tmp_path / "run"
    train_and_watch(opts(output, replay_buffer_size=6))
    planned = json.loads((output / "plan.json").read_text())["disk"]["checkpoint_bytes"]
    files = (output / "checkpoint-3").rglob("*")
    written = sum(f.stat().st_size for f in files if f.is_file())
    state = json.loads((output / "checkpoint-3/trainer/state.json").read_text())
    held = len(json.dumps(state["components"]["selection"]))
    assert 0 < planned - written + 10_000 < 3 * held
