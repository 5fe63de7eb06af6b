"""From a run's log to a verdict, with the evidence and the causes behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from covey.codes import CODES
from covey.config.checkpoints import checkpoint_name, checkpoint_step
from covey.doctor.evidence import evidence
from covey.doctor.log import Log, metrics_of
from covey.doctor.trend import Trend, reward_trend
from covey.doctor.verdicts import (
    BY_CODE,
    HEALTHY,
    HUNG,
    INTERRUPTED,
    LEARNING,
    NAMED,
    ORDER,
    UNCLEAR,
    UNFINISHED,
    WELL,
    WRONG,
)
from covey.health.history import History, number
from covey.health.names import CUT, NO_SPREAD
from covey.health.record import fixes_of, text_of
from covey.health.rules import Rules
from covey.health.saved import Saved, checkpoints_of, possible
from covey.health.signs.unearned import may_be_unearned, steady_words
from covey.plan.shape import least_group
from covey.texts import counted, joined, tr, written
from covey.types import Finding, Fix, Severity, StepRecord

# Findings that a run goes on after; any other F1xx is a guard that stopped it.
_GOES_ON = ("F105", "F108", "F109")
# Above this share of truncated completions most are not whole answers.
_MOST_CUT = 0.5
_STILL_WRITTEN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A finding with how long it lasted: `num_records` is 0 for what is no matter of steps."""

    finding: Finding
    num_records: int = 0
    holds: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the doctor says of a run; `exit_code` is 0, or 3 where something is wrong with the run."""

    log: Log
    verdict: str
    summary: str
    exit_code: int
    evidence: Sequence[tuple[str, str]]
    sightings: Sequence[Sighting]


def examine(log: Log, now: float) -> Report:
    """Replay the rules over the log and judge it; `now` is in seconds since the epoch."""
    saved = partial(_checkpoints, log)
    rules = Rules(log.options, saved=saved, has_counts=log.source == "covey")
    first: dict[str, Finding] = {}
    for record in (*_before_the_first_step(log), *log.records):
        for finding in rules.check(record):
            first.setdefault(finding.code, finding)
    holding = rules.holding()
    sightings = [Sighting(finding=f) for f in (*_recorded(log, rules.history), *_of_options(log.options))]
    for code, finding in first.items():
        if code in holding and (sign := rules.advice(code)) is not None:
            finding = replace(finding, cause=sign.cause, fixes=sign.fixes)
        sightings.append(
            Sighting(finding=finding, num_records=rules.counts[code], holds=code in holding),
        )
    trend = reward_trend(log)
    said = ("F221", "F222", "F207")
    if trend is not None and trend.way < 0 and not any(code in first for code in said):
        sightings.append(Sighting(finding=_falling(trend, rules.history)))
    sightings.sort(key=_rank)
    verdict, summary, exit_code = _judge(log, sightings, rules.history, trend, now)
    return Report(
        log=log,
        verdict=verdict,
        summary=summary,
        exit_code=exit_code,
        evidence=evidence(log, rules.history, trend),
        sightings=sightings,
    )


def _before_the_first_step(log: Log) -> list[StepRecord]:
    """The evaluation of the model that the run began with, which is an event and no step."""
    evaluations = [e for e in log.events if e.get("kind") == "evaluated" and e.get("step") == 0][:1]
    return [
        StepRecord(step=0, rollout=-1, pass_index=0, metrics=metrics_of(event, {}, 1))
        for event in ({n: v for n, v in e.items() if n.startswith("eval_")} for e in evaluations)
    ]


def _checkpoints(log: Log) -> list[Saved]:
    """The checkpoints of a run that were found whole."""
    if log.source == "covey":
        return [s for s in checkpoints_of(log.path) if s.step in log.saved]
    folder = log.path.parent if checkpoint_step(log.path.parent.name) is None else log.path.parent.parent
    paths = {step: folder / checkpoint_name(step) for step in log.saved}
    return [Saved(step=s, path=p, resumes=True, is_ours=False) for s, p in paths.items()]


def _recorded(log: Log, history: History) -> list[Finding]:
    """What the run itself put on record and the rules do not see again: guards, rewards, hangs."""
    findings: dict[str, Finding] = {}
    for event in log.events:
        code, step = str(event.get("code", "")), event.get("step")
        if event.get("kind") != "finding" or code.startswith("F2"):
            continue
        known = CODES.get(code)
        findings[code] = Finding(
            code=code,
            seen=text_of(event, "seen"),
            why=known.why if known else "",
            cause=text_of(event, "cause"),
            fixes=_advised(event, history, step) or (Fix(text=tr("`covey explain {code}`", code=code)),),
            severity=Severity.ERROR if _has_stopped(code, event) else Severity.WARNING,
            step=step if isinstance(step, int) else None,
        )
    # A run that has gone on since then was not stopped for good.
    return [f for f in findings.values() if not _stops(f) or (f.step or 0) >= log.last_step]


def _advised(event: Mapping[str, Any], history: History, step: Any) -> tuple[Fix, ...]:
    """Return the advice of a recorded finding whose checkpoints still exist."""
    saved = history.saved()
    places = {str(s.path) for s in saved}
    fixes = [f for f in fixes_of(event) if _is_there(f.edits.get("resume_from_checkpoint"), places)]
    before = step if isinstance(step, int) else history.step
    return possible(fixes, saved, before, history.slower())


def _is_there(place: object, places: Collection[str]) -> bool:
    """Whether advice names no checkpoint by its path, or one that is there."""
    return not isinstance(place, str) or checkpoint_step(Path(place).name) is None or place in places


def _has_stopped(code: str, event: Mapping[str, Any]) -> bool:
    """Whether a guard ended the run there, not what it says in passing: F107 of a few rows."""
    is_guard = code.startswith(("F1", "F3")) and code not in _GOES_ON
    return is_guard and event.get("severity") != Severity.WARNING


def _stops(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR and finding.code.startswith(("F1", "F3"))


def _of_options(options: Mapping[str, Any]) -> list[Finding]:
    """What the options alone say: with these nothing can be learned."""
    findings = []
    size, heat, rate = (number(options.get(n)) for n in ("num_generations", "temperature", "learning_rate"))
    if size is not None and size < least_group(str(options.get("advantage_estimator"))):
        findings.append(_option("E201", tr("num_generations is {size:g}", size=size), {"num_generations": 8}))
    is_cold = heat is not None and heat <= 0
    if is_cold or number(options.get("top_k")) == 1:
        seen, edits = (
            (tr("temperature is 0"), {"temperature": 1.0}) if is_cold else (tr("top_k is 1"), {"top_k": 0})
        )
        findings.append(_option("E110", tr("{seen}: sampling is greedy", seen=seen), edits))
    if rate == 0:
        findings.append(_option("W103", tr("learning_rate is 0"), {"learning_rate": 1e-6}))
    return findings


def _option(code: str, seen: str, edits: Mapping[str, Any]) -> Finding:
    return Finding(
        code=code,
        seen=seen,
        why=CODES[code].why,
        cause=tr("The value is set in the options of this run."),
        fixes=(Fix(text=tr("use a common value"), edits=edits),),
    )


def _falling(trend: Trend, history: History) -> Finding:
    first, last = trend.words
    return Finding(
        code="F215",
        seen=tr(
            "the mean reward was {first} in the first quarter of the run and {last} in the last quarter",
            first=first,
            last=last,
        ),
        why=CODES["F215"].why,
        cause=tr("The optimizer steps are too large, or the reward changed during the run."),
        fixes=(history.slower(),),
        severity=Severity.WARNING,
    )


def _rank(sighting: Sighting) -> tuple[bool, bool, int, int]:
    code = sighting.finding.code
    order = ORDER.index(code) if code in ORDER else len(ORDER)
    return not sighting.holds, not _stops(sighting.finding), order, sighting.finding.step or 0


def _judge(
    log: Log, sightings: Sequence[Sighting], history: History, trend: Trend | None, now: float
) -> tuple[str, str, int]:
    """The verdict's word, its line, and the exit code."""
    present = [s.finding for s in sightings if s.holds]
    return _by_findings(present, history) or _ending(log, now) or _of_a_calm_run(log, present, history, trend)


