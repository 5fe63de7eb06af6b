"""Problems and findings as text: what was seen, why it matters, the likely cause, and what to type."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from covey.cli.language import in_chinese, option_in_chinese
from covey.codes import chinese_codes
from covey.plan.words import columns, flags, sentence, wrapped
from covey.texts import fitted, tr, visible
from covey.texts.language import Language
from covey.texts.terminal import say
from covey.types import Finding, Fix, Problem, Severity

Line = tuple[str, str]
"""A style and a line of text."""

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}

_LABELS: Mapping[Language, Mapping[str, str]] = {
    "en": {"seen": "seen", "why": "why", "cause": "cause", "type": "type", "do": "do", "or": "or"},
    "zh": {
        "seen": "现象",
        "why": "说明",
        "cause": "可能原因",
        "type": "改为",
        "do": "办法",
        "or": "或者",
    },
}
_WIDTHS: Mapping[Language, int] = {"en": 7, "zh": 10}
"""Columns of a label with the space behind it."""

_SEVERITIES: Mapping[Language, Mapping[Severity, str]] = {
    "en": {Severity.ERROR: "", Severity.WARNING: tr(" (warning)"), Severity.NOTE: tr(" (note)")},
    "zh": {Severity.ERROR: "", Severity.WARNING: "（警告）", Severity.NOTE: "（说明）"},
}


def problems(every_problem: Sequence[Problem], language: Language = "en") -> None:
    """Write problems and warnings to standard error, and what follows from them."""
    lines: list[Line] = []
    for problem in every_problem:
        if problem.severity is not Severity.NOTE:
            lines += [*_problem(problem, language), ("", "")]
    faults = [problem.code for problem in every_problem if problem.severity is Severity.ERROR]
    if faults:
        lines.append(("bold", _ending(len(faults), " ".join(dict.fromkeys(faults)), language)))
    _write(lines)


def finding(fault: Finding, language: Language = "en") -> None:
    """Write what a run found out about itself to standard error."""
    _write(list(_finding(fault, language)))


def label_width(language: Language) -> int:
    """Return how many columns a label takes, with the space behind it."""
    return _WIDTHS[language]


def problem_text(problem: Problem, language: Language = "en") -> str:
    """Return a problem as plain text."""
    return "\n".join(text for _, text in _problem(problem, language))


def finding_text(fault: Finding, language: Language = "en") -> str:
    """Return a finding as plain text."""
    return "\n".join(text for _, text in _finding(fault, language))


def _ending(num_faults: int, codes: str, language: Language) -> str:
    if language == "zh":
        return f"共 {num_faults} 个问题；什么都没有启动，也没有写入。详情：covey explain {codes} --lang zh"
    number = tr("1 problem") if num_faults == 1 else tr("{num_faults} problems", num_faults=num_faults)
    return tr(
        "{number}; nothing was started or written. More: covey explain {codes}", number=number, codes=codes
    )


def _problem(problem: Problem, language: Language) -> Iterator[Line]:
    option = fitted(problem.option if language == "en" else option_in_chinese(problem.option))
    head = f"{problem.code} {option}{_SEVERITIES[language][problem.severity]}"
    yield _STYLES[problem.severity], head + _title(problem.code, language)
    yield from _parts(problem if language == "en" else in_chinese(problem), language)


def _finding(fault: Finding, language: Language) -> Iterator[Line]:
    at = "" if fault.step is None else tr(" at step {step}", step=fault.step)
    if at and language == "zh":
        at = f" 第 {fault.step} 步"
    head = f"{fault.code}{at}{_SEVERITIES[language][fault.severity]}"
    yield _STYLES[fault.severity], head + _title(fault.code, language)
    yield from _parts(fault if language == "en" else in_chinese(fault), language)


def _title(code: str, language: Language) -> str:
    """In Chinese a head line holds the title: what was seen may be a sentence with no counterpart."""
    return f"：{chinese_codes()[code].title}" if language == "zh" else ""


def _parts(message: Problem | Finding, language: Language) -> Iterator[Line]:
    yield "", _labelled("seen", sentence(message.seen), language)
    yield "", _labelled("why", message.why, language)
    if message.cause:
        yield "", _labelled("cause", message.cause, language)
    for number, fix in enumerate(message.fixes):
        yield from _fix(fix, number == 0, language)


def _fix(fix: Fix, is_first: bool, language: Language) -> Iterator[Line]:
    label = ("type" if fix.edits else "do") if is_first else "or"
    if not fix.edits:
        yield "", _labelled(label, fix.text, language)
        return
    # In one line, so that it can be copied.
    yield "bold green", f"  {_label(label, language)}{fitted(flags(fix.edits))}"
    yield "", _labelled("", fix.text, language)


def _labelled(label: str, text: str, language: Language) -> str:
    indent = _WIDTHS[language] + 2
    return f"  {_label(label, language)}{wrapped(text, ' ' * indent)[indent:]}"


def _label(label: str, language: Language) -> str:
    word = _LABELS[language].get(label, "")
    return word + " " * (_WIDTHS[language] - columns(word))


def _write(lines: Sequence[Line]) -> None:
    if not sys.stderr.isatty():
        say("\n".join(text for _, text in lines), sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for style, text in lines:
        console.print(Text(visible(text), style=style))
