"""What the doctor calls a run, and by which findings."""

from __future__ import annotations

from dataclasses import dataclass

from covey.texts import tr

HEALTHY, WRONG = 0, 3

LEARNING, WELL, UNCLEAR = tr("learning"), tr("healthy"), tr("unclear")
INTERRUPTED, UNFINISHED, HUNG = tr("interrupted"), tr("unfinished"), tr("hung")

BY_CODE = (
    (tr("not learning"), ("E201", "E110", "W103")),
    (tr("broken"), ("F218", "F221")),
    (tr("reward hacking"), ("F207", "F223")),
    (tr("broken"), ("F209", "F206")),
    (tr("collapsed"), ("F229", "F201", "F224", "F204")),
    (tr("unhealthy"), ("F202", "F203", "F205", "F208", "F210")),
    (tr("getting worse"), ("F222",)),
    (tr("not learning"), ("F216", "F213", "F217", "F219", "F226", "F211", "F215")),
    (tr("unhealthy"), ("F225", "F228", "F212", "F214", "F220", "F233")),
)
"""What a run is called by the first of these findings that holds. Options that leave nothing to learn come
first, as they cause the others; then what has become of the model, from which a lack of signal follows."""

ORDER = tuple(code for _, codes in BY_CODE for code in codes)

NAMED = ("F227",)
"""Findings that a run may have and be well: they are named in its line, whatever it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a verdict means, in the words of the documentation, and the exit code with it."""

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
        means="nothing unusual; too short, or too level, to say that it learns",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=UNCLEAR,
        means="nothing is wrong by the rules yet, but a reward of an unknown kind is at 0 or below for every "
        "completion and may never be earned; or the reward does not rise, and most of the newest completions "
        "are truncated, or all completions of each prompt got the same reward",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=INTERRUPTED,
        means="it ended before its last planned step, with a checkpoint of the step that it ended at",
        exit_code=str(HEALTHY),
    ),
    Meaning(
        word=UNFINISHED,
        means="it ended without a word: killed, or it hangs. Written within two minutes, it may still run",
        exit_code=f"{WRONG}, or {HEALTHY}",
    ),
    Meaning(word=tr("broken"), means="what the model writes, or its numbers, are of no use any more"),
    Meaning(word=tr("reward hacking"), means="the reward rises for something else than was meant"),
    Meaning(word=tr("collapsed"), means="completions hardly differ any more"),
    Meaning(
        word=tr("getting worse"),
        means="the reward is far below its start, or its best, and completions look as before",
    ),
    Meaning(word=tr("not learning"), means="no signal, no gradient, no learning rate, no movement"),
    Meaning(word=tr("unhealthy"), means="any other sign"),
    Meaning(word="stopped by guard CODE", means="a guard stopped it, and nothing was trained since"),
    Meaning(word=HUNG, means="its processes stood still, and it said so"),
)
"""Every verdict, in the order of the documentation."""