def _by_findings(present: Sequence[Finding], history: History) -> tuple[str, str, int] | None:
    for finding in present:
        if _stops(finding):
            word = HUNG
            if not finding.code.startswith("F3"):
                word = tr("stopped by guard {code}", code=finding.code)
            return word, tr("{title}, at step {step}", title=_title(finding), step=finding.step), WRONG
    for word, codes in BY_CODE:
        named = [f for f in present if f.code in codes]
        if named:
            shown = named if word == "unhealthy" else named[:1]
            return word, joined("; ", [_line(f, history) for f in shown]), WRONG
    return None


def _of_a_calm_run(
    log: Log, present: Sequence[Finding], history: History, trend: Trend | None
) -> tuple[str, str, int]:
    """Return the verdict if no rule speaks: learning, unclear or healthy."""
    unearned = may_be_unearned(history)
    doubts = [*unearned, *_doubts(history)]
    named = [_line(f, history) for f in present if f.code in NAMED]
    records = counted(len(log.records), "record")
    if trend is not None and trend.way > 0:
        first, last = trend.words
        rises = tr("mean reward {first} -> {last}", first=first, last=last)
        if unearned:
            words = tr("{rises}, but {doubts}", rises=rises, doubts=joined(tr(" and "), unearned))
            return UNCLEAR, words, HEALTHY
        return LEARNING, joined("; ", [rises, *named]) if named else _calmly(rises), HEALTHY
    if doubts:
        words = tr(
            "nothing is wrong by the rules after {records}, but {doubts}",
            records=records,
            doubts=joined(tr(" and "), doubts),
        )
        return UNCLEAR, words, HEALTHY
    words = joined("; ", named) if named else tr("nothing unusual in {records}", records=records)
    if trend is None:
        return WELL, words + tr(", which are too few to say whether the reward rises"), HEALTHY
    first, last = trend.words
    level = tr("; the mean reward neither rises nor falls ({first} -> {last})", first=first, last=last)
    return WELL, words + level, HEALTHY


