"""`json_valid` and `xml_valid`: what the parsers take, and which part of a completion they are given."""

from __future__ import annotations

import pytest

from covey.rewards.validity import json_valid, payload, xml_valid

BOMB = '<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;">]><a>&c;</a>'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5e3, true, null, "\\u00e9"]}', 1.0),
        (" [] \n", 1.0),
        ("[1, [2, [3]]]", 1.0),
        ("5", 0.0),  # RFC 8259 allows it; it is too easily written by chance
        ('"a"', 0.0),
        ("{'a': 1}", 0.0),
        ('{"a": 1,}', 0.0),
        ('{"a": 1', 0.0),
        ('{"a": 1} so', 0.0),
        ('{"a": NaN}', 0.0),  # Python's parser takes it, RFC 8259 does not
        ("[Infinity]", 0.0),
        ("[-Infinity]", 0.0),
        ('{"a": "\n"}', 0.0),  # a bare line break in a string
        ("[" * 100_000, 0.0),  # deeper than the parser goes
        ("", 0.0),
        ("<answer>[1]</answer>", 1.0),
        ("<think>{</think>[1]", 1.0),
        ('<think>[1]</think>{"a": 1', 0.0),
        ('```json\n{"a": 1}\n```', 1.0),
    ],
)
def test_json(text, value):
    assert json_valid(completions=[text]) == [value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('<a b="c">d<e/>&amp;</a>', 1.0),
        ('<?xml version="1.0"?>\n<a>é 你</a>', 1.0),
        ("<a/>", 1.0),
        ("<a><b></a></b>", 0.0),
        ("<a>", 0.0),
        ("<a/><b/>", 0.0),  # one root
        ("<a b=c/>", 0.0),
        ("<a>&nbsp;</a>", 0.0),  # an entity of HTML
        ("<br>", 0.0),
        ("text", 0.0),
        ("", 0.0),
        (BOMB, 0.0),  # a document type may grow without end
        ("<think>x</think><a/>", 1.0),
        ("<answer><a/></answer>", 1.0),
        ("<answer>5</answer>", 0.0),  # the answer is 5, and that is no XML
        ("```xml\n<a/>\n```", 1.0),
    ],
)
def test_xml(text, value):
    assert xml_valid(completions=[text]) == [value]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" a ", "a"),
        ("<think>a</think> b", "b"),
        ("<think>a</think><think>b</think>c", "c"),
        ("<answer>a</answer><answer> b </answer> c", "b"),
        ("<think><answer>a</answer></think><answer>b</answer>", "b"),
        ("<answer>a", "<answer>a"),
        ("```\na\nb\n```", "a\nb"),
        ("```json\n```", ""),
        ("so ```a``` b", "so ```a``` b"),
    ],
)
def test_payload(text, answer):
    assert payload(text) == answer
