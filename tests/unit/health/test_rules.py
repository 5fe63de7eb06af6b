"""Each rule speaks at the step at which its sign has lasted long enough, and not at a near miss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from covey.codes import CODES
from covey.health.rule import LASTING
from covey.health.rule_list import RULES
from covey.health.rules import Rules
from covey.health.thresholds import THRESHOLDS
from covey.types import Metric, Severity, StepRecord

Curve = Callable[[int], float | None]
OPTIONS = {"num_generations": 8, "generation_batch_size": 64, "learning_rate": 3e-6, "beta": 0.04}


def wave(middle: float, spread: float, period: float) -> Curve:
    """A value that moves around its middle as that of a healthy run does."""
    return lambda step: middle + spread * math.sin(step * 2.399 + period)


HEALTHY: dict[str, Curve | float] = {
    "reward": wave(0.5, 0.06, 0.0),
    "reward_std": wave(0.4, 0.05, 1.0),
    "frac_reward_zero_std": wave(0.1, 0.1, 2.0),
    "rewards/accuracy/mean": wave(0.3, 0.06, 3.0),
    "rewards/accuracy/std": wave(0.45, 0.02, 3.0),
    "rewards/format/mean": wave(0.6, 0.06, 4.0),
    "rewards/format/std": wave(0.49, 0.02, 4.0),
    "completions/mean_length": wave(200, 30, 5.0),
    "completions/mean_terminated_length": wave(180, 30, 5.0),
    "completions/clipped_ratio": wave(0.05, 0.05, 6.0),
    "entropy": wave(0.5, 0.05, 7.0),
    "kl": lambda step: 1e-4 * step,
    "grad_norm": wave(0.6, 0.4, 8.0),
    "learning_rate": 3e-6,
    "loss": wave(0.0, 0.01, 9.0),
    "memory/peak_gib": 10.0,
}
COUNTS = {"frac_reward_zero_std": 8, "reward_std": 8, "sampled/frac_reward_zero_std": 8}


def record(step: int, curves: Mapping[str, Curve | float], steps_per_rollout: int = 1) -> StepRecord:
    values = {name: curve(step) if callable(curve) else curve for name, curve in curves.items()}
    metrics = {n: Metric(value=v, count=COUNTS.get(n, 64)) for n, v in values.items()}
    rollout, place = divmod(step - 1, steps_per_rollout)
    return StepRecord(step=step, rollout=rollout, pass_index=place, metrics=metrics)


def said(num: int, changes: Mapping[str, Curve | float], **options: Any) -> list[tuple[str, int]]:
    """The codes and steps of what is said in `num` steps of a healthy run with these changes."""
    rules = Rules({**OPTIONS, **options})
    found = [f for step in range(1, num + 1) for f in rules.check(record(step, {**HEALTHY, **changes}))]
    assert all(f.severity is Severity.WARNING and f.why == CODES[f.code].why for f in found)
    assert all(f.seen and f.cause and f.fixes for f in found)
    return [(f.code, f.step or 0) for f in found]


def after(step: int, then: float, before: Curve | float) -> Curve:
    """`before` up to `step`, and `then` behind it."""
    return lambda now: then if now > step else before(now) if callable(before) else before


def test_a_healthy_run_is_quiet() -> None:
    assert said(600, {}) == []


def test_a_run_that_learns_its_task_is_quiet() -> None:
    """Reward up to nearly all, entropy and spread down to little, and the end of a schedule."""
    learned: dict[str, Curve | float] = {
        "reward": lambda s: 1 - 0.7 * math.exp(-s / 100),
        "rewards/accuracy/mean": lambda s: 1 - 0.7 * math.exp(-s / 100),
        "rewards/accuracy/std": lambda s: math.sqrt(
            0.7 * math.exp(-s / 100) * (1 - 0.7 * math.exp(-s / 100))
        ),
        "entropy": lambda s: 0.5 * math.exp(-s / 80),
        "frac_reward_zero_std": lambda s: 0.95 * (1 - math.exp(-s / 100)),
        "completions/mean_length": lambda s: 200 + s * 2,
        "learning_rate": lambda s: 3e-6 * (1 - (s - 1) / 399),
    }
    assert said(400, learned) == []


# Code, what is changed, the step at which it is said, and a change that is just too small or too short.
CASES: list[tuple[str, dict[str, Curve | float], int, dict[str, Curve | float]]] = [
    # The mean of five values is beyond its bound from some step on, and has to stay there five times: of 0.5
    # and 0.02 it is 0.116 with one of the former and 0.02 with none, at step 45; so the rule speaks at 49.
    ("F201", {"entropy": after(40, 0.02, 0.5)}, 49, {"entropy": after(40, 0.11, 0.5)}),
    ("F202", {"entropy": after(40, 1.2, 0.5)}, 48, {"entropy": after(40, 0.95, 0.5)}),
    (
        "F203",
        {"completions/mean_length": after(40, 700.0, 200.0)},
        49,
        {"completions/mean_length": after(40, 590.0, 200.0)},
    ),
    (
        "F204",
        {"completions/mean_terminated_length": after(40, 20.0, 180.0)},
        48,
        {"completions/mean_terminated_length": after(40, 60.0, 180.0)},
    ),
    (
        "F205",
        {"completions/clipped_ratio": after(40, 0.6, 0.05)},
        47,
        {"completions/clipped_ratio": after(40, 0.29, 0.05)},
    ),
    (
        "F206",
        {"completions/repetitive_ratio": after(40, 0.1, 0.0)},
        41,
        {"completions/repetitive_ratio": after(40, 0.04, 0.0)},
    ),
    (
        "F207",
        {
            "rewards/format/mean": after(40, 1.0, HEALTHY["rewards/format/mean"]),
            "rewards/accuracy/mean": after(40, 0.05, HEALTHY["rewards/accuracy/mean"]),
        },
        46,
        {"rewards/format/mean": after(40, 1.0, HEALTHY["rewards/format/mean"])},
    ),
    ("F209", {"kl": after(40, 11.0, 0.01)}, 43, {"kl": lambda s: 11.0 if s in (41, 42) else 0.4}),
    ("F210", {"grad_norm": after(40, 7.0, 0.6)}, 43, {"grad_norm": lambda s: 7.0 if s in (41, 42) else 0.6}),
    (
        "F211",
        {"frac_reward_zero_std": after(40, 1.0, 0.1)},
        43,
        {"frac_reward_zero_std": lambda s: 1.0 if s % 3 else 0.9},
    ),
    (
        "F212",
        {"frac_reward_zero_std": 0.9},
        10,
        {
            "frac_reward_zero_std": 0.9,
            "rewards/accuracy/mean": 0.02,
            "rewards/accuracy/std": 0.14,
            "rewards/format/mean": 1.0,
            "rewards/format/std": 0.0,
        },
    ),
    ("F213", {"learning_rate": 1e-9}, 10, {"learning_rate": lambda s: 1e-7 * s}),
    (
        "F214",
        {"memory/peak_gib": lambda s: 10 + 0.03 * s},
        120,
        {"memory/peak_gib": lambda s: 10 + min(s, 60) * 0.05},
    ),
    (
        "F216",
        {"grad_norm": after(40, 0.0, 0.6)},
        43,
        {"grad_norm": after(40, 0.0, 0.6), "rows/dropped/zero_advantage": 64.0},
    ),
    ("F217", {"kl": 0.0}, 21, {"kl": lambda s: 0.0 if s < 20 else 1e-9}),
    ("F218", {"loss": after(40, math.nan, 0.0)}, 41, {"completions/mean_terminated_length": math.nan}),
    (
        "F219",
        {"completions/clipped_ratio": 1.0},
        3,
        {"completions/clipped_ratio": lambda s: 1.0 if s < 3 else 0.9},
    ),
    (
        "F224",
        {"completions/most_common_ratio": after(40, 0.97, 0.1)},
        49,
        {"completions/most_common_ratio": after(40, 0.88, 0.1)},
    ),
    ("F225", {"sampling/ess": after(40, 0.45, 0.99)}, 43, {"sampling/ess": after(40, 0.55, 0.99)}),
    (
        "F235",
        {"tools/call_frequency": 1.0, "tools/failure_frequency": after(40, 0.6, 0.2)},
        40 + LASTING,
        {"tools/call_frequency": 1.0, "tools/failure_frequency": after(40, 0.45, 0.2)},
    ),
]


@pytest.mark.parametrize(("code", "change", "step", "near_miss"), CASES, ids=[c[0] for c in CASES])
def test_a_rule_speaks_at_its_step(
    code: str, change: dict[str, Curve | float], step: int, near_miss: dict[str, Curve | float]
) -> None:
    assert said(step, change)[-1:] == [(code, step)]
    assert code not in [c for c, _ in said(step - 1, change)]
    assert code not in [c for c, _ in said(max(step + 60, 130), near_miss)]


RISES: dict[str, Curve | float] = {
    "reward": lambda s: min(1.5, 0.5 + 0.02 * s),
    "rewards/accuracy/mean": wave(0.3, 0.06, 3.0),
    "rewards/format/mean": lambda s: min(1.0, 0.2 + 0.02 * s),
    "rewards/format/std": 0.4,
}
# Signs in a run whose total reward rises all the while, from step 21 on and at 60 the latest.
ALTHOUGH: list[tuple[str, dict[str, Curve | float]]] = [
    ("F201", {"entropy": after(20, 0.01, 0.5), "rewards/accuracy/mean": after(20, 0.02, 0.3)}),
    ("F202", {"entropy": after(20, 3.0, 0.5)}),
    ("F203", {"completions/mean_length": after(20, 900.0, 200.0)}),
    ("F204", {"completions/mean_terminated_length": after(20, 8.0, 180.0)}),
    (
        "F204",
        {
            "completions/mean_terminated_length": after(20, 40.0, 180.0),
            "rewards/accuracy/mean": after(20, 0.02, 0.3),
        },
    ),
    ("F205", {"completions/clipped_ratio": after(20, 0.8, 0.05)}),
    ("F206", {"completions/repetitive_ratio": after(20, 0.3, 0.0)}),
    ("F207", {"rewards/accuracy/mean": after(20, 0.02, 0.3)}),
    ("F209", {"kl": after(2, 3.0, 0.0)}),
    ("F224", {"completions/most_common_ratio": after(20, 0.97, 0.1)}),
    ("F225", {"sampling/ess": after(20, 0.3, 0.99)}),
]


def test_tools_that_are_never_called() -> None:
    """Only where the run has tools: an environment without any is not called either."""

    def codes(options: dict[str, Any], *calls: float) -> list[str]:
        rules = Rules({**OPTIONS, **options})
        found = [
            sign.code
            for step, value in enumerate(calls, start=1)
            for sign in rules.check(record(step, {**HEALTHY, "tools/call_frequency": value}))
        ]
        return [code for code in found if code == "F234"]

    none = [0.0] * LASTING
    assert codes({"tools": ["tools.py:f"]}, *none) == ["F234"]
    assert codes({"tools": ["tools.py:f"]}, *none[1:], 0.1, *none[1:]) == []
    assert codes({}, *none) == [] and codes({"tools": []}, *none) == []


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_ids_that_are_no_tokens(prefix: str) -> None:
    """Above one in a thousand, at once, and again where it is twice as bad."""
    name = f"{prefix}completions/unknown_ids_ratio"
    assert said(50, {name: 0.001}) == []
    assert said(5, {name: 0.0011}) == [("F233", 1)]
    assert said(50, {name: lambda s: 0.0 if s < 30 else 0.002 if s < 40 else 0.005}) == [
        ("F233", 30),
        ("F233", 40),
    ]
    rules = Rules(OPTIONS)
    first, *_ = rules.check(record(1, {**HEALTHY, name: 0.25}))
    assert "25.00%" in first.seen and ("evaluation" in first.seen) == bool(prefix)
    assert "from the start" in first.cause
    rules = Rules(OPTIONS)
    found = [f for s in (1, 2) for f in rules.check(record(s, {**HEALTHY, name: 0.25 * (s - 1)}))]
    assert len(found) == 1 and "the share was 0.00% at the start" in found[0].cause


@pytest.mark.parametrize(("code", "change"), ALTHOUGH, ids=[c for c, _ in ALTHOUGH])
def test_a_sign_speaks_although_the_reward_rises(code: str, change: dict[str, Curve | float]) -> None:
    assert "F221" not in [c for c, _ in said(60, RISES)] == []
    assert code in [c for c, _ in said(60, {**RISES, **change})]


# What became of a run at its second step, whose start is then that step alone.
BROKEN: dict[str, Curve | float] = {
    "reward": after(1, 0.0, 0.5),
    "rewards/accuracy/mean": after(1, 0.0, 0.3),
    "rewards/format/mean": after(1, 0.0, 0.6),
    "rewards/accuracy/std": after(1, 0.0, 0.45),
    "rewards/format/std": after(1, 0.0, 0.49),
    "reward_std": after(1, 0.0, 0.4),
    "frac_reward_zero_std": after(1, 1.0, 0.1),
}


def test_a_run_that_breaks_at_its_second_step() -> None:
    """Four rollouts are enough; without a sign in the completions it takes a little more."""
    cut = {**BROKEN, "completions/clipped_ratio": after(1, 1.0, 0.0)}
    found = said(20, cut)
    assert ("F221", 4) in found or ("F221", 5) in found
    assert "F222" not in [code for code, _ in found]
    codes = [code for code, _ in said(20, BROKEN)]
    assert "F222" in codes and "F221" not in codes


def test_what_a_lack_of_signal_follows_from_is_said() -> None:
    rules = Rules(OPTIONS)
    found = [
        f for s in range(1, 110) for f in rules.check(record(s, {**HEALTHY, **BROKEN})) if f.code == "F211"
    ]
    assert "The reward fell: 0.5" in found[-1].cause
    assert {"learning_rate": 1e-6} in [dict(f.edits) for f in found[-1].fixes]


def test_a_solved_task_has_no_signal_and_no_sign() -> None:
    """Every prompt at the highest reward from step 40 on; a run that is flat at a half is told so, and one
    whose reward is the same from its first step."""
    solved: dict[str, Curve | float] = {
        "reward": lambda s: min(2.0, 0.9 + 0.0275 * s),
        "rewards/accuracy/mean": lambda s: min(1.0, 0.3 + 0.0175 * s),
        "rewards/format/mean": lambda s: min(1.0, 0.6 + 0.01 * s),
        "rewards/accuracy/std": after(39, 0.0, 0.45),
        "rewards/format/std": after(39, 0.0, 0.49),
        "reward_std": after(39, 0.0, 0.4),
        "frac_reward_zero_std": after(39, 1.0, 0.1),
        "grad_norm": after(39, 0.0, 0.6),
        "entropy": after(39, 0.01, 0.5),
    }
    assert said(200, solved) == []
    half = {**solved, "rewards/accuracy/std": 0.5, "reward": lambda s: min(1.0, 0.9 + 0.0275 * s)}
    assert "F211" in [code for code, _ in said(60, half)]
    same = {name: 0.0 for name in solved if name.endswith("std")} | {
        "frac_reward_zero_std": 1.0,
        "reward": 1.0,
    }
    assert "F211" in [code for code, _ in said(60, same)]


def test_a_reward_that_follows_the_length() -> None:
    """F223 where lengths have doubled or shrunk to a third in its direction, and nothing else was learned."""
    longer: dict[str, Curve | float] = {
        "reward": lambda s: 0.3 + 0.02 * s,
        "completions/mean_length": lambda s: 100 + 8 * s,
        "completions/reward_length_correlation": 0.95,
        "rewards/accuracy/mean": None,
        "rewards/accuracy/std": None,
        "rewards/format/mean": None,
        "rewards/format/std": None,
    }
    assert "F223" in [code for code, _ in said(40, longer)]
    shorter = {
        "completions/mean_length": lambda s: max(5, 200 - 6 * s),
        "completions/reward_length_correlation": -0.95,
    }
    assert "F223" in [code for code, _ in said(50, {**longer, **shorter})]
    for spared in (
        {"completions/reward_length_correlation": 0.4},
        {"completions/reward_length_correlation": -0.95},
        {"completions/mean_length": 120.0},
    ):
        assert "F223" not in [code for code, _ in said(40, {**longer, **spared})]
    learned = {
        "rewards/accuracy/mean": lambda s: min(1.0, 0.1 + 0.02 * s),
        "rewards/accuracy/std": 0.45,
        "rewards/length/mean": lambda s: 0.2 + 0.02 * s,
        "rewards/length/std": 0.1,
    }
    assert "F223" not in [code for code, _ in said(40, {**longer, **learned})]


def test_lengths_that_grow_over_hundreds_of_steps_with_the_reward() -> None:
    """Reasoning that is learned: fivefold in 400 steps, and the reward does not follow the length."""
    grows = {**RISES, "completions/mean_length": lambda s: 200 + 2 * s}
    assert said(400, grows) == []
    fast = {**RISES, "completions/mean_length": after(20, 900.0, 200.0)}
    assert said(60, {**fast, "completions/reward_length_correlation": 0.3}) == []


def test_selected_groups_do_not_say_how_good_the_policy_is() -> None:
    """The rules go by what was sampled: a reward that rises there has risen, groups that are flat there are
    few or many, and a reward that is learnt from may stay where it is."""
    short: Curve = lambda s: 200 if s < 60 else 40  # noqa: E731
    chosen: dict[str, Curve | float] = {"completions/mean_terminated_length": short, "reward": 0.5}
    whole: dict[str, Curve | float] = {
        "sampled/reward": lambda s: 0.2 + 0.005 * s,
        "sampled/reward_std": 0.4,
        "sampled/rewards/accuracy/mean": 0.3,
        "sampled/rewards/accuracy/std": 0.4583,
        "sampled/frac_reward_zero_std": 0.1,
    }
    assert "F204" in [code for code, _ in said(120, chosen)]
    assert said(120, {**chosen, **whole}) == []
    # At a pass rate of 0.3 chance leaves 6 % of groups of 8 flat; few of them are learnt from.
    flat = {**whole, "sampled/frac_reward_zero_std": 0.95, "sampled/reward": 0.3, "frac_reward_zero_std": 0.0}
    assert "F212" in [code for code, _ in said(60, flat)]
    assert said(60, {**flat, "sampled/frac_reward_zero_std": 0.1}) == []


def test_held_out_reward_that_falls_while_training_rises() -> None:
    """Evaluations at 20, 40, ...: the best at 40, the third one below it at 100."""
    training: Curve = lambda s: 0.4 + 0.003 * s  # noqa: E731

    def held_out(*values: float) -> Curve:
        return lambda s: values[s // 20 - 1] if s % 20 == 0 else None

    falls = {"reward": training, "eval_reward": held_out(0.4, 0.8, 0.6, 0.5, 0.5)}
    assert said(100, falls) == [("F208", 100)]
    assert said(100, {**falls, "eval_reward": held_out(0.4, 0.8, 0.6, 0.5, 0.79)}) == []
    # Where the training reward is no higher either, the model is simply worse: 0.8 at 40, 0.5 from 80 on.
    both = {**falls, "reward": lambda s: 0.4 - 0.001 * s}
    assert said(100, both) == [("F222", 84)]


def test_a_run_without_signal_is_told_why() -> None:
    rules = Rules(OPTIONS)
    flat = {**HEALTHY, "frac_reward_zero_std": 1.0, "reward_std": 0.0}
    hard = {**flat, "reward": 0.0, "completions/clipped_ratio": 0.0}
    (finding,) = [f for s in (1, 2, 3) for f in rules.check(record(s, hard)) if f.code == "F211"]
    assert "too hard" in finding.cause and {"num_generations": 16} in [dict(f.edits) for f in finding.fixes]
    # A reward of penalties alone, which nobody gets any more, is at its highest.
    rules = Rules(OPTIONS)
    for step in range(1, 40):
        rules.check(record(step, {**HEALTHY, "reward": -0.5, "reward_std": 0.2, "frac_reward_zero_std": 0.0}))
    said_now = [f for s in range(40, 43) for f in rules.check(record(s, hard)) if f.code == "F211"]
    assert [f.cause for f in said_now] == [
        "The prompts are solved: the reward is at its highest in this run."
    ]
    rules = Rules({**OPTIONS, "generation_batch_size": 24})
    cut = {**flat, "completions/clipped_ratio": 0.9}
    (finding,) = [f for s in (1, 2, 3) for f in rules.check(record(s, cut)) if f.code == "F211"]
    assert "90% of the completions are truncated" in finding.cause
    assert not any(f.edits for f in finding.fixes)


def test_few_groups_need_more_rollouts() -> None:
    """Rollouts of one group: three without spread are usual, ten are not."""
    rules = Rules(OPTIONS)
    codes = []
    for step in range(1, 11):
        metrics = {"frac_reward_zero_std": Metric(value=1.0, count=1), "reward": Metric(value=1.0, count=8)}
        found = rules.check(StepRecord(step=step, rollout=step, pass_index=0, metrics=metrics))
        codes += [(f.code, step) for f in found]
    assert codes == [("F211", 10)]


def test_siblings_that_are_the_same() -> None:
    early: dict[str, Curve | float] = {"completions/identical_groups": lambda s: 0.8 if s <= 2 else None}
    assert said(40, early) == [("F212", 1)]
    late: dict[str, Curve | float] = {"completions/identical_groups": lambda s: 0.8 if s > 3 else 0.1}
    assert said(40, late) == []


def test_a_rule_repeats_itself_seldom_and_counts() -> None:
    """Once, after 100 steps again, and at once when it is twice as bad."""
    rules = Rules(OPTIONS)
    high = {**HEALTHY, "kl": lambda s: 12.0 if s < 150 else 40.0}
    steps = [f.step for s in range(1, 161) for f in rules.check(record(s, high)) if f.code == "F209"]
    assert steps == [3, 103, 150]
    assert rules.counts == {"F209": 158}
    assert rules.holding() == ("F209",)
    rules.check(record(161, HEALTHY))
    assert rules.holding() == () and rules.counts == {"F209": 158}


def test_a_rollout_counts_once() -> None:
    """With four steps a rollout, the third rollout without signal begins at step 9."""
    rules = Rules(OPTIONS)
    flat = {**HEALTHY, "frac_reward_zero_std": 1.0}
    found = [f for s in range(1, 13) for f in rules.check(record(s, flat, steps_per_rollout=4))]
    assert [(f.code, f.step) for f in found if f.code == "F211"] == [("F211", 9)]


HELD_OUT: dict[str, Curve | float] = {
    "reward": lambda s: 0.4 + 0.003 * s,
    "eval_reward": lambda s: {20: 0.4, 40: 0.8, 60: 0.6}.get(s, 0.5) if s % 20 == 0 else None,
}
SAME: dict[str, Curve | float] = {"completions/identical_groups": lambda s: 0.8 if s == 3 else 0.1}
KEPT = [(c, change, step) for c, change, step, _ in CASES if c != "F214"]
KEPT += [("F221", {**BROKEN, "entropy": after(1, 3.0, 0.5)}, 10), ("F222", BROKEN, 12)]
KEPT += [("F224", {"completions/most_common_ratio": after(5, 0.97, 0.1)}, 20)]
KEPT += [("F208", HELD_OUT, 100), ("F212", SAME, 3)]


@pytest.mark.parametrize(("code", "change", "step"), KEPT, ids=[c[0] for c in KEPT])
def test_a_resumed_run_says_what_it_would_have_said(
    code: str, change: dict[str, Curve | float], step: int
) -> None:
    """Stopped and resumed after every step, through JSON as a checkpoint keeps it; with four steps a rollout
    after every third, so at each place of one."""
    for per_rollout in (1, 4):
        whole, cut = Rules(OPTIONS), Rules(OPTIONS)
        spoken = []
        for now in range(1, per_rollout * step + 12):
            line = record(now, {**HEALTHY, **change}, per_rollout)
            found = whole.check(line)
            assert cut.check(line) == found
            spoken += [f.code for f in found]
            if per_rollout == 4 and now % 3:
                continue
            state = json.loads(json.dumps(cut.state(), sort_keys=True))
            cut = Rules(OPTIONS)
            cut.load_state(state)
            assert cut.state() == state
        assert per_rollout == 4 or code in spoken
        assert list(cut.counts.items()) == list(whole.counts.items())
        assert cut.holding() == whole.holding()


def test_memory_begins_anew_with_the_process() -> None:
    """What grew in a process that is gone says nothing: 120 values of the new one are needed."""
    grows = {**HEALTHY, "memory/peak_gib": lambda s: 10 + 0.03 * s}
    first, second = Rules(OPTIONS), Rules(OPTIONS)
    for step in range(1, 101):
        assert first.check(record(step, grows)) == []
    second.load_state(first.state())
    steps = [f.step for s in range(101, 241) for f in second.check(record(s, grows)) if f.code == "F214"]
    assert steps == [220]


def test_a_state_of_another_version() -> None:
    """A rule that it does not know starts anew, one that is gone is left out."""
    rules, other = Rules(OPTIONS), Rules(OPTIONS)
    for step in range(1, 4):
        rules.check(record(step, {**HEALTHY, "kl": 12.0, "learning_rate": 0.0}))
    state = rules.state()
    held = dict(state["held"])
    held["F999"] = held.pop("F213")
    other.load_state({**state, "held": held})
    assert other.holding() == ("F209",)
    said = [f.code for s in range(4, 14) for f in other.check(record(s, {**HEALTHY, "learning_rate": 0.0}))]
    assert said == ["F213"] and other.holding() == ("F213",)


def test_edits_follow_from_the_options() -> None:
    rules = Rules(OPTIONS)
    found = [f for s in range(1, 4) for f in rules.check(record(s, {**HEALTHY, "kl": 12.0}))]
    assert [dict(f.edits) for f in found[0].fixes] == [{"learning_rate": 1e-6}, {"beta": 0.08}]
    assert "steps 1 to 3" in found[0].seen and "12" in found[0].seen


def test_every_rule_has_a_code_and_every_threshold_a_source() -> None:
    codes = [rule.code for rule in RULES]
    assert len(set(codes)) == len(codes) and set(codes) <= CODES.keys()
    # F215 is the doctor's, who sees the trend of a whole run.
    assert {*codes, "F215"} == {code for code in CODES if code.startswith("F2")}
    assert all(t.source and len(t.date) == 7 for t in THRESHOLDS.values())


def test_answers_that_are_no_longer_readable_name_the_learning_rate() -> None:
    """A real model at 300 times the usual rate: its entropy bounces, and it no longer writes answers."""
    changes: dict[str, Curve | float] = {
        "reward": lambda step: [0.03, 0.05, 0.09, 0.05, 0.03, 0.05, 0.03][step - 1] if step < 8 else 0.0,
        "frac_reward_zero_std": lambda step: 0.8 if step < 8 else 1.0,
        "reward_std": lambda step: 0.1 if step < 8 else 0.0,
        "entropy": lambda step: [1.5, 3.8, 2.4, 3.0, 3.9, 3.9, 4.9, 1.7, 0.8, 1.2][min(step, 10) - 1],
        "completions/unparsed_ratio": lambda step: 0.16 if step == 1 else 0.81,
    }
    for begin, names_rate in ((0.16, True), (0.78, False)):
        changes["completions/unparsed_ratio"] = lambda step, begin=begin: begin if step == 1 else 0.81
        rules = Rules({**OPTIONS, "learning_rate": 3e-4})
        found = [f for step in range(1, 12) for f in rules.check(record(step, {**HEALTHY, **changes}))]
        (sign,) = [f for f in found if f.code == "F211"]
        edits = [fix.edits for fix in sign.fixes]
        assert ("0.0003" in sign.cause, edits[0].get("learning_rate") == 3e-5) == (names_rate, names_rate)
