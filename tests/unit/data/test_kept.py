"""Templates that leave a part of the data out: the message, tool or call is named, in every row."""

from __future__ import annotations

import json

import pytest

from covey.data.rows import PromptOptions, prompt_table
from covey.data.text import load_codec

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


SYSTEM, USER, SAID = message("system", "Be brief."), message("user", "Q?"), message("assistant", "Yes.")


@pytest.fixture
def judged(model_dir):
    """What is left out of rows by a template, with what it names."""

    def judged(template, *rows, system=None):
        codec = load_codec(model_dir(template=template + OPEN))
        table = prompt_table(rows, codec, max_length=None, options=PromptOptions(system=system))
        return dict(table.left_out), dict(table.details), [p.text for p in table.entries]

    return judged


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (TURNS.replace("messages", "messages if m.role != 'system'"), "system"),
        (TURNS.replace("messages", "messages[-1:]"), "system"),
        (TURNS.replace("messages", "messages[:-1]"), "user"),
        (TURNS.replace("messages", "messages if m.role != 'assistant'"), "assistant"),
        (TURNS.replace("m.content", "m.content[:3]"), "system"),
        (TURNS.replace("m.content", "m.content | upper"), "system"),
        (TURNS.replace("messages", "messages if m.role in ('system', 'user')"), "assistant"),
    ],
)
def test_the_message_that_is_left_out_is_named(judged, template, role):
    left, details, _ = judged(template, {"messages": [SYSTEM, USER, SAID, USER], "solution": "3"})
    assert left == {"lost": 1}
    assert details["lost"].startswith(f"{role} message ")


def test_a_system_message_of_the_command_too(judged):
    template = TURNS.replace("messages", "messages if m.role != 'system'")
    left, details, _ = judged(template, *[{"query": "Q?", "solution": "3"}] * 3, system="Be brief.")
    assert left == {"lost": 3}
    assert details == {"lost": "system message 'Be brief.'"}
    assert judged(template, {"query": "Q?", "solution": "3"})[0] == {}


def test_a_text_that_stands_there_by_chance_hides_nothing(judged):
    template = TURNS.replace("messages", "messages if m.role != 'system'")
    left, details, _ = judged(template, {"messages": [message("system", "user"), USER], "solution": "3"})
    assert left == {"lost": 1}
    assert details == {"lost": "system message 'user'"}


@pytest.mark.parametrize(
    "template",
    [
        TURNS.replace("m.content", "m.content | trim"),
        TURNS.replace("m.content", "m.content | replace('\\n\\n', '\\n')"),
        TURNS.replace("m.content", "m.content | tojson"),
        TURNS.replace("m.content", "m.content.split('</think>')[-1]"),
        "{{ messages[-1].content }}{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
    ],
)
def test_what_templates_do_by_design_is_no_loss(judged, template):
    thought = message("assistant", "<think>\nIs it?\n</think>\n\nYes.")
    spaced = message("user", "  a 'b' \"c\"\n\n\nÄ d  ")
    left, _, texts = judged(template, {"messages": [SYSTEM, spaced, thought, USER], "solution": "3"})
    assert left == {}
    assert len(texts) == 1


# -- tools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tools",
    [
        [ADD],
        [ADD["function"]],
        json.dumps([ADD]),
        [json.dumps(ADD)],
        [ADD | {"function": ADD["function"] | {"strict": None}}],
    ],
)
def test_tools_reach_the_template_in_every_form(judged, tools):
    left, _, texts = judged(TOOLS + TURNS, {"query": "Q?", "tools": tools, "solution": "3"})
    assert left == {}
    assert texts[0].startswith('{"name": "add", "parameters": {"type": "object"}}\n')


def test_tools_that_the_template_leaves_out_are_named(judged):
    row = {"query": "Q?", "tools": [ADD], "solution": "3"}
    assert judged(TURNS, row)[:2] == ({"tools_lost": 1}, {"tools_lost": "add"})
    assert judged(TURNS, row | {"tools": []})[0] == {}
    called = message("assistant", "", tool_calls=[ADD])
    left, details, _ = judged(TURNS, {"messages": [USER, called, message("tool", "3")], "solution": "3"})
    assert left == {"lost": 1}
    assert details["lost"] == "call of the tool add in an assistant turn"


def test_a_call_is_no_tool_of_the_list(judged):
    """The list of tools holds the name of a call that the template does not write."""
    called = message("assistant", None, tool_calls=[{"name": "add", "arguments": {"a": 1}}])
    row = {"messages": [USER, called, message("tool", "3"), USER], "tools": [ADD], "solution": "3"}
    left, details, _ = judged(TOOLS + TURNS, row)
    assert (left, details["lost"]) == ({"lost": 1}, "call of the tool add in an assistant turn")
    writes = TURNS.replace("{{ m.content }}", "{{ m.content + ((m.tool_calls or []) | tojson) }}")
    left, _, texts = judged(TOOLS + writes, row)
    assert left == {} and '"arguments": {"a": 1}' in texts[0] and "None" not in texts[0]


@pytest.mark.parametrize("tools", ["add", "{", [1], [{"function": {}}], 7])
def test_tools_that_are_none_are_refused(judged, tools):
    assert judged(TOOLS + TURNS, {"query": "Q?", "tools": tools, "solution": "3"})[0] == {"tools": 1}


def test_a_row_has_its_own_values_for_the_template(judged):
    template = "{{ mood }}" + TURNS
    row = {"query": "Q?", "chat_template_kwargs": {"mood": "calm"}, "solution": "3"}
    assert judged(template, row)[2][0].startswith("calm<|im_start|>")
