"""`covey doctor`: what a run directory says of its run, or where a running process is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from covey.cli.live import live
from covey.cli.show import finding_text, label_width
from covey.cli.verbs import nameless
from covey.config.argv import read_words
from covey.doctor.examine import Report, Sighting, examine
from covey.doctor.read import read_run
from covey.errors import ConfigError
from covey.options.verbs import DoctorOptions
from covey.plan.problem import problem
from covey.plan.words import coded
from covey.texts import joined, padded, tr
from covey.texts.language import Language, spoken
from covey.texts.terminal import say, say_json
from covey.types import Fix, Problem

_USAGE = tr("`covey doctor runs/NAME --json`, or `covey doctor --live PID`")


def doctor(argv: Sequence[str], language: Language = "en") -> int:
    """Print the report of a run; ConfigError where there is none."""
    options, words = read_words("doctor", argv, DoctorOptions)
    if options.live is not None:
        if beside := [*words, *(["--json"] if options.json_ else [])]:
            raise ConfigError(
                [_stray(tr("`--live` cannot be combined with `{beside}`.", beside=" ".join(beside)))]
            )
        return live(str(options.live))
    if not words:
        raise ConfigError([nameless("doctor", tr("No run directory is given."), _USAGE)])
    report = examine(read_run(Path(words[0])), time.time())
    if options.json_:
        say_json(as_json(report))
    else:
        say("\n".join(as_lines(report, language)))
    return report.exit_code


def _stray(seen: str) -> Problem:
    cause = tr("A report describes a directory; --live describes a running process.")
    return problem("E108", "doctor", seen, cause, Fix(text=_USAGE))


def as_lines(report: Report, language: Language = "en") -> list[str]:
    """The verdict, the evidence, then each finding: those that hold now first, with what causes others."""
    lines = coded(tr("verdict"), tr("{verdict}: {summary}", verdict=report.verdict, summary=report.summary))
    for label, text in report.evidence:
        lines += coded(label, text)
    typed: list[Mapping[str, object]] = []
    for sighting in report.sightings:
        # What to type is said once, beside the first finding that asks for it.
        fixes = tuple(fix for fix in sighting.finding.fixes if not fix.edits or fix.edits not in typed)
        typed += [fix.edits for fix in fixes if fix.edits]
        lines += ["", *finding_text(replace(sighting.finding, fixes=fixes), language).splitlines()]
        if sighting.num_records:
            lines.append(
                spoken(joined("", ["  ", padded(tr("found"), label_width(language)), _lasted(sighting)]))
            )
    return lines


def _lasted(sighting: Sighting) -> str:
    number = (
        tr("1 record")
        if sighting.num_records == 1
        else tr("{num_records:,} records", num_records=sighting.num_records)
    )
    return tr(
        "in {number}; {still}",
        number=number,
        still=tr("still true in the newest record")
        if sighting.holds
        else tr("no longer true in the newest record"),
    )


def as_json(report: Report) -> dict[str, object]:
    """The report as an object."""
    log = report.log
    return {
        "verdict": report.verdict,
        "summary": report.summary,
        "exit_code": report.exit_code,
        "run": {
            "path": str(log.path),
            "source": log.source,
            "step": log.last_step,
            "total_steps": log.total_steps,
            "checkpoints": list(log.saved),
        },
        "evidence": [{"about": label, "text": text} for label, text in report.evidence],
        "findings": [
            {
                "code": s.finding.code,
                "severity": s.finding.severity.value,
                "step": s.finding.step,
                "records": s.num_records,
                "holds": s.holds,
                "seen": s.finding.seen,
                "why": s.finding.why,
                "cause": s.finding.cause,
                "fixes": [{"text": fix.text, "edits": dict(fix.edits)} for fix in s.finding.fixes],
            }
            for s in report.sightings
        ],
    }
