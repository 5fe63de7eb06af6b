"""Signs of rewards that are the same for every completion of a run: F226 and F227.

Such a reward has no effect on the advantages. If another reward varies, no other rule reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from covey.health.history import History
from covey.health.names import CUT, UNPARSED
from covey.health.rule import Rule, num
from covey.health.sign import Sign
from covey.health.steady import Steady
from covey.health.thresholds import limit
from covey.rewards.kinds import Standing, kind_of, standing
from covey.rewards.registry import metric_names
from covey.texts import counted, joined, tr
from covey.types import Fix

# What float32 leaves of the deviation of equal rewards.
_ROUNDING = 1e-6


def weights_of(h: History) -> Mapping[str, float]:
    """The weight of each reward by its name, if the options are known; ms-swift's metrics have other names
    than its options, in the same order."""
    entries = [*_texts(h.options.get("reward_funcs")), *_texts(h.options.get("reward_model"))]
    weights = h.options.get("reward_weights") or [1.0] * len(entries)
    if not isinstance(weights, Sequence) or len(weights) != len(entries):
        return {}
    names, parts = metric_names(entries), tuple(h.parts())
    if not set(parts) <= set(names) and len(parts) == len(entries):
        names = parts
    return {name: float(w) for name, w in zip(names, weights, strict=True) if isinstance(w, int | float)}


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, str)]


def steady_rewards(h: History) -> Iterator[tuple[str, Steady, Standing]]:
    """Each reward that has a weight and has not varied so far: its name, its value, and its standing."""
    weights, start = weights_of(h), h.sampled("rewards/")
    for name in h.parts():
        found, weight = h.steady.get(f"{start}{name}/mean"), weights.get(name, 1.0)
        if found is not None and weight != 0:
            yield name, found, standing(name, found.value, weight)


def never_earned(h: History) -> list[tuple[str, Steady]]:
    """The rewards for right answers that no completion has earned so far."""
    return [(name, found) for name, found, how in steady_rewards(h) if how == "lowest"]


def unearned_now(h: History) -> list[str]:
    """The rewards for right answers that no completion of the newest five rollouts has earned; an earlier one
    may have."""
    num, start, weights = int(limit("recent_values")), h.sampled("rewards/"), weights_of(h)
    names = []
    for name in h.parts():
        means, spreads = (h.series.get(f"{start}{name}/{of}") for of in ("mean", "std"))
        weight = weights.get(name, 1.0)
        if means is None or weight == 0:
            continue
        differs = spreads is not None and max(spreads.last.numbers(num)) > _ROUNDING
        if not differs and all(standing(name, v, weight) == "lowest" for v in means.last.numbers(num)):
            names.append(name)
    return names


def not_earned(h: History) -> Sign | None:
    """F226: a reward for right answers is at its lowest for every completion of the run."""
    lasting = _lasting(h, "lowest")
    if not lasting or _is_all_there_is(h):
        return None
    cut, unparsed = h.value(CUT), h.value(UNPARSED)
    cause = tr(
        "The reward may not be able to compare gold answers of this form, it may read the wrong column, "
        "or the prompts may be too hard."
    )
    if cut is not None and cut > 0.5:
        cause = tr("{cut:.0%} of the completions are truncated before they end.", cut=cut)
    elif unparsed is not None and unparsed > 0.5:
        cause = tr(
            "No answer can be parsed in {unparsed:.0%} of the completions: the answer format or "
            "the parser is wrong.",
            unparsed=unparsed,
        )
    fixes = [
        Fix(text=tr("compare some completions with their gold answers in rollouts/ of the run")),
        Fix(text=tr("use prompts that the model solves sometimes")),
    ]
    if cut is not None and cut > 0.5:
        fixes.insert(0, Fix(text=tr("let completions be longer: --max_completion_length N")))
    return Sign(
        seen=joined("; ", [*(_words(h, *pair) for pair in lasting), *_others(h)]),
        cause=cause,
        fixes=tuple(fixes),
        badness=1.0,
    )


def always_same(h: History) -> Sign | None:
    """F227: another reward has one value for every completion of the run, and that is not known to be its
    best."""
    lasting = _lasting(h, "unknown")
    if not lasting or _is_all_there_is(h) or all(f is not None for f in h.steady.values()):
        return None  # where none varies, no group has a signal, which F211 says
    values = [found.value for _, found in lasting]
    cause = tr(
        "The reward does not depend on the completion, or all completions so far are alike in what it "
        "measures."
    )
    if max(values) <= 0:
        cause = tr("No completion has earned the reward, or it is a penalty that no completion has incurred.")
        if min(values) < 0:
            cause = tr(
                "Every completion gets the same penalty, or the reward does not depend on the completion."
            )
    return Sign(
        seen=joined("; ", [_words(h, *pair) for pair in lasting]),
        cause=cause,
        fixes=(
            Fix(text=tr("call the reward with a right and a wrong completion: the scores must differ")),
            Fix(
                text=tr(
                    "to measure the reward without training on it, give it the weight 0 in --reward_weights"
                )
            ),
        ),
        badness=1.0,
    )


def may_be_unearned(h: History) -> list[str]:
    """The rewards of an unknown kind that are 0 or less for every completion of the run, in words."""
    return [
        _words(h, name, found)
        for name, found, how in steady_rewards(h)
        if how == "unknown" and kind_of(name) == "other" and found.value <= 0 and _is_long(h, found)
    ]


def steady_words(h: History, code: str) -> list[str]:
    """The rewards that F226 or F227 is about, with their current values; none for other codes."""
    standings: Mapping[str, Standing] = {"F226": "lowest", "F227": "unknown"}
    return [_words(h, *pair) for pair in _lasting(h, standings[code])] if code in standings else []


def _lasting(h: History, standing: Standing) -> list[tuple[str, Steady]]:
    """The rewards of this standing that have had one value for long enough to be reported."""
    return [(name, found) for name, found, how in steady_rewards(h) if how == standing and _is_long(h, found)]


def _is_long(h: History, found: Steady) -> bool:
    """Whether a value has lasted long enough to be reported."""
    if found.num_rollouts >= limit("steady_rollouts_small"):
        return True
    is_much = not h.has_counts or found.num_completions >= limit("steady_completions")
    return is_much and found.num_rollouts >= limit("steady_rollouts")


def _is_all_there_is(h: History) -> bool:
    """Whether the run has only one reward: if that never varies, F211 reports the lack of signal."""
    return len(h.parts()) == 1 and h.compares_siblings


def _words(h: History, name: str, found: Steady) -> str:
    """As in "accuracy is 0 for all 5,120 completions of 80 rollouts"."""
    if not h.has_counts:
        return tr(
            "{name} is {value:g} in all {num} records", name=name, value=found.value, num=found.num_rollouts
        )
    return tr(
        "{name} is {value:g} for all {num:,} completions of {rollouts}",
        name=name,
        value=found.value,
        num=found.num_completions,
        rollouts=counted(found.num_rollouts, "rollout"),
    )


def _others(h: History) -> list[str]:
    """The rewards that did vary, in words."""
    varied = [name for name in h.parts() if h.steady.get(f"{h.sampled('rewards/')}{name}/mean") is None]
    return [tr("only {names} differs between completions", names=", ".join(varied))] if varied else []


def constant_words(h: History) -> list[str]:
    """Every reward that has not varied, with its value, in words; also those at their best value."""
    return [_words(h, name, found) for name, found, _ in steady_rewards(h) if found.num_rollouts > 1]


_STEADY = (
    f"{num('steady_rollouts')} rollouts and {num('steady_completions')} completions, or "
    f"{num('steady_rollouts_small')} rollouts"
)

F226 = Rule(
    code="F226",
    title="Right answers were never rewarded",
    why="The model learns from differences between rewards. While every completion has the lowest value, it "
    "learns nothing from this reward, even if the other rewards rise.",
    check=not_earned,
    when=f"a reward for right answers is at its lowest for every completion of the run: {_STEADY}",
)


F227 = Rule(
    code="F227",
    title="A reward is the same for every completion",
    why="Advantages come from differences between rewards. A reward with one value for every completion "
    "changes nothing: training without it would be the same.",
    check=always_same,
    when="another reward has the same value for every completion of the run, for as long as in F226, and "
    "this value is not known to be its best",
)