def _calmly(rises: str) -> str:
    return tr("{rises}, currently nothing unusual", rises=rises)


def _line(finding: Finding, history: History) -> str:
    """As in "no group has a signal (F211)"; of a reward that never varies with its name and value."""
    title = tr("{title} ({code})", title=_title(finding), code=finding.code)
    values = steady_words(history, finding.code)
    return joined(": ", [title, joined("; ", values)]) if values else title


def _doubts(history: History) -> list[str]:
    """What stands against calling a run healthy although no rule speaks yet."""
    doubts = []
    cut, flat = history.get(CUT), history.get(NO_SPREAD)
    if cut is not None and cut.now > _MOST_CUT:
        doubts.append(tr("{cut:.0%} of the newest completions are truncated", cut=cut.now))
    if (
        flat is not None
        and history.compares_siblings
        and min(v.value for v in (*flat.first, *flat.last)) == 1
    ):
        doubts.append(tr("all completions of each prompt got the same reward so far"))
    return doubts


def _title(finding: Finding) -> str:
    known = CODES.get(finding.code)
    if known is None:
        return finding.code
    title = known.title
    small = title if title[1].isupper() else title[0].lower() + title[1:]
    return written(tr(title), small)


def _ending(log: Log, now: float) -> tuple[str, str, int] | None:
    """How a run that is not at its end came to stand where it stands."""
    last, total = log.last_step, log.total_steps
    stride = log.records[-1].step - log.records[-2].step if len(log.records) > 1 else 1
    if last and (total is None or last > total - stride):
        return None
    at = tr("step {last:,}", last=last) + ("" if total is None else tr(" of {total:,}", total=total))
    age = now - log.written
    if 0 <= age < _STILL_WRITTEN_S and (log.may_be_owned or last not in log.saved):
        return (
            UNFINISHED,
            tr("{at}; last written {age:.0f} s ago, so it may still be running", at=at, age=age),
            HEALTHY,
        )
    if last and last in log.saved:
        return (
            INTERRUPTED,
            tr("after {at}; there is a checkpoint of this step from which it can resume", at=at),
            HEALTHY,
        )
    saved = (
        tr("the newest complete checkpoint is of step {saved}", saved=max(log.saved))
        if log.saved
        else tr("there is no checkpoint")
    )
    return (
        UNFINISHED,
        tr("{at}; no end was recorded, so it was killed or it hangs; {saved}", at=at, saved=saved),
        WRONG,
    )
