"""The verdicts of the doctor, and the findings that lead to each."""

from __future__ import annotations

from dataclasses import dataclass

from covey.health.rule_list import RULES
from covey.texts import tr

HEALTHY, WRONG = 0, 3

LEARNING, WELL, UNCLEAR = tr("learning"), tr("healthy"), tr("unclear")
INTERRUPTED, UNFINISHED, HUNG = tr("interrupted"), tr("unfinished"), tr("hung")

_BY_CODE = (
    (tr("not learning"), ("E201", "E110", "W103")),
    (tr("broken"), ("F218", "F221")),
    (tr("reward hacking"), ("F207", "F223")),
    (tr("broken"), ("F209", "F206")),
    (tr("collapsed"), ("F229", "F201", "F224", "F204")),
    (tr("unhealthy"), ("F202", "F203", "F205", "F208", "F210")),
    (tr("getting worse"), ("F222",)),
    (tr("not learning"), ("F216", "F213", "F217", "F219", "F226", "F211", "F215")),
    (tr("unhealthy"), ("F225", "F228", "F212", "F214", "F233")),
)

NAMED = ("F227",)
"""Findings that do not decide the verdict; the line of the verdict names them."""

_PLACED = {*NAMED, *(code for _, codes in _BY_CODE for code in codes)}

BY_CODE = (*_BY_CODE, (tr("unhealthy"), tuple(rule.code for rule in RULES if rule.code not in _PLACED)))
"""The first of these findings that holds decides the verdict. Options that leave nothing to learn come
first, because they cause the others; then faults of the model, because a lack of signal follows from them.
Rules that are named nowhere above come last."""

ORDER = tuple(code for _, codes in BY_CODE for code in codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Holds the meaning of a verdict, as the documentation prints it, and its exit code."""

    word: str
    means: str
    exit_code: str = str(WRONG)


MEANINGS = (
    Meaning(
        word=LEARNING,
        means="the mean reward of the last quarter of the rollouts is above that of the first by about "
        "three standard errors, by more where the run has few rollouts",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=WELL,
        means="nothing unusual was found; the run is too short, or its reward too level, to call it learning",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=UNCLEAR,
        means="no rule has found a fault yet. But a reward whose kind is not known is 0 or less for every "
        "completion, so it may never be earned; or the reward does not rise, and most of the newest "
        "completions are truncated or all completions of each prompt got the same reward",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=INTERRUPTED,
        means="it ended before its last planned step, with a checkpoint of the step that it ended at",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=UNFINISHED,
        means="the log stops without saying why: the run was killed, or it hangs. If it wrote something in "
        "the last two minutes, it may still run",
        exit_code=f"{WRONG}, or {HEALTHY}",
    ),
    Meaning(
        word=tr("broken"), means="the model's completions, or the numbers of the run, are no longer usable"
    ),
    Meaning(
        word=tr("reward hacking"),
        means="a part of the reward is paid for something other than what the reward is meant to measure",
    ),
    Meaning(word=tr("collapsed"), means="completions hardly differ any more"),
    Meaning(
        word=tr("getting worse"),
        means="the reward is far below its start, or its best, and completions look as before",
    ),
    Meaning(
        word=tr("not learning"),
        means="the rewards, the gradient or the learning rate leave nothing to learn from, or the reward "
        "does not rise",
    ),
    Meaning(word=tr("unhealthy"), means="any other sign"),
    Meaning(word="stopped by guard CODE", means="a guard stopped it, and nothing was trained since"),
    Meaning(word=HUNG, means="its processes stopped making progress, and the run recorded that"),
)
"""Every verdict, in the order of the documentation."""
