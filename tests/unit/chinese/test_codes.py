"""The codes in Chinese: one entry each, about the same numbers and names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import covey
from covey.chinese.codes import titles_and_whys
from covey.codes import CODES, chinese_codes
from covey.codes.page import markdown_chinese
from unit.chinese.corpus import waiting_codes

PAGE = Path(covey.__file__).parents[2] / "docs" / "codes.zh.md"
# Numbers, names with an underscore, tags, and what stands in backticks.
NAMED = re.compile(r"`[^`]+`|<\w+>|\w+_\w+|\d[\d,]*\d|\d", re.ASCII)


def test_every_code_has_an_entry_and_no_other_has() -> None:
    assert list(titles_and_whys()) == [c for c in CODES if c in titles_and_whys()]
    assert set(CODES) - set(titles_and_whys()) <= waiting_codes()


@pytest.mark.parametrize("code", sorted(titles_and_whys()))
def test_an_entry_is_chinese_and_names_the_same(code: str) -> None:
    chinese, english = chinese_codes()[code], CODES[code]
    for text in (chinese.title, chinese.why):
        assert re.search(r"[\u4e00-\u9fff]", text)
    assert chinese.why.endswith("。") and not chinese.title.endswith("。")
    for mine, theirs in ((chinese.title, english.title), (chinese.why, english.why)):
        assert set(NAMED.findall(mine)) == set(NAMED.findall(theirs))


def test_the_page_is_the_table() -> None:
    said = "run: python -m covey.codes --lang zh > docs/codes.zh.md"
    assert PAGE.read_text(encoding="utf-8") == markdown_chinese(), said


def test_every_heading_of_the_page_is_chinese() -> None:
    headings = re.findall(r"^#+ (.*)$", markdown_chinese(), re.MULTILINE)
    assert len(headings) > 5
    assert [h for h in headings if not re.search(r"[\u4e00-\u9fff]", h)] == []
