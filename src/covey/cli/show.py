"""Problems and findings as text: what was seen, why it matters, the likely cause, and what to type."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from covey.types import Finding, Fix, Problem, Severity

WIDTH = 100
_LABEL = 7

Line = tuple[str, str]
"""A style and a line of text."""

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


def problems(found: Sequence[Problem]) -> None:
    """Write problems to standard error, and what follows from them."""
    lines: list[Line] = []
    for problem in found:
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


def flags(edits: Mapping[str, Any]) -> str:
    """Return option values as they are typed: `--reward_funcs accuracy format`."""
    return " ".join(_flag(name, value) for name, value in edits.items())


def wrapped(text: str, indent: str, width: int = WIDTH) -> str:
    """Return text wrapped at `width` columns, each line behind `indent`."""
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
    yield "", _labelled("seen", seen)
    yield "", _labelled("why", why)
    if cause:
        yield "", _labelled("cause", cause)
    for number, fix in enumerate(fixes):
        label = ("type" if fix.edits else "do") if number == 0 else "or"
        if fix.edits:
            yield "bold green", _labelled(label, flags(fix.edits))
            yield "", _labelled("", fix.text)
        else:
            yield "", _labelled(label, fix.text)


def _labelled(label: str, text: str) -> str:
    block = wrapped(text, " " * (_LABEL + 2))
    return f"  {label:<{_LABEL}}{block[_LABEL + 2 :]}"


def _flag(name: str, value: Any) -> str:
    if value is None:
        return f"--{name} none"
    if isinstance(value, bool):
        return f"--{name} {str(value).lower()}"
    values = value if isinstance(value, list | tuple) else [value]
    return f"--{name} {' '.join(shlex.quote(_word(item)) for item in values)}"


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _write(lines: Sequence[Line]) -> None:
    if not sys.stderr.isatty():
        sys.stderr.write("\n".join(text for _, text in lines) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for style, text in lines:
        console.print(Text(text, style=style))
