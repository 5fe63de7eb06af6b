"""`covey doctor`: what a run directory says of its run, or where a running process is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from covey.cli.language import Language
from covey.cli.live import live
from covey.cli.show import finding_text
from covey.doctor.examine import Report, Sighting, examine
from covey.doctor.read import read_run
from covey.errors import ConfigError
from covey.plan.problem import problem
from covey.plan.words import coded
from covey.types import Fix

_USAGE = """\
usage: covey doctor RUN [--json]
       covey doctor --live PID

Reads the directory of a run and says whether it learns, what is wrong, why, and what to type. RUN may also be
an output directory of TRL (trainer_state.json) or of ms-swift (logging.jsonl), or one of these files. Nothing
is written, no weight is read, no network is asked.

  --json   the same as one JSON object
  --live   where the run of a process is now: phase, step, micro-batch and the stacks of all threads of each
           rank; PID is any process of the run, and nothing of it is disturbed

The exit code is 0 for a run that is well, 3 where something is wrong with it, 2 where RUN is no run.
"""


def doctor(argv: Sequence[str], language: Language = "en") -> int:
    """Print the report of a run; ConfigError where there is none."""
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(_USAGE)
        return 0
    if argv[0] == "--live" and len(argv) == 2:
        return live(argv[1])
    words = [word for word in argv if word != "--json"]
    stray = [word for word in words if word.startswith("-")] or words[1:]
    if stray or not words:
        raise ConfigError(
            [
                problem(
                    "E108",
                    "doctor",
                    f"`{' '.join(stray)}` is nothing that `covey doctor` takes."
                    if stray
                    else "No run is named.",
                    "A flag of another verb, or more than one run.",
                    Fix(text="`covey doctor runs/NAME --json`, or `covey doctor --live PID`"),
                )
            ]
        )
    report = examine(read_run(Path(words[0])), time.time())
    if "--json" in argv:
        sys.stdout.write(json.dumps(as_json(report), ensure_ascii=False, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(as_lines(report, language)) + "\n")
    return report.exit_code


def as_lines(report: Report, language: Language = "en") -> list[str]:
    """The verdict, the evidence, then each finding: those that hold now first, with what causes others."""
    lines = coded("verdict", f"{report.verdict}: {report.summary}")
    for label, text in report.evidence:
        lines += coded(label, text)
    for sighting in report.sightings:
        lines += ["", *finding_text(sighting.finding, language).splitlines()]
        if sighting.num_records:
            lines.append(f"  {'held':<7}{_lasted(sighting)}")
    return lines


def _lasted(sighting: Sighting) -> str:
    number = "1 record" if sighting.num_records == 1 else f"{sighting.num_records:,} records"
    return f"at {number}; {'it still does' if sighting.holds else 'no longer at the end'}"


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
