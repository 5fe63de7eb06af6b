"""Calls of tools as models write them: texts worked out by hand, round trips, and text that is no call."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.environments.call_formats.registry import CALL_FORMATS
from covey.types import ToolCall

HERMES, XML, LLAMA = (CALL_FORMATS[name] for name in ("hermes", "qwen3_xml", "llama3_json"))


def short(parsed):
    """Name and arguments of each call; name and fault of a faulty one."""
    return [(call.name, call.fault or dict(call.arguments)) for call in parsed.calls]


def test_every_format_is_found():
    assert sorted(CALL_FORMATS) == ["hermes", "llama3_json", "qwen3_xml"]
    assert all(name == each.name for name, each in CALL_FORMATS.items())


# -- hermes ------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}\n</tool_call>'
MARKS = "</tool_call><tool_call>"


def test_hermes_reads_calls_and_the_text_around_them():
    parsed = HERMES.parse(f"I add.\n{CALL}\n{CALL}\n Then more. ")
    assert parsed.content == "I add.\nThen more."
    assert [call.text for call in parsed.calls] == [CALL, CALL]
    assert short(parsed) == [("add", {"a": 1, "b": [2.5, None]})] * 2


def test_text_without_calls_stays_as_it_is():
    for text in ("", " The answer is 5.\n", '{"name": "add"', "</tool_call>"):
        for each in (HERMES, XML):
            assert each.parse(text).content == text and not each.parse(text).calls


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"name": "now"}', "now", {}),
        ('{"name": " now ", "arguments": null}', "now", {}),
        ('{"name": "now", "arguments": ""}', "now", {}),
        ('{"name": "f", "parameters": {"a": 1}}', "f", {"a": 1}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", {"a": 1}),
        ('{"arguments": {"a": {"b": "你好"}}, "name": "f", "id": 7}', "f", {"a": {"b": "你好"}}),
        (
            '{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}',
            "f",
            {"a": "</tool_call><tool_call>"},
        ),
    ],
)
def test_hermes_accepts(body, name, arguments):
    for text in (
        f"<tool_call>{body}</tool_call>",
        f"<tool_call>\n\n{body} ",
        f"<tool_call>{body}<tool_call>",
    ):
        assert short(HERMES.parse(text))[0] == (name, arguments)


DEEP = "[" * 200 + "]" * 200


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        ("", "", "not valid JSON: Expecting value, character 1"),
        ('{"name": "f", "arguments": {"x": 1', "", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": __import__("os").system("touch PROOF")}}', "", "not valid JSON"),
        ("{'name': 'f'}", "", "not valid JSON"),
        ('{"arguments": {}}', "", 'no "name"'),
        ('{"name": 3}', "", 'no "name"'),
        ('{"name": " "}', "", 'no "name"'),
        ('[{"name": "f"}]', "", "must be a JSON object"),
        ('{"name": "f", "arguments": [1]}', "f", "arguments of a call must be a JSON object"),
        ('{"name": "f", "arguments": 3}', "f", "arguments of a call must be a JSON object"),
        ('{"name": "f", "arguments": "x"}', "f", "not valid JSON"),
        ('{"name": "f", "arguments": "[1]"}', "f", "arguments of a call must be a JSON object"),
        ('{"name": "f", "arguments": "{} {}"}', "f", "more than one JSON value"),
        ('{"name": "f", "arguments": {}}}', "f", "between the JSON object of the call and"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "", "a key of a JSON object twice"),
        ('{"name": "f", "arguments": {"x": NaN}}', "", "not finite"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "", "not finite"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "", "not finite"),
        (f'{{"name": "f", "arguments": {{"x": {"9" * 5000}}}}}', "", "too long"),
        (f'{{"name": "f", "arguments": {{"x": {DEEP}}}}}', "", "nests more than 64"),
        (f'{{"name": "f", "arguments": {{"x": {"[" * 100_000}', "", "nests more than 64"),
        (
            f'{{"name": "f", "arguments": {json.dumps(json.dumps({"x": json.loads(DEEP)}))}}}',
            "f",
            "nests more",
        ),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "", "surrogate"),
    ],
)
def test_hermes_says_what_is_wrong(body, name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (call,) = HERMES.parse(f"Look: <tool_call>{body}</tool_call>").calls
    assert says in call.fault and call.fault.endswith(".") and "\n" not in call.fault
    assert (call.name, dict(call.arguments)) == (name, {})
    assert call.text == f"<tool_call>{body}</tool_call>"
    assert not list(tmp_path.iterdir()), "something was run"


def test_a_faulty_call_ends_where_the_next_one_begins():
    parsed = HERMES.parse(f"<tool_call>oops {CALL} end")
    assert [call.text for call in parsed.calls] == ["<tool_call>oops ", CALL]
    assert [bool(call.fault) for call in parsed.calls] == [True, False]
    assert parsed.content == "end"


@pytest.mark.parametrize(
    ("opens", "closes"), [("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]")]
)
def test_calls_within_a_thought_are_none(opens, closes):
    thought = f"{opens}\nShall I {CALL}?\n{closes}"
    parsed = HERMES.parse(f"\n{thought}\n\n{CALL}")
    assert len(parsed.calls) == 1 and parsed.content == thought
    # The template closed an empty thought, and the model thought again.
    assert len(HERMES.parse(f"{opens}\n\n{closes}\n\n{thought}{CALL}").calls) == 1
    # The completion ends within the thought.
    assert HERMES.parse(f"{opens} {CALL}").calls == ()
    assert HERMES.parse(f"{opens} {CALL}").content == f"{opens} {CALL}"
    # Marks of a thought further back are text like any other.
    assert len(HERMES.parse(f"As {opens} says: {CALL}").calls) == 1
    assert XML.parse(f"{opens}<function=f></function>{closes}").calls == ()
    assert len(LLAMA.parse(f'{opens} {{"name": "f"}} {closes}\n{{"name": "g"}}').calls) == 1


# -- qwen3_xml ---------------------------------------------------------------------------------------------


def test_qwen3_xml_reads_values_as_text():
    text = (
        "Let me see.\n\n<tool_call>\n<function=run>\n<parameter=code>\n\nif a:\n    b = '</parameter>'\n\n"
        '</parameter>\n<parameter=options>\n{"n": [1]}\n</parameter>\n<parameter=n>3</parameter>\n'
        "</function>\n</tool_call>\n<tool_call><function=now></function></tool_call>"
    )
    parsed = XML.parse(text)
    assert parsed.content == "Let me see."
    code = "\nif a:\n    b = '</parameter>'\n"
    assert short(parsed) == [("run", {"code": code, "options": '{"n": [1]}', "n": "3"}), ("now", {})]
    assert "Let me see.\n\n" + "\n".join(call.text for call in parsed.calls) == text


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function= f ><parameter= a >1</parameter></function>",
    ],
)
def test_qwen3_xml_needs_no_outer_marks(text):
    """Models leave them out at times; the function shows that the call is whole."""
    assert short(XML.parse(text)) == [("f", {"a": "1"})]
    assert XML.parse(text).calls[0].text == text


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("<tool_call>", "", "must be <function=NAME>"),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", "must be <function=NAME>"),
        ("<tool_call><function=></function></tool_call>", "", "must be <function=NAME>"),
        ("<tool_call><function=f><parameter=a>1", "f", "must be <function=NAME>"),
        ("<tool_call><function=f><parameter=a>1</parameter>", "f", "must be <function=NAME>"),
        ("<tool_call><function=f>a=1</function></tool_call>", "f", "must be <function=NAME>"),
        ("<function=f><parameter=a>1</parameter>", "f", "must be <function=NAME>"),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
            "f",
            "a parameter twice",
        ),
    ],
)
def test_qwen3_xml_says_what_is_wrong(text, name, says):
    (call,) = XML.parse(text).calls
    assert says in call.fault and (call.name, dict(call.arguments), call.text) == (name, {}, text)


# -- llama3_json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"name": "f", "parameters": {"a": "b"}}', [("f", {"a": "b"})], ""),
        ('\n<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})], ""),
        ('{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})], ""),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})], ""),
        ('{"parameters": {"a": 1}, "name": "f"}', [("f", {"a": 1})], ""),
        ('{"name": "f"}; {"name": "g"}\n{"name": "h"}', [("f", {}), ("g", {}), ("h", {})], ""),
        ('{"name": "f"}\n\nThat is the call.', [("f", {})], "That is the call."),
        ('I call it. <|python_tag|>{"name": "f"}', [("f", {})], "I call it."),
        ('The call is {"name": "f"}', [], 'The call is {"name": "f"}'),
        ('{"answer": 5}', [], '{"answer": 5}'),
        ('{"type": "square", "side": 3}', [], '{"type": "square", "side": 3}'),
        ("{x} is a set", [], "{x} is a set"),
    ],
)
def test_llama3_json_reads(text, calls, content):
    parsed = LLAMA.parse(text)
    assert (short(parsed), parsed.content) == (calls, content)


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ('{"name": "f", "parameters": {"x": __import__("os").getcwd()}}', "", "not valid JSON"),
        ('{"name": "f", "parameters": {"x": ', "", "not valid JSON"),
        ('{"name": "f", "parameters": [1]}', "f", "must be a JSON object"),
        ('<|python_tag|>brave_search.call(query="weather")', "", "not valid JSON"),
        ("<|python_tag|>", "", "not valid JSON"),
    ],
)
def test_llama3_json_says_what_is_wrong(text, name, says):
    (call,) = LLAMA.parse(text).calls
    assert says in call.fault and (call.name, dict(call.arguments), call.text) == (name, {}, text)


# -- all of them -------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z_][\w.-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
PLAIN = TEXTS.filter(lambda text: "<" not in text)
CALLS = {
    "hermes": st.dictionaries(TEXTS | st.just("</tool_call>"), VALUES, max_size=4),
    "llama3_json": st.dictionaries(TEXTS, VALUES, max_size=4),
    "qwen3_xml": st.dictionaries(NAMES, PLAIN, max_size=4),
}


@pytest.mark.parametrize("name", CALL_FORMATS)
@given(data=st.data())
def test_what_is_written_reads_the_same(name, data):
    each = CALL_FORMATS[name]
    made = data.draw(st.lists(st.tuples(NAMES, CALLS[name]), min_size=1, max_size=3))
    text = each.write([ToolCall(name=called, arguments=arguments) for called, arguments in made])
    parsed = each.parse(text)
    assert short(parsed) == made and parsed.content == ""
    separator = "; " if name == "llama3_json" else "\n"
    assert separator.join(call.text for call in parsed.calls) == text


def test_qwen3_xml_writes_other_values_as_templates_do():
    call = ToolCall(name="f", arguments={"a": True, "b": None, "c": 1.5, "d": {"e": [True]}})
    (read,) = XML.parse(XML.write([call])).calls
    assert read.arguments == {"a": "True", "b": "None", "c": "1.5", "d": '{"e": [true]}'}


PARTS = [
    *("<tool_call>", "</tool_call>", "<function=", "<function=f>", "</function>", "<parameter=a>"),
    *("</parameter>", "<|python_tag|>", '{"name": "f"', ', "arguments": ', '"parameters": {', "}", "[", '"'),
    *("<think>", "</think>", "[THINK]", "NaN", "\\ud800", "1e999", ";", "\n", "null"),
]


@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=25))
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_no_text_raises(name, parts):
    text = "".join(parts)
    parsed = CALL_FORMATS[name].parse(text)
    at = 0
    for call in parsed.calls:
        at = text.index(call.text, at) + len(call.text)
        assert call.text and (call.fault or call.name)
        json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()
    assert parsed.calls or parsed.content == text


REPEATED = [*PARTS, "<tool_call><function=f><parameter=a>", '<tool_call>{"name": "', " "]


@pytest.mark.parametrize("name", CALL_FORMATS)
@pytest.mark.parametrize("part", REPEATED)
def test_long_texts_take_no_long_time(name, part):
    begun = time.process_time()
    for text in (part * 4_000, "<tool_call>" + part * 4_000, '{"name": ' + part * 4_000):
        CALL_FORMATS[name].parse(text)
    assert time.process_time() - begun < 3
