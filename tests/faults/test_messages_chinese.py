"""A refusal of each code in Chinese: no part is English but names, what is typed, and words of other
software. That no text lacks its Chinese is what `support.translations` says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from covey.cli.main import main
from faults.case import Case
from faults.test_messages import CASES, MESSAGES, case

__all__ = ["case"]

# What Python, Jinja and the system say of a fault, prompts, and commands stand in messages as they are.
OF_OTHERS = re.compile(
    r"such file or directory|No module named|was never closed|indices must|index out of range|Unexpected end|"
    r"division by zero|innermost block|following tags|First work the question|bubblewrap is not|"
    r"setting up uid map|for c in completions"
)
_NAMES = re.compile(r"`[^`]*`|\[[^\]]*\]|'[^']*'|\"[^\"]*\"|\S*[/_.=<>|{}()\[\]]\S*|--\S+")
_ENGLISH = re.compile(r"[A-Za-z][a-z']+(?: [a-z][a-z']*){2,}")


def one_of_each_code() -> list[Case]:
    """Return the cases that have a code which none before them has."""
    seen: set[str] = set()
    found = []
    for each in CASES:
        said = (MESSAGES / f"{each.name}.txt").read_text(encoding="utf-8")
        codes = set(re.findall(r"^([A-Z]\d{3}) ", said, re.MULTILINE))
        if codes - seen:
            found.append(each)
        seen |= codes
    return found


@pytest.mark.parametrize("case", one_of_each_code(), ids=lambda case: case.name, indirect=True)
def test_message_is_chinese(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(case.words), "--lang", "zh"]) == 2
    said = capsys.readouterr().err.replace(str(tmp_path), "HERE")
    assert re.search(r"[\u4e00-\u9fff]", said)
    parts = [part for part in unwrapped(said) if "  --" not in part and not OF_OTHERS.search(part)]
    assert [found for part in parts for found in english_in(part)] == [], said


def unwrapped(said: str) -> list[str]:
    """The parts of a message, each in one line."""
    return [" ".join(part.split()) for part in re.split(r"\n(?= {0,2}\S|\n)", said)]


def english_in(text: str) -> list[str]:
    """Runs of English words, names and commands aside."""
    return _ENGLISH.findall(_NAMES.sub(" ", text))


def test_english_is_found() -> None:
    assert english_in("  现象      row 3: the braces do not close。") == ["the braces do not close"]
    assert english_in("  改为      `covey export X --merge` 合并") == []
