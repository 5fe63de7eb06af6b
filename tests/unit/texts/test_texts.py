"""Texts: English for whoever reads them as they are; the same templates and values in another language."""

from __future__ import annotations

import copy
import json
from gettext import GNUTranslations
from io import BytesIO
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog

from covey.texts import (
    Text,
    capital,
    counted,
    filled,
    forms,
    joined,
    packed,
    padded,
    plural,
    replaced,
    tr,
    unpacked,
    written,
)
from covey.texts.catalogue import Catalogue, columns
from support.translations import mo_bytes

PAIRS = {
    "{option} is {value:g}, which is below 0.": "{option} 是 {value:g}，小于 0。",
    "row {n}: {fault}": "第 {n} 行：{fault}",
    "it is empty": "是空的",
    "{path} cannot be read: {error}": "无法读取 {path}：{error}",
    "There are {prompts}.": "有 {prompts}。",
    ("{names} is set", "{names} are set"): "设置了 {names}",
    forms("prompt"): "{n:,} 个提示",
    "model": "模型",
    " and ": "和",
    "a line with {braces} in it": "一行，有 {braces}",
}


@pytest.fixture(scope="module")
def chinese() -> Catalogue:
    catalog = Catalog(locale="zh")
    for english, text in PAIRS.items():
        catalog.add(english, text if isinstance(english, str) else (text,))
    return Catalogue(GNUTranslations(BytesIO(mo_bytes(catalog))))


def test_a_text_is_its_english(chinese: Catalogue) -> None:
    text = tr("{option} is {value:g}, which is below 0.", option="beta", value=-0.5)
    assert text == "beta is -0.5, which is below 0." and text in {"beta is -0.5, which is below 0."}
    assert json.dumps({text: text}) == json.dumps({str.__str__(text): str.__str__(text)})
    assert chinese.said(text) == "beta 是 -0.5，小于 0。"
    assert chinese.said(tr("Nobody has written this in Chinese.")) == "Nobody has written this in Chinese."


def test_values_are_put_into_the_language_too_and_names_are_not(chinese: Catalogue) -> None:
    inner = tr("row {n}: {fault}", n=3, fault=tr("it is empty"))
    assert chinese.said(tr("{path} cannot be read: {error}", path="a.jsonl", error=inner)) == (
        "无法读取 a.jsonl：第 3 行：是空的"
    )
    # A file that is called like a text of the catalogue.
    assert chinese.said(tr("row {n}: {fault}", n=3, fault="it is empty")) == "第 3 行：it is empty"


def test_an_exception_carries_its_text(chinese: Catalogue) -> None:
    error = ValueError(tr("it is empty"))
    assert isinstance(str(error), Text)
    text = tr("{path} cannot be read: {error}", path=Path("x"), error=error)
    assert chinese.said(text) == "无法读取 x：是空的"
    assert not any(isinstance(value, BaseException) for value in text.values)  # type: ignore[attr-defined]


def test_numbers_choose_the_form(chinese: Catalogue) -> None:
    assert [counted(n, "prompt") for n in (1, 2, 1000)] == ["1 prompt", "2 prompts", "1,000 prompts"]
    assert counted(2, "forward pass") == "2 forward passes"
    assert chinese.said(tr("There are {prompts}.", prompts=counted(1000, "prompt"))) == "有 1,000 个提示。"
    typed = [plural(n, "{names} is set", "{names} are set", names="--a") for n in (1, 2)]
    assert typed == ["--a is set", "--a are set"]
    assert [chinese.said(text) for text in typed] == ["设置了 --a"] * 2


def test_texts_that_are_put_together(chinese: Catalogue) -> None:
    parts = [tr("it is empty"), "b", tr("it is empty")]
    assert joined("; ", parts) == "it is empty; b; it is empty"
    assert chinese.said(joined("; ", parts)) == "是空的; b; 是空的"
    assert chinese.said(joined(tr(" and "), ["a", "b"])) == "a 和 b"
    below = tr("{option} is {value:g}, which is below 0.", option="beta", value=-1)
    assert chinese.said(joined(" ", [below, tr("it is empty")])) == "beta 是 -1，小于 0。是空的"
    assert chinese.said("see: " + tr("it is empty") + "!") == "see: 是空的!"
    assert f"{tr('model')}" == "model" and isinstance(f"{tr('model')}", Text)
    assert joined("; ", []) == "" and chinese.said(joined("; ", [])) == ""


