"""Exceptions. One root; ValueError's heirs are for what a user can mend.

Their text is for the traceback of a Python program: it has what is wrong, and the options as a program types
them. The command has a layout of its own for the same problems and findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.texts import Whole, counted, fitted, padded, tr
from covey.texts.catalogue import columns
from covey.texts.language import spoken
from covey.types import Finding, Problem, Severity


class CoveyError(Exception):
    """Root of every exception that covey raises on purpose."""


class ConfigError(CoveyError, ValueError):
    """A configuration or an input at fault, with all its problems (exit code 2); `beside` is what a verb has
    found out all the same, as JSON has it."""

    def __init__(self, problems: Sequence[Problem], beside: Mapping[str, Any] | None = None) -> None:
        self.problems = tuple(problems)
        self.beside = dict(beside or {})
        super().__init__("; ".join(f"{p.code} {p.option}: {p.seen}" for p in self.problems))

    def __str__(self) -> str:
        faults = [p for p in self.problems if p.severity is Severity.ERROR]
        warnings = [p for p in self.problems if p.severity is Severity.WARNING]
        number = counted(len(faults), "problem")
        lines = [spoken(tr("{number}; nothing was started or written.", number=number))]
        for fault in faults:
            lines += ["", f"{fault.code} {fitted(fault.option)}: {spoken(fault.seen)}", *_ways_out(fault)]
        if warnings:
            lines += ["", spoken(tr("Warnings, which did not stop it:"))]
            lines += [f"{warning.code} {warning.option}: {spoken(warning.seen)}" for warning in warnings]
        codes = " ".join(dict.fromkeys(fault.code for fault in faults))
        return "\n".join([*lines, "", spoken(tr("More: covey explain {codes}", codes=codes))])


class GuardStop(CoveyError):
    """A guard stopped the run (exit code 3); `finding` says what it saw, and `checkpoint` is what was saved
    then, from which the run can be resumed."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.checkpoint: Path | None = None
        super().__init__(f"{finding.code}: {finding.seen}")

    def __str__(self) -> str:
        lines = _found(self.finding)
        if self.checkpoint is not None:
            saved = tr("The run was saved in {checkpoint}.", checkpoint=self.checkpoint)
            lines += ["", spoken(saved), spoken(CONTINUE)]
        return "\n".join(lines)


class RunFailed(CoveyError):
    """A process of the run cannot go on; `finding` says why. `exit_code` is 3 where the run directory is at
    fault, and 1 for what covey did not foresee."""

    def __init__(self, finding: Finding, exit_code: int = 1) -> None:
        self.finding = finding
        self.exit_code = exit_code
        super().__init__(f"{finding.code}: {finding.seen}")

    def __str__(self) -> str:
        return "\n".join(_found(self.finding))


class ProgramError(Exception):
    """Carries, as its cause, what code of the program has raised in a run; a run of one process raises that
    again."""


class EngineLost(RunFailed):
    """Says that no engine is left to sample: completions that it has not returned are lost."""


class CheckpointError(CoveyError, ValueError):
    """A directory that is no checkpoint, or one whose files are not what its manifest says."""


class DamagedModelError(CheckpointError):
    """A model or an adapter whose own files are at fault, all of them named."""


class OtherRankFailed(CoveyError):
    """Another rank could not do its part of what all of them do; it says why itself."""


CONTINUE = tr("To continue, call train again with the same arguments and resume_from_checkpoint=True.")
"""How a run is resumed that a Python program has started."""

_DASHES = re.compile(r"(?<![\w-])--(?=[a-z])")
_CAUSE, _TYPE, _DO, _OR = tr("cause"), tr("type"), tr("do"), tr("or")


def as_arguments(edits: Mapping[str, Any]) -> str:
    """Return option values as arguments of a call: `beta=0.04, reward_funcs=['accuracy']`."""
    return ", ".join(f"{name}={value!r}" for name, value in edits.items())


def _as_program(text: str) -> str:
    """A text with the names of options as a program has them; commands in backticks stay."""
    parts = text.split("`")
    return "`".join(_DASHES.sub("", part) if number % 2 == 0 else part for number, part in enumerate(parts))


def _found(finding: Finding) -> list[str]:
    at = "" if finding.step is None else spoken(tr(" at step {step}", step=finding.step))
    return [f"{finding.code}{at}: {spoken(finding.seen)}", *_ways_out(finding)]


def _ways_out(message: Problem | Finding) -> Iterator[str]:
    """The cause, where one is known, and what can be done."""
    if message.cause:
        yield _line(_CAUSE, message.cause)
    for number, fix in enumerate(message.fixes):
        label = _OR if number else _TYPE if fix.edits else _DO
        if fix.edits:
            yield _line(label, fitted(Whole(as_arguments(fix.edits))))
            label = ""
        yield _line(label, _as_program(spoken(fix.text)))


def _line(label: str, text: str) -> str:
    width = 2 + max(columns(spoken(word)) for word in (_CAUSE, _TYPE, _DO, _OR))
    return f"  {spoken(padded(label, width))}{spoken(text)}"
