"""Rewards that are the same for every completion: which are named, which are at their best, and what they
must not hide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from covey.health.rules import Rules
from covey.rewards.kinds import kind_of, standing
from covey.types import Finding, Metric, StepRecord

COUNT = 64


def rollout(step: int, parts: Mapping[str, tuple[float, float]], **other: float) -> StepRecord:
    """A rollout of 64 completions in 8 groups whose rewards have these means and deviations."""
    metrics = {name: Metric(value=value, count=COUNT) for name, value in other.items()}
    for name, (mean, std) in parts.items():
        metrics[f"rewards/{name}/mean"] = Metric(value=mean, count=COUNT)
        metrics[f"rewards/{name}/std"] = Metric(value=std, count=COUNT)
    total = sum(mean for mean, _ in parts.values())
    spread = max(std for _, std in parts.values())
    metrics.setdefault("reward", Metric(value=total, count=COUNT))
    metrics.setdefault("reward_std", Metric(value=spread, count=8))
    flat = Metric(value=0.0 if spread else 1.0, count=8)
    metrics.setdefault("frac_reward_zero_std", flat)
    return StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics)


def said(
    num: int, parts: Mapping[str, tuple[float, float]], options: Mapping[str, Any] | None = None
) -> dict[str, Finding]:
    rules = Rules(options or {})
    found = [f for step in range(1, num + 1) for f in rules.check(rollout(step, parts))]
    return {f.code: f for f in reversed(found)}


MOVES = {"evens": (0.5, 0.5)}


def test_right_answers_that_were_never_rewarded() -> None:
    found = said(40, {"accuracy": (0.0, 0.0), **MOVES})
    assert set(found) == {"F226"}
    assert found["F226"].step == 10
    assert "accuracy is 0 for all 640 completions of 10 rollouts" in found["F226"].seen
    assert "only evens differs" in found["F226"].seen
    assert said(9, {"accuracy": (0.0, 0.0), **MOVES}) == {}


def test_one_right_answer_is_enough() -> None:
    rules = Rules()
    for step in range(1, 60):
        mean, std = (1 / 64, 0.125) if step == 7 else (0.0, 0.0)
        assert rules.check(rollout(step, {"accuracy": (mean, std), **MOVES})) == []


def test_small_rollouts_need_more_of_them() -> None:
    rules = Rules()
    steps = []
    for step in range(1, 40):
        record = rollout(step, {"accuracy": (0.0, 0.0), **MOVES})
        small = {n: Metric(value=m.value, count=min(m.count, 4)) for n, m in record.metrics.items()}
        found = rules.check(StepRecord(step=step, rollout=step, pass_index=0, metrics=small))
        steps += [f.step for f in found if f.code == "F226"]
    assert steps == [20]


@pytest.mark.parametrize(
    ("name", "value", "weight", "code"),
    [
        ("format", 1.0, 1.0, None),
        ("think_format_reward", 1.0, 0.5, None),
        ("soft_overlong", 0.0, 1.0, None),
        ("RepetitionPenalty", 0.0, 1.0, None),
        ("length_penalty", 0.0, 1.0, None),
        ("wordy", 0.0, -1.0, None),
        ("wrong_answer", 0.0, 1.0, None),
        ("IncorrectAnswer", 0.0, 1.0, None),
        ("missing_answer", 0.0, 1.0, None),
        ("wrong_answer", -1.0, 1.0, "F227"),
        ("accuracy", 1.0, 1.0, None),
        ("MathAccuracy", 0.0, 1.0, "F226"),
        ("is_correct", -1.0, 1.0, "F226"),
        ("accuracy", 0.0, 0.0, None),
        ("mine", 0.5, 0.0, None),
        ("mine", 0.5, 1.0, "F227"),
        ("mine", 0.0, 1.0, "F227"),
        ("format", 0.0, 1.0, "F227"),
        ("soft_overlong", -1.0, 1.0, "F227"),
        ("wordy", 1.0, -1.0, "F227"),
    ],
)
def test_what_a_value_that_never_changes_means(
    name: str, value: float, weight: float, code: str | None
) -> None:
    options = {"reward_funcs": [name, "evens"], "reward_weights": [weight, 1.0]}
    found = said(30, {name: (value, 0.0), **MOVES}, options)
    assert set(found) == ({code} if code else set())
    if code:
        assert f"{name} is {value:g} for all" in found[code].seen


def test_weights_of_metrics_with_other_names_go_by_their_order() -> None:
    """As in ms-swift, whose metrics are called by the class."""
    options = {"reward_funcs": ["accuracy", "external_x"], "reward_weights": [0.0, 1.0]}
    parts = {"MathAccuracy": (0.0, 0.0), "Other": (0.5, 0.5)}
    assert said(30, parts, options) == {}
    assert set(said(30, parts, {**options, "reward_weights": [1.0, 1.0]})) == {"F226"}


@pytest.mark.parametrize("other", [{"format": (1.0, 0.0)}, {"length_penalty": (0.0, 0.0)}])
def test_a_reward_at_its_best_hides_no_lack_of_signal(other: dict[str, tuple[float, float]]) -> None:
    found = said(30, {"accuracy": (0.0, 0.0), **other})
    assert set(found) == {"F211", "F226"}
    assert "accuracy" in found["F226"].seen


def test_the_only_reward_is_a_lack_of_signal_alone() -> None:
    assert set(said(30, {"accuracy": (0.0, 0.0)})) == {"F211"}
    # Where groups are not compared there is no such thing as a lack of signal.
    plus_plus = {"advantage_estimator": "reinforce_plus_plus"}
    assert set(said(30, {"accuracy": (0.0, 0.0)}, plus_plus)) == {"F226"}


def test_a_task_is_not_solved_while_right_answers_were_never_rewarded() -> None:
    """The format is learned to the full: all that is left has no signal, and that is said."""
    rules = Rules()
    codes = []
    for step in range(1, 60):
        share = min(1.0, 0.2 + 0.04 * step)
        learned = (share, (share * (1 - share)) ** 0.5)
        record = rollout(step, {"accuracy": (0.0, 0.0), "format": learned})
        codes += [f.code for f in rules.check(record)]
    assert {"F226", "F211"} <= set(codes)
    rules = Rules()
    for step in range(1, 60):
        share = min(1.0, 0.2 + 0.04 * step)
        learned = (share, (share * (1 - share)) ** 0.5)
        parts = {"accuracy": learned, "format": (1.0, 0.0), "soft_overlong": (0.0, 0.0)}
        assert rules.check(rollout(step, parts)) == []


def test_rounding_of_a_deviation_is_no_difference() -> None:
    assert set(said(30, {"mine": (0.1, 1e-8), **MOVES})) == {"F227"}
    assert said(30, {"mine": (1000.1, 0.02), **MOVES}) == {}


def test_a_resumed_run_knows_what_never_varied() -> None:
    first = Rules()
    for step in range(1, 6):
        first.check(rollout(step, {"accuracy": (0.0, 0.0), "mine": (0.5, 0.0), **MOVES}))
    first.check(rollout(6, {"accuracy": (0.0, 0.0), "mine": (0.6, 0.1), **MOVES}))
    state = json.loads(json.dumps(first.state()))
    older = json.loads(json.dumps(state))
    del older["history"]["steady"]
    for kept in (state, older):
        resumed = Rules()
        resumed.load_state(kept)
        found = {}
        for step in range(7, 30):
            for f in resumed.check(rollout(step, {"accuracy": (0.0, 0.0), "mine": (0.5, 0.0), **MOVES})):
                found[f.code] = f
        assert set(found) == {"F226"}
        assert "640 completions of 10 rollouts" in found["F226"].seen


def test_kinds_of_rewards_by_their_names() -> None:
    kinds = {
        "answer": (
            "accuracy",
            "MathAccuracy",
            "accuracy_reward",
            "code_reward",
            "exact_match",
            "plugin.correct",
        ),
        "form": ("format", "think_format_reward", "Format", "json_valid", "tag_count", "code_format"),
        "penalty": ("repetition", "soft_overlong", "get_soft_overlong_punishment", "too_long"),
        "other": ("judge", "mine", "tiny-rm", "evens"),
    }
    for kind, names in kinds.items():
        for name in names:
            assert kind_of(name) == kind, name
    assert standing("accuracy", 0.5) == "unknown"


def unscored(step: int, lost: int, rows: int = 64) -> StepRecord:
    record = rollout(step, {"mine": (0.5, 0.5)})
    metrics = {**record.metrics, "rows/invalid": Metric(value=lost, count=rows)}
    return StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics)


@pytest.mark.parametrize(("lost", "step"), [(29, 1), (7, 1), (6, None), (0, None)])
def test_completions_without_a_reward(lost: int, step: int | None) -> None:
    """29 of 64 in each rollout, and 7, which is over a tenth; 6 are under it."""
    rules = Rules()
    found = [f for s in range(1, 30) for f in rules.check(unscored(s, lost))]
    assert [(f.code, f.step) for f in found] == ([("F228", step)] if step else [])
    if step:
        assert f"{lost} of 64 completions of 1 rollout ({lost / 64:.0%}) have no reward" in found[0].seen


def test_two_completions_without_a_reward_are_a_small_sample() -> None:
    rules = Rules()
    assert rules.check(unscored(1, 2, rows=8)) == []
    assert [f.code for f in rules.check(unscored(2, 2, rows=8))] == ["F228"]


def collapse(step: int) -> StepRecord:
    """A small model at 300 times the usual learning rate, on completions of 24 tokens: rare right answers,
    then none, while the entropy goes from 1.85 to 0.04."""
    entropy = max(0.04, 1.85 * 0.72 ** (step - 1)) + (0.5 if step in (9, 13) else 0.0)
    mean = 0.075 if step <= 5 else 0.0
    parts = {"accuracy": (mean, (mean * (1 - mean)) ** 0.5)}
    return rollout(step, parts, entropy_sampled=entropy, learning_rate=3e-4)


def test_a_collapse_by_the_learning_rate_names_it() -> None:
    options = {"learning_rate": 3e-4, "num_generations": 8, "generation_batch_size": 64}
    rules = Rules(options)
    found = {}
    for step in range(1, 23):
        for f in rules.check(collapse(step)):
            found.setdefault(f.code, f)
    assert "F229" in found and "0.0003" in found["F229"].cause
    assert {"learning_rate": 3e-5} in [dict(f.edits) for f in found["F229"].fixes]
    assert rules.holding()
    now = rules.advice("F211")
    assert now is not None and "0.0003" in now.cause
    assert [set(fix.edits) for fix in now.fixes] == [{"learning_rate"}]


def test_hard_prompts_at_a_usual_entropy_are_no_collapse() -> None:
    rules = Rules({"learning_rate": 1e-6})
    found = [
        f
        for step in range(1, 23)
        for f in rules.check(rollout(step, {"accuracy": (0.0, 0.0)}, entropy_sampled=1.85 - 0.05 * step))
    ]
    assert {f.code for f in found} == {"F211"}
    assert "too hard" in found[0].cause


# SmolLM2-135M-Instruct on word problems, 8 completions of 16 tokens a rollout, at 300 times the usual
# learning rate: in how many the last number is even, and the entropy. At the end it writes "When 500000000".
EVENS = (1, 4, 2, 1, 4, 2, 3, 5, 7, 7, 6, *[8] * 11)
ENTROPIES = (
    *(1.685, 0.394, 3.343, 2.331, 2.846, 2.136, 2.156, 1.95, 1.455, 1.089, 0.69),
    *(0.518, 0.264, 0.238, 0.283, 0.113, 0.048, 0.143, 0.285, 0.068, 0.14, 0.126),
)
ONCE = 8
"""The only rollout with a right answer, one."""


def other_learned(step: int, right: int) -> StepRecord:
    """A rollout of that run; `right` completions of its rollout ONCE are right."""
    counts = {"accuracy": right if step == ONCE else 0, "evens": EVENS[step - 1]}
    parts = {name: (k / 8, (k / 8 * (1 - k / 8)) ** 0.5) for name, k in counts.items()}
    record = rollout(step, parts, entropy_sampled=ENTROPIES[step - 1], learning_rate=3e-4)
    groups = {"reward_std": 2, "frac_reward_zero_std": 2}
    metrics = {n: Metric(value=m.value, count=groups.get(n, 8)) for n, m in record.metrics.items()}
    return StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics)


@pytest.mark.parametrize("right", [0, 1])
def test_a_collapse_while_another_reward_is_learned_names_the_learning_rate(right: int) -> None:
    """That one right answer was seen once does not make it a task that is solved."""
    rules = Rules({"learning_rate": 3e-4, "num_generations": 4, "generation_batch_size": 8})
    found = {}
    for step in range(1, 23):
        for f in rules.check(other_learned(step, right)):
            found.setdefault(f.code, f)
    assert found["F229"].step == found["F211"].step == 19
    assert "0.0003" in found["F229"].cause and "0.0003" in found["F211"].cause
    assert {"learning_rate": 3e-5} in [dict(f.edits) for f in found["F229"].fixes]
    assert {"F211", "F229"} <= set(rules.holding())


def test_a_task_that_is_solved_stays_solved_at_a_low_entropy() -> None:
    """The same, but the right answers are learned, too."""
    rules = Rules({"learning_rate": 3e-4, "num_generations": 4, "generation_batch_size": 8})
    for step in range(1, 23):
        record = other_learned(step, 0)
        rises = {f"rewards/accuracy/{of}": record.metrics[f"rewards/evens/{of}"] for of in ("mean", "std")}
        total = Metric(value=2 * (record.metrics["reward"].value or 0.0), count=8)
        metrics = {**record.metrics, **rises, "reward": total}
        assert rules.check(StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics)) == []


# The same model and rate with accuracy alone and 32 completions of 24 tokens a rollout: how many are right,
# how many have no readable answer, the groups without spread (of 4), and the entropy. At the end it writes
# "assistant". The entropy rises again, because the moments of the optimizer go on without a gradient.
RIGHT = (0, 3, 3, 4, 3, 5, *[0] * 16)
UNREAD = (6, 6, 5, 13, 8, 7, 31, 32, 32, 32, 31, 32, 32, 31, 25, 25, 19, 12, 8, 3, 0, 6)
FLAT = (4, 2, 2, 2, 3, 2, *[4] * 16)
LEVELS = (
    *(1.65, 1.601, 1.439, 2.297, 1.191, 0.825, 0.099, 0.034, 0.069, 0.106, 0.071),
    *(0.104, 0.092, 0.133, 0.141, 0.152, 0.144, 0.168, 0.158, 0.17, 0.21, 0.144),
)


def broke(step: int) -> StepRecord:
    right, flat = RIGHT[step - 1] / 32, FLAT[step - 1] / 4
    spread = (right * (1 - right)) ** 0.5
    values = {
        "reward": right,
        "rewards/accuracy/mean": right,
        "rewards/accuracy/std": spread,
        "reward_std": spread * (1 - flat),
        "frac_reward_zero_std": flat,
        "entropy_sampled": LEVELS[step - 1],
        "completions/unparsed_ratio": UNREAD[step - 1] / 32,
        "learning_rate": 3e-4,
    }
    of_groups = ("reward_std", "frac_reward_zero_std")
    metrics = {n: Metric(value=v, count=4 if n in of_groups else 32) for n, v in values.items()}
    return StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics)


def test_every_sign_of_a_collapse_by_the_learning_rate_advises_the_same_rate() -> None:
    """Also when the entropy of the newest rollouts is a little above a tenth of its start again."""
    rules = Rules({"learning_rate": 3e-4, "num_generations": 8, "generation_batch_size": 32})
    steps = {}
    for step in range(1, 23):
        for f in rules.check(broke(step)):
            steps.setdefault(f.code, step)
    assert steps["F229"] <= 11
    assert {"F201", "F211", "F221", "F229"} == set(rules.holding())
    for code in rules.holding():
        now = rules.advice(code)
        assert now is not None
        assert "0.0003" in now.cause or code == "F201"
        rates = [fix.edits["learning_rate"] for fix in now.fixes if "learning_rate" in fix.edits]
        assert rates == [3e-5], code
        assert "prompts" not in " ".join(str(fix.text) for fix in now.fixes)