def test_forms_of_english_alone(chinese: Catalogue) -> None:
    assert (
        capital(tr("it is empty")) == "It is empty" and chinese.said(capital(tr("it is empty"))) == "是空的"
    )
    assert written(tr("model"), "MODEL") == "MODEL" and chinese.said(written(tr("model"), "MODEL")) == "模型"
    assert padded(tr("model"), 10) == "model     "
    assert chinese.said(padded(tr("model"), 10)) == "模型      " and columns("模型      ") == 10


def test_braces_without_values_stay(chinese: Catalogue) -> None:
    text = tr("a line with {braces} in it")
    assert text == "a line with {braces} in it" and chinese.said(text) == "一行，有 {braces}"
    with pytest.raises(KeyError):
        tr("{one} and {two}", one=1)


def test_a_copy_keeps_its_template(chinese: Catalogue) -> None:
    text = tr("row {n}: {fault}", n=1, fault="x")
    assert copy.deepcopy([text])[0] is text and copy.copy(text) is text


@pytest.mark.parametrize(
    "text",
    [
        "plain, and no template",
        tr("it is empty"),
        tr("a line with {braces} in it"),
        tr("{option} is {value:g}, which is below 0.", option="beta", value=-0.5),
        tr("row {n}: {fault}", n=3, fault=tr("it is empty")),
        tr("{path} cannot be read: {error}", path=Path("x"), error=ValueError("no")),
        tr("gave {value!r:.20}", value=[1, "a"]),
        counted(1000, "prompt"),
        plural(2, "{names} is set", "{names} are set", names="--a"),
        joined("; ", [tr("it is empty"), "b"]),
        written(tr("model"), "MODEL"),
        padded(tr("model"), 10),
    ],
)
def test_a_text_goes_through_json(chinese: Catalogue, text: str) -> None:
    again = unpacked(json.loads(json.dumps(packed(text))))
    assert again == text and chinese.said(again) == chinese.said(text)
    assert isinstance(again, Text) == isinstance(text, Text)
    assert isinstance(packed(text), dict) == isinstance(text, Text)
    # Once more, as from a worker to its pool and on.
    assert unpacked(packed(again)) == text


def test_a_value_is_replaced_and_the_template_stays(chinese: Catalogue) -> None:
    text = tr(
        "{path} cannot be read: {error}", path=Path("/a/r.py"), error=tr("row {n}: {fault}", n=1, fault="/a")
    )
    said = replaced(text, "/a", "b")
    assert said == "b/r.py cannot be read: row 1: b" and chinese.said(said) == "无法读取 b/r.py：第 1 行：b"
    assert replaced("plain /a", "/a", "b") == "plain b"


def test_a_template_is_declared_first_and_filled_later(chinese: Catalogue) -> None:
    advice = tr("row {n}: {fault}")
    assert filled(advice, n=1, fault="x") == "row 1: x"
    assert chinese.said(filled(advice, n=1, fault=tr("it is empty"))) == "第 1 行：是空的"


def test_a_text_that_is_made_into_one_again_stays_what_it_is(chinese: Catalogue) -> None:
    text = tr("row {n}: {fault}", n=1, fault=tr("it is empty"))
    assert tr(text) is text and chinese.said(tr(text)) == "第 1 行：是空的"


def test_an_exception_is_written_with_its_kind_where_a_text_asks_for_it() -> None:
    assert tr("it failed: {error!r}", error=KeyError("r")) == "it failed: KeyError('r')"
    assert tr("it failed: {error!r}", error=ValueError("\x1b[1m")) == "it failed: ValueError('\\x1b[1m')"
