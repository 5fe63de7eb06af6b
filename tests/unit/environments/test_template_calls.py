"""The format of calls that a chat template writes, told by rendering; and our own template with tools."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from covey.data.errors import TemplateError
from covey.data.template import CHATML, CHATML_TOOLS, OWN_TEMPLATES, compiled
from covey.data.text import TextCodec, load_codec
from covey.environments.call_formats.registry import CALL_FORMATS
from covey.environments.template_calls import NoFormat, format_of, format_or_reason
from covey.quickstart.task import MODEL_DIR
from support.tool_templates import FORMATS, LLAMA3_1, QWEN2_5, TOOL_TEMPLATES, with_template

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def calling(content, *arguments):
    calls = [{"type": "function", "function": {"name": "add", "arguments": given}} for given in arguments]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def said(role, content):
    return {"role": role, "content": content}


EPISODE = [
    *(
        said("system", "Be brief."),
        said("user", "2+3?"),
        calling("<think>\nx\n</think>\n\nI add.", {"a": "2"}),
    ),
    *(said("tool", "5"), calling("", {"a": "5"}, {"a": "é<"}), said("tool", "1"), said("tool", "2")),
    *(said("assistant", "5"), said("user", "More?"), said("assistant", "No.")),
]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_format_of_a_template(name, codec):
    found = format_of(with_template(codec, TOOL_TEMPLATES[name]))
    assert (found and found.name) == FORMATS[name]


@pytest.mark.parametrize("name", [name for name, of in FORMATS.items() if of])
def test_calls_read_back_what_a_template_writes(name, codec):
    made = with_template(codec, TOOL_TEMPLATES[name])
    each = CALL_FORMATS[FORMATS[name]]
    call = calling("", {"a": "x\ny", "b": "é"})
    text = made.render([said("user", "Q"), call], tools=[ADD], add_generation_prompt=False)
    turn = text.removeprefix(made.render([said("user", "Q")], tools=[ADD]))
    parsed = each.parse(turn)
    assert [(c.name, dict(c.arguments)) for c in parsed.calls] == [("add", {"a": "x\ny", "b": "é"})]
    assert each.write(parsed.calls) == parsed.calls[0].text


_TOOLS = "{{ tools | tojson }}"


@pytest.mark.parametrize(
    ("template", "kind", "written"),
    [
        (CHATML, "no_tools", ""),
        ("{{ raise_exception('none') if tools else '' }}" + CHATML, "no_tools", "none"),
        (_TOOLS + CHATML, "no_calls", "<|im_end|>\n"),
        (_TOOLS + "{% if messages[1] %}{{ raise_exception('no') }}{% endif %}" + CHATML, "no_calls", "no"),
        (QWEN2_5.replace("'tool'", "'result'").replace("message.content", "''"), "no_calls", None),
        (QWEN2_5.replace("<tool_call>", "<call>"), "unknown_format", None),
        (QWEN2_5.replace('": "', '": "my_'), "unknown_format", None),
        (LLAMA3_1.replace('{"name": "', '{"tool": "'), "unknown_format", '{"tool": "covey_probe"'),
    ],
)
def test_why_there_is_no_format(template, kind, written, codec):
    made = with_template(codec, "{% set bos_token = '' %}" + template)
    found = format_or_reason(made)
    assert isinstance(found, NoFormat) and found.kind == kind
    assert format_of(made) is None
    assert written is None or written in found.written
    assert kind != "unknown_format" or "covey_probe" in found.written


def test_a_model_without_a_template_has_no_format(codec):
    assert format_of(replace(codec, chat_template=None)) is None


# -- chatml-tools ------------------------------------------------------------------------------------------


def test_chatml_tools_is_chatml_where_there_are_no_tools(codec):
    plain, own = with_template(codec, CHATML), with_template(codec, CHATML_TOOLS)
    messages = [message for message in EPISODE if message["role"] != "tool" and "tool_calls" not in message]
    for end in range(1, len(messages) + 1):
        for begin in range(end):
            for opens in (True, False):
                asked = messages[begin:end]
                assert own.render(asked, add_generation_prompt=opens) == plain.render(
                    asked, add_generation_prompt=opens
                )


@pytest.mark.parametrize("tools", [(), (ADD,)])
@pytest.mark.parametrize("begin", [0, 1])
def test_chatml_tools_never_changes_what_it_wrote(tools, begin, codec):
    own = with_template(codec, CHATML_TOOLS)
    ends = range(begin + 1, len(EPISODE) + 1)
    texts = [own.render(EPISODE[begin:end], tools=tools, add_generation_prompt=False) for end in ends]
    assert all(after.startswith(before) and after != before for before, after in pairwise(texts))
    for end, after in zip(ends, texts[1:], strict=False):
        if EPISODE[end]["role"] == "assistant":
            assert after.startswith(own.render(EPISODE[begin:end], tools=tools))


def test_chatml_tools_writes_tools_calls_and_results(codec):
    own = with_template(codec, CHATML_TOOLS)
    text = own.render(EPISODE[:7], tools=[ADD, ADD])
    line = json.dumps(ADD)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert f"<tools>\n{line}\n{line}\n</tools>\n" in text
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nx\n</think>\n\nI add.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": "2"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": "5"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": "é<"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert own.render(EPISODE[1:2], tools=[ADD]).startswith("<|im_start|>system\n# Tools\n\n")


def test_chatml_tools_renders_the_same_in_transformers(codec):
    """A trained model is saved with it."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    for tools in ([], [ADD]):
        text = theirs.apply_chat_template(
            EPISODE,
            tools=tools or None,
            chat_template=CHATML_TOOLS,
            add_generation_prompt=True,
            tokenize=False,
        )
        assert text == with_template(codec, CHATML_TOOLS).render(EPISODE, tools=tools)


def test_our_own_templates_by_name(tmp_path):
    for name, text in OWN_TEMPLATES.items():
        assert load_codec(MODEL_DIR, chat_template=name).template_text == text
        assert compiled(text, name)
    with pytest.raises(TemplateError, match="chatml, chatml-tools or a file"):
        load_codec(MODEL_DIR, chat_template="chatml_tools")
