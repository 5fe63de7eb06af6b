"""Formats of calls that real templates have."""

from __future__ import annotations

import pytest

from covey.data.text import load_codec
from covey.environments.call_formats.registry import CALL_FORMATS
from covey.environments.template_calls import NoFormat, format_of, format_or_reason
from support.real import real


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("qwen3", {}, "hermes"),
        ("qwen3", {"enable_thinking": False}, "hermes"),
        ("llama3_1", {}, "no_tools"),
        ("gemma3", {}, "no_tools"),
        ("smollm2", {}, "no_tools"),
        ("llama3_1", {"chat_template": "chatml-tools"}, "hermes"),
        ("smollm2", {"chat_template": "chatml-tools"}, "hermes"),
    ],
)
def test_the_format_of_a_real_template(name, given, expected):
    found = format_or_reason(load_codec(real(name), **given))
    assert (found.kind if isinstance(found, NoFormat) else found.name) == expected


def test_marks_of_calls_are_no_special_tokens_of_qwen3():
    """`TextCodec.decode` keeps them; a tag of Llama is special, and only `written_out` keeps it."""
    codec = load_codec(real("qwen3"))
    text = CALL_FORMATS["hermes"].write(format_of(codec).parse('<tool_call>{"name": "f"}').calls)
    (ids,) = codec.encode([text + "<|im_end|>"])
    assert codec.decode(ids) == text and codec.written_out(ids) == text + "<|im_end|>"
