"""The catalogue: every text of the source is in it, and says the same of the same things in Chinese."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog

import covey
from covey.codes import CODES, chinese_codes
from covey.codes.page import markdown_chinese
from covey.texts import forms
from support.translations import PO, current, faults, kept, mo_bytes, po_bytes, source_texts

ROOT = Path(covey.__file__).parent
PAGE = ROOT.parents[1] / "docs" / "codes.zh.md"
# What makes texts, with the place of its first words.
MADE_BY = {"tr": 0, "plural": 1, "counted": 1}
# Options, what stands in backticks, tags, names with an underscore, and files.
_NAMES = (
    r"--\w+",
    r"`[^`]*`",
    r"<\w+>",
    r"(?<!\w)[a-z]+(?:_[a-z]+)+",
    r"\w+\.(?:jsonl?|safetensors|py|jinja)\b",
)
NAMED = re.compile("|".join(_NAMES))
SAID = "run: make translations"


def test_the_catalogue_is_that_of_the_source() -> None:
    catalog = current(kept())
    assert PO.read_bytes() == po_bytes(catalog), SAID
    assert PO.with_suffix(".mo").read_bytes() == mo_bytes(catalog), SAID
    assert faults(catalog) == []


def test_the_walk_over_the_source_is_not_blind() -> None:
    found = {text for text, _ in source_texts()}
    assert len(found) > 3000
    assert ("{n:,} prompt", "{n:,} prompts") in found
    assert CODES["E201"].why in found


def test_a_text_without_a_translation_or_with_other_values_is_a_fault() -> None:
    catalog = Catalog(locale="zh")
    text = "{n:,} prompt"
    catalog.add(forms("prompt"), ("{n:,} 个提示",))
    assert faults(catalog) == []
    catalog.get(text).string = ("{n:,} 个 {prompts}",)  # type: ignore[union-attr]
    assert len(faults(catalog)) == 1
    catalog.get(text).string = ("",)  # type: ignore[union-attr]
    assert faults(catalog) == [f"no translation: {('{n:,} prompt', '{n:,} prompts')!r}"]


def test_every_text_is_a_template_that_can_be_found() -> None:
    """What makes a text is given words, not a sentence that was put together before."""
    odd = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MADE_BY:
                words = node.args[MADE_BY[node.func.id] :]
                if any(isinstance(word, ast.JoinedStr | ast.BinOp) for word in words):
                    odd.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert odd == []


def test_a_translation_names_the_same() -> None:
    for message in kept():
        if not message.id:
            continue
        english = message.id if isinstance(message.id, str) else message.id[0]
        chinese = message.string if isinstance(message.string, str) else message.string[0]
        plain = [name for name in NAMED.findall(re.sub(r"\{[^}]*\}", "{}", english)) if "{}" not in name]
        lost = [name for name in plain if name not in chinese and name != "`not set`"]
        assert lost == [], f"{english!r}: {chinese!r}"


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_code_is_chinese(code: str) -> None:
    chinese = chinese_codes()[code]
    for text in (chinese.title, chinese.why):
        assert re.search(r"[\u4e00-\u9fff]", text)
    assert chinese.why.endswith("。") and not chinese.title.endswith("。")


def test_the_page_is_the_table() -> None:
    said = "run: python -m covey.codes --lang zh > docs/codes.zh.md"
    assert PAGE.read_text(encoding="utf-8") == markdown_chinese(), said


def test_every_heading_of_the_page_is_chinese() -> None:
    headings = re.findall(r"^#+ (.*)$", markdown_chinese(), re.MULTILINE)
    assert len(headings) > 5
    assert [h for h in headings if not re.search(r"[\u4e00-\u9fff]", h)] == []


_MAKERS = {"tr", "plural", "counted", "joined", "capital", "padded", "written", "filled"}
_OF_STR = {"join", "replace", "format", "capitalize", "upper", "lower", "strip", "rstrip", "lstrip"}


def _makes_a_text(node: ast.AST) -> bool:
    """Whether an expression makes a text that is not put into a language in it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "spoken":
        return False
    makes = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MAKERS
    return makes or any(map(_makes_a_text, ast.iter_child_nodes(node)))


def _flattened(source: str) -> list[int]:
    """The lines in which methods of str, or an f-string with more in it, leave a text's English alone."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=on, attr=name), args=given) if name in _OF_STR:
                flattens = _makes_a_text(on) or (name == "join" and any(map(_makes_a_text, given)))
            case ast.JoinedStr(values=values) if len(values) > 1:
                flattens = any(map(_makes_a_text, values))
            case _:
                continue
        if flattens:
            lines.append(node.lineno)
    return lines


def test_texts_are_put_together_as_texts() -> None:
    """What `str.join` or an f-string makes of a text stays English."""
    assert _flattened('x = ", ".join(tr("a") for _ in y)') == _flattened("f\"{tr('a')}:\"") == [1]
    assert not _flattened("joined(', ', [tr('a')]) + f\"{tr('a')}\" + f\"{spoken(tr('a'))}:\"")
    found = [(path.name, line) for path in ROOT.rglob("*.py") for line in _flattened(path.read_text())]
    assert not found
