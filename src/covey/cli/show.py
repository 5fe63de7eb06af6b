"""Problems and findings as text: what was seen, why it matters, the likely cause, and what to type."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from covey.plan.words import flags, sentence, wrapped
from covey.types import Finding, Fix, Problem, Severity

_LABEL = 7

Line = tuple[str, str]
"""A style and a line of text."""

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


def problems(found: Sequence[Problem]) -> None:
    """Write problems and warnings to standard error, and what follows from them."""
    lines: list[Line] = []
    for problem in found:
        if problem.severity is not Severity.NOTE:
            lines += [*_problem(problem), ("", "")]
    errors = sum(problem.severity is Severity.ERROR for problem in found)
    if errors:
        number = "1 problem" if errors == 1 else f"{errors} problems"
        codes = " ".join(dict.fromkeys(p.code for p in found if p.severity is Severity.ERROR))
        lines.append(("bold", f"{number}; nothing was started or written. More: covey explain {codes}"))
    _write(lines)


def finding(found: Finding) -> None:
    """Write what a run found out about itself to standard error."""
    _write(list(_finding(found)))


def problem_text(problem: Problem) -> str:
    """Return a problem as plain text."""
    return "\n".join(text for _, text in _problem(problem))


def finding_text(found: Finding) -> str:
    """Return a finding as plain text."""
    return "\n".join(text for _, text in _finding(found))


def _problem(problem: Problem) -> Iterator[Line]:
    word = "" if problem.severity is Severity.ERROR else f" ({problem.severity.value})"
    yield _STYLES[problem.severity], f"{problem.code} {problem.option}{word}"
    yield from _parts(problem.seen, problem.why, problem.cause, problem.fixes)


def _finding(found: Finding) -> Iterator[Line]:
    at = "" if found.step is None else f" at step {found.step}"
    word = "" if found.severity is Severity.ERROR else f" ({found.severity.value})"
    yield _STYLES[found.severity], f"{found.code}{at}{word}"
    yield from _parts(found.seen, found.why, found.cause, found.fixes)


def _parts(seen: str, why: str, cause: str, fixes: Sequence[Fix]) -> Iterator[Line]:
    yield "", _labelled("seen", sentence(seen))
    yield "", _labelled("why", why)
    if cause:
        yield "", _labelled("cause", cause)
    for number, fix in enumerate(fixes):
        label = ("type" if fix.edits else "do") if number == 0 else "or"
        if fix.edits:
            # In one line, so that it can be copied.
            yield "bold green", f"  {label:<{_LABEL}}{flags(fix.edits)}"
            yield "", _labelled("", fix.text)
        else:
            yield "", _labelled(label, fix.text)


def _labelled(label: str, text: str) -> str:
    block = wrapped(text, " " * (_LABEL + 2))
    return f"  {label:<{_LABEL}}{block[_LABEL + 2 :]}"


def _write(lines: Sequence[Line]) -> None:
    if not sys.stderr.isatty():
        sys.stderr.write("\n".join(text for _, text in lines) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for style, text in lines:
        console.print(Text(text, style=style))
