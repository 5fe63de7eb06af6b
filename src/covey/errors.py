"""Exceptions. One root; ValueError's heirs are for what a user can mend."""

from __future__ import annotations

from collections.abc import Sequence

from covey.types import Finding, Problem


class CoveyError(Exception):
    """Root of every exception that covey raises on purpose."""


class ConfigError(CoveyError, ValueError):
    """A configuration or an input at fault, with all its problems (exit code 2)."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.code} {p.option}: {p.seen}" for p in self.problems))


class GuardStop(CoveyError):
    """A guard stopped the run (exit code 3); `finding` says what it saw."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(f"{finding.code}: {finding.seen}")


class RunFailed(CoveyError):
    """A process of the run cannot go on; `finding` says why. `exit_code` is 3 where the run directory is at
    fault, and 1 for what covey did not foresee."""

    def __init__(self, finding: Finding, exit_code: int = 1) -> None:
        self.finding = finding
        self.exit_code = exit_code
        super().__init__(f"{finding.code}: {finding.seen}")


class CheckpointError(CoveyError, ValueError):
    """A directory that is no checkpoint, or one whose files are not what its manifest says."""


class OtherRankFailed(CoveyError):
    """Another rank could not do its part of what all of them do; it says why itself."""
