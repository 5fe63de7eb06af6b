"""Rewards that fail, and rewards that never differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.codes import CODES
from covey.errors import GuardStop
from covey.health.saved import MENDED
from covey.rewards.kinds import kind_of, standing
from covey.texts import counted, tr
from covey.types import Finding, Fix, Outcome, ScoredGroup, ScorePart, Severity, Status

_WINDOW = 10
_MOST_FAILED = 0.01
# Rows that a reward does not apply to are usual; so many of them, and no other, from the start on are not.
_LEAST_PROMPTS = 4
_MORE_TIME = Fix(text=tr("give each call of a reward more time: --reward_timeout_s SECONDS"))


class RewardWatch:
    """Looks at the scores of each rollout; remembers how many calls failed in the last ten.

    `tasks` names the rewards that score the rows of a task: the others have no word on them, which is no
    fault.
    """

    def __init__(self, tasks: Mapping[str, Collection[str]] | None = None) -> None:
        self._tasks = dict(tasks or {})
        self._recent: dict[str, deque[tuple[int, int]]] = {}
        self._has_failed: set[str] = set()
        self._was_alone: set[str] = set()
        self._is_first = True
        # Prompts so far, until a reward gives a number for a completion of one; None from then on.
        self._num_unscored: int | None = 0

    def check(self, groups: Sequence[ScoredGroup], step: int) -> list[Finding]:
        """Return what is unusual: F107, a reward that failed for the first time, if only for several rows at
        once; F108, one that is the same throughout the first rollout.

        Raises GuardStop (F107) where a reward gave what is no finite number, failed on a whole rollout, or on
        more than 1 % of the completions of the last ten, and where no reward has given a number since the run
        began.
        """
        refuse_no_numbers(groups, step)
        self._refuse_no_scores(groups, step)
        by_name = self._parts(groups)
        owners = [e.owner for g in groups for e in g.group.episodes]
        said = []
        for name, found in by_name.items():
            parts = list(found.values())
            failed = [p for p in parts if p.status is not Status.OK]
            recent = self._recent.setdefault(name, deque(maxlen=_WINDOW))
            recent.append((len(failed), len(parts)))
            lost, seen = (sum(pair[i] for pair in recent) for i in (0, 1))
            # One failure among few completions is above 1 % and says nothing yet.
            if len(failed) == len(parts) or (lost > _MOST_FAILED * seen and len(recent) == _WINDOW):
                # The reward is mended before the run goes on: its former failures say nothing then.
                self._recent = {}
                raise GuardStop(_failed(name, lost, seen, failed[0] if failed else parts[0], step))
            if failed and name not in self._has_failed:
                self._has_failed.add(name)
                where = _where([owners[i] for i, p in found.items() if p.status is not Status.OK])
                fault = _failed(name, len(failed), len(parts), failed[0], step, where)
                said.append(replace(fault, severity=Severity.WARNING))
            alone = [p for p in parts if p.status is Status.OK and p.message]
            if alone and not failed and name not in self._was_alone:
                # Where a row fails alone, that row is why the call with the others raised.
                self._was_alone.add(name)
                said.append(_scored_alone(name, len(alone), len(parts), alone[0].message, step))
        first, self._is_first = self._is_first, False
        return [*said, *(_constant(groups, by_name, step) if first else ())]

    def _refuse_no_scores(self, groups: Sequence[ScoredGroup], step: int) -> None:
        if self._num_unscored is None:
            return
        parts = [p for g in groups for score in g.scores for p in score.parts]
        if any(p.value is not None or p.status is not Status.OK for p in parts):
            self._num_unscored = None
            return
        self._num_unscored += len(groups)
        if parts and self._num_unscored >= _LEAST_PROMPTS:
            raise GuardStop(_no_score(self._num_unscored, step))

    def _parts(self, groups: Sequence[ScoredGroup]) -> Mapping[str, dict[int, ScorePart]]:
        """The parts of each reward that was asked, by the number of the completion."""
        by_name: dict[str, dict[int, ScorePart]] = {}
        rows = [(g, place) for g in groups for place in range(len(g.scores))]
        for number, (scored, place) in enumerate(rows):
            task, outcome = scored.group.prompt.task, scored.group.episodes[place].outcome
            # No reward is asked about a completion that is lost.
            for part in () if outcome is Outcome.INFRASTRUCTURE else scored.scores[place].parts:
                if part.name in self._tasks.get(task, (part.name,)):
                    by_name.setdefault(part.name, {})[number] = part
        return by_name

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON."""
        recent = {name: [list(pair) for pair in pairs] for name, pairs in self._recent.items()}
        return {
            "is_first": self._is_first,
            "recent": recent,
            "has_failed": sorted(self._has_failed),
            "was_alone": sorted(self._was_alone),
            "num_unscored": self._num_unscored,
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Go on from the rollouts that the stopped run had checked."""
        self._is_first, self._has_failed = values["is_first"], set(values["has_failed"])
        self._was_alone = set(values.get("was_alone", ()))
        self._num_unscored = values.get("num_unscored")
        self._recent = {
            name: deque(((lost, seen) for lost, seen in pairs), maxlen=_WINDOW)
            for name, pairs in values["recent"].items()
        }


def _where(owners: Sequence[int | None]) -> str:
    """`, all of them of rank 1` where one of several ranks has collected them."""
    (first, *others) = dict.fromkeys(owners)
    return "" if others or first is None else tr(", all of them of rank {ranks}", ranks=first)


def refuse_no_numbers(groups: Sequence[ScoredGroup], step: int) -> None:
    """Raise GuardStop (F107) where a reward gave NaN, infinity or what is no number: its name, the row."""
    for scored in groups:
        for sibling, score in enumerate(scored.scores, start=1):
            part = next((p for p in score.parts if p.status is Status.INVALID), None)
            if part is not None:
                text = scored.group.episodes[sibling - 1].text
                where = tr(
                    "completion {sibling} of {num_scores}, {text!r:.80}",
                    sibling=sibling,
                    num_scores=len(scored.scores),
                    text=text,
                )
                raise GuardStop(_no_number(part, scored.group.prompt.id + 1, where, step))


def _no_number(part: ScorePart, row: int, where: str, step: int) -> Finding:
    return Finding(
        code="F107",
        seen=tr(
            "the reward {name} {message}: row {row} of the data, {where}",
            name=part.name,
            message=part.message,
            row=row,
            where=where,
        ),
        why=tr(
            "NaN and infinity cannot be compared with other rewards. covey did not replace the value "
            "by 0, and nothing was learned from it."
        ),
        cause=tr(
            "Possible causes: a division by zero, a logarithm of zero, or a judge whose answer is not "
            "a number."
        ),
        fixes=(
            Fix(text=tr("return None for a completion that the reward does not apply to")),
            MENDED,
        ),
        step=step,
    )


def _no_score(num_prompts: int, step: int) -> Finding:
    return Finding(
        code="F107",
        seen=tr(
            "no reward has scored a completion so far: they returned None for all completions of {prompts}",
            prompts=counted(num_prompts, "prompt"),
        ),
        why=tr("A completion without a reward is left out, so there is nothing to learn from."),
        cause=tr("A column that the reward needs is missing or empty, or no reference answer can be read."),
        fixes=(
            Fix(text=tr("return a number for each completion that the reward applies to")),
            Fix(
                text=tr(
                    "compare the arguments of the reward with the columns of the data; --columns renames "
                    "these"
                )
            ),
        ),
        step=step,
    )


def _failed(name: str, lost: int, seen: int, example: ScorePart, step: int, where: str = "") -> Finding:
    return Finding(
        code="F107",
        seen=tr(
            "the reward {name} failed on {lost} of {seen} completions{where}: {message}",
            name=name,
            lost=lost,
            seen=seen,
            where=where,
            message=example.message,
        ),
        why=tr("Completions without a reward are left out of their groups; none was scored 0."),
        cause=tr("The reward function has an error, or a service that it calls does not answer."),
        fixes=(
            MENDED,
            *([_MORE_TIME] if example.status is Status.TIMEOUT else []),
        ),
        step=step,
    )


def _scored_alone(name: str, num_alone: int, num: int, message: str, step: int) -> Finding:
    return Finding(
        code="F107",
        seen=tr(
            "the reward {name} raised when it was called with several completions, and then scored "
            "{num_alone} of {num} completions one by one: {message}",
            name=name,
            num_alone=num_alone,
            num=num,
            message=message,
        ),
        why=tr(
            "A reward that compares completions with each other gives other values when it gets one at a "
            "time, and each rollout takes one call more for each completion."
        ),
        cause="",
        fixes=(MENDED,),
        severity=Severity.WARNING,
        step=step,
    )


def _constant(
    groups: Sequence[ScoredGroup], by_name: Mapping[str, Mapping[int, ScorePart]], step: int
) -> list[Finding]:
    """A finding for each reward with one value for every completion; a single completion tells nothing."""
    findings = []
    for name, parts in by_name.items():
        values = {v for p in parts.values() for v in (p.steps or (p.value,))}
        if len(values) > 1 or len(parts) < 2:
            continue
        (value,) = values
        if value is not None and kind_of(name) != "answer" and standing(name, value) == "best":
            continue  # no completion is too long, or each has the form that is asked for
        findings.append(
            Finding(
                code="F108",
                seen=tr(
                    "{name} is {words} for all {num_parts} completions of the first rollout.",
                    name=name,
                    words="None" if value is None else tr("{value:g}", value=value),
                    num_parts=len(parts),
                ),
                why=CODES["F108"].why,
                cause=_cause(groups, value),
                fixes=(
                    Fix(text=tr("read some completions and their scores in rollouts/ of the run")),
                    Fix(text=tr("check that the gold answers are in the form that the reward compares"))
                    if _share_cut(groups) <= 0.5
                    else Fix(text=tr("let completions be longer: --max_completion_length N")),
                ),
                severity=Severity.WARNING,
                step=step,
            )
        )
    return findings


def _share_cut(groups: Sequence[ScoredGroup]) -> float:
    outcomes = [e.outcome for g in groups for e in g.group.episodes]
    return sum(o is Outcome.TRUNCATED for o in outcomes) / len(outcomes)


def _cause(groups: Sequence[ScoredGroup], value: float | None) -> str:
    cut = _share_cut(groups)
    sources = [s.extras.get("parsed_by") for g in groups for s in g.scores]
    if value is None:
        return tr(
            "The reward returned None for every row: a column that it needs is missing, or no correct "
            "answer can be read."
        )
    if cut > 0.5 and value <= 0:
        return tr(
            "{cut:.0%} of the completions were truncated at max_completion_length, before an answer.", cut=cut
        )
    if value <= 0 and sources and all(s == "none" for s in sources):
        return tr("No completion contains an answer: no <answer> tag, no \\boxed, no number.")
    if value == 0:
        return tr(
            "The task is too hard for the model, the prompt does not ask for the format that is rewarded, or "
            "the reward is a penalty that no completion gets."
        )
    if value < 0:
        return tr("Every completion gets the same penalty, or the reward does not depend on the completion.")
    return tr("The task is too easy for the model, or the reward does not depend on the completion.")
