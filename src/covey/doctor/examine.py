"""From a run's log to a verdict, with the evidence and the causes behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from covey.codes import CODES
from covey.doctor.evidence import evidence
from covey.doctor.log import Log, metrics_of
from covey.health.history import History, number
from covey.health.names import CUT, NO_SPREAD
from covey.health.record import fixes_of, text_of
from covey.health.rules import Rules
from covey.texts import counted, joined, tr, written
from covey.types import Finding, Fix, Severity, StepRecord

HEALTHY, WRONG = 0, 3

# Findings that a run goes on after; any other F1xx is a guard that stopped it.
_GOES_ON = ("F105", "F108", "F109")
# What a run is called by the first of these findings that holds. Options that leave nothing to learn come
# first, as they cause the others; then what has become of the model, from which a lack of signal follows.
_VERDICTS = (
    (tr("not learning"), ("E201", "E110", "W103")),
    (tr("broken"), ("F218", "F221")),
    (tr("reward hacking"), ("F207", "F223")),
    (tr("broken"), ("F209", "F206")),
    (tr("collapsed"), ("F201", "F224", "F204")),
    (tr("unhealthy"), ("F202", "F203", "F205", "F208", "F210")),
    (tr("getting worse"), ("F222",)),
    (tr("not learning"), ("F216", "F213", "F217", "F219", "F211", "F215")),
    (tr("unhealthy"), ("F212", "F214", "F220", "F233")),
)
_ORDER = tuple(code for _, codes in _VERDICTS for code in codes)
_LEAST_VALUES = 20
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
    rules = Rules(log.options)
    first: dict[str, Finding] = {}
    for record in (*_before_the_first_step(log), *log.records):
        for finding in rules.check(record):
            first.setdefault(finding.code, finding)
    holding = rules.holding()
    sightings = [Sighting(finding=f) for f in (*_recorded(log), *_of_options(log.options))]
    for code, finding in first.items():
        sightings.append(
            Sighting(finding=finding, num_records=rules.counts[code], holds=code in holding),
        )
    trend = reward_trend(log)
    said = ("F215", "F221", "F222", "F207")
    if trend is not None and trend[2] < 0 and not any(code in first for code in said):
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


def reward_trend(log: Log) -> tuple[float, float, int] | None:
    """Mean reward of the first and the last quarter, and 1, 0 or -1: it rises, neither, or falls.

    A difference below three standard errors is neither; None where there are fewer than 20 values.
    """
    values = [
        m.value
        for r in log.records
        if (m := r.metrics.get("reward")) is not None and m.value is not None and math.isfinite(m.value)
    ]
    if len(values) < _LEAST_VALUES:
        return None
    quarter = len(values) // 4
    first, last = values[:quarter], values[-quarter:]
    error = math.sqrt((variance(first) + variance(last)) / quarter)
    difference = fmean(last) - fmean(first)
    way = 0 if abs(difference) <= max(3 * error, 1e-9) else 1 if difference > 0 else -1
    return fmean(first), fmean(last), way


def _recorded(log: Log) -> list[Finding]:
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
            fixes=fixes_of(event) or (Fix(text=tr("`covey explain {code}`", code=code)),),
            severity=Severity.ERROR if _has_stopped(code, event) else Severity.WARNING,
            step=step if isinstance(step, int) else None,
        )
    # A run that has gone on since then was not stopped for good.
    return [f for f in findings.values() if not _stops(f) or (f.step or 0) >= log.last_step]


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
    if size is not None and size < 2:
        findings.append(_option("E201", tr("num_generations is {size:g}", size=size), {"num_generations": 8}))
    if (heat is not None and heat <= 0) or number(options.get("top_k")) == 1:
        seen = tr("temperature is 0") if heat is not None and heat <= 0 else tr("top_k is 1")
        findings.append(_option("E110", tr("{seen}: sampling is greedy", seen=seen), {"temperature": 1.0}))
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


def _falling(trend: tuple[float, float, int], history: History) -> Finding:
    return Finding(
        code="F215",
        seen=tr(
            "the mean reward was {first:.4g} in the first quarter of the run and {last:.4g} in the last "
            "quarter",
            first=trend[0],
            last=trend[1],
        ),
        why=CODES["F215"].why,
        cause=tr("The optimizer steps are too large, or the reward changed during the run."),
        fixes=(history.slower(),),
        severity=Severity.WARNING,
    )


def _rank(sighting: Sighting) -> tuple[bool, bool, int, int]:
    code = sighting.finding.code
    order = _ORDER.index(code) if code in _ORDER else len(_ORDER)
    return not sighting.holds, not _stops(sighting.finding), order, sighting.finding.step or 0


def _judge(
    log: Log,
    sightings: Sequence[Sighting],
    history: History,
    trend: tuple[float, float, int] | None,
    now: float,
) -> tuple[str, str, int]:
    """The verdict's word, its line, and the exit code."""
    present = [s.finding for s in sightings if s.holds]
    for finding in present:
        if _stops(finding):
            word = (
                tr("hung")
                if finding.code.startswith("F3")
                else tr("stopped by guard {code}", code=finding.code)
            )
            return word, tr("{title}, at step {step}", title=_title(finding), step=finding.step), WRONG
    for word, codes in _VERDICTS:
        named = [f for f in present if f.code in codes]
        if named:
            shown = named if word == "unhealthy" else named[:1]
            return (
                word,
                joined("; ", [tr("{title} ({code})", title=_title(f), code=f.code) for f in shown]),
                WRONG,
            )
    ended = _ending(log, now)
    if ended is not None:
        return ended
    if trend is not None and trend[2] > 0:
        return (
            tr("learning"),
            tr(
                "mean reward {first:.4g} -> {last:.4g}, currently nothing unusual",
                first=trend[0],
                last=trend[1],
            ),
            HEALTHY,
        )
    doubts = _doubts(history)
    if doubts:
        words = tr(
            "nothing is wrong by the rules after {records}, but {doubts}",
            records=counted(len(log.records), "record"),
            doubts=joined(tr(" and "), doubts),
        )
        return tr("unclear"), words, HEALTHY
    words = tr("nothing unusual in {records}", records=counted(len(log.records), "record"))
    if trend is None:
        words += tr(", which are too few to say whether the reward rises")
    else:
        level = tr(
            "; the mean reward neither rises nor falls ({first:.4g} -> {last:.4g})",
            first=trend[0],
            last=trend[1],
        )
        words += level
    return tr("healthy"), words, HEALTHY


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
            tr("unfinished"),
            tr("{at}; last written {age:.0f} s ago, so it may still be running", at=at, age=age),
            HEALTHY,
        )
    if last and last in log.saved:
        return (
            tr("interrupted"),
            tr("after {at}; there is a checkpoint of this step from which it can resume", at=at),
            HEALTHY,
        )
    saved = (
        tr("the newest complete checkpoint is of step {saved}", saved=max(log.saved))
        if log.saved
        else tr("there is no checkpoint")
    )
    return (
        tr("unfinished"),
        tr("{at}; no end was recorded, so it was killed or it hangs; {saved}", at=at, saved=saved),
        WRONG,
    )
