"""Rows as other tools write them: one conversation in every form, and its answer never in the prompt."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from covey.data.rows import PromptOptions, prompt_table
from covey.data.text import load_codec

ASKED = "<|im_start|>user\nWhat is 10+10?<|im_end|>\n<|im_start|>assistant\n"
USER = {"role": "user", "content": "What is 10+10?"}
GOLD = {"role": "assistant", "content": "20"}
HISTORY = "<|im_start|>user\nI have 10 pens.<|im_end|>\n<|im_start|>assistant\nNoted.<|im_end|>\n"


def table(rows, codec, **options):
    return prompt_table(rows, codec, max_length=None, options=PromptOptions(**options))


def only(row, codec, **options):
    (entry,) = table([row], codec, **options).entries
    return entry


def reason(row, codec):
    (found,) = table([row], codec).left_out
    return found, table([row], codec).details[found]


def turns(role, said, *pairs):
    return [{role: r, said: text} for r, text in pairs]


FORMS = {
    "messages": {"messages": [USER, GOLD]},
    "human and gpt": {"messages": turns("role", "content", ("human", "What is 10+10?"), ("gpt", "20"))},
    "bot": {"messages": turns("role", "content", ("User", "What is 10+10?"), ("bot", "20"))},
    "sharegpt": {"conversations": turns("from", "value", ("human", "What is 10+10?"), ("gpt", "20"))},
    "one conversation": {"conversation": turns("from", "content", ("user", "What is 10+10?"), ("bot", "20"))},
    "pairs": {"conversation": [{"human": "What is 10+10?", "assistant": "20"}]},
    "padded": {"conversations": [{"from": "human", "value": "What is 10+10?", "weight": None, "role": None}]},
    "json text": {"messages": json.dumps([USER, GOLD])},
    "json text of another column": {"prompt": json.dumps([USER])},
    "python text": {"conversations": str(turns("from", "value", ("human", "What is 10+10?")))},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is 10+10?"}]}]},
    "lists in an object": {"messages": {"role": ["user", "assistant"], "content": ["What is 10+10?", "20"]}},
    "query": {"query": "What is 10+10?", "response": "20"},
    "capitals": {"Question": "What is 10+10?", "Answer": "20"},
    "spaces": {" question ": "What is 10+10?"},
    "instruction": {"instruction": "What is 10+10?", "input": "", "output": "20"},
    "verl": {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "20"}},
    "empty history": {"query": "What is 10+10?", "history": []},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS.keys())
def test_every_form_is_the_same_prompt(row, codec):
    assert only(row, codec).text == ASKED
    assert only(row, codec, apply_chat_template=True).text == ASKED


def test_alpacas_input_stands_below_its_instruction(codec):
    entry = only({"instruction": "Add the numbers.", "input": "10 and 10", "output": "20"}, codec)
    assert entry.messages == ({"role": "user", "content": "Add the numbers.\n10 and 10"},)
    assert entry.columns == {"output": "20", "solution": "20"}


@pytest.mark.parametrize(
    "history",
    [
        [["I have 10 pens.", "Noted."]],
        [("I have 10 pens.", "Noted.")],
        str([["I have 10 pens.", "Noted."]]),
        json.dumps([["I have 10 pens.", "Noted."]]),
        [{"role": "user", "content": "I have 10 pens."}, {"role": "assistant", "content": "Noted."}],
    ],
)
def test_history_comes_before_the_query(history, codec):
    for column in ("query", "prompt"):
        entry = only({column: "What is 10+10?", "history": history, "solution": "20"}, codec)
        assert entry.text == HISTORY + ASKED
        assert entry.columns == {"solution": "20"}


def test_a_history_that_is_none_is_counted(codec):
    assert reason({"query": "Q?", "history": "I have 10 pens."}, codec)[0] == "history"
    assert reason({"query": "Q?", "history": [["a", "b", "c"]]}, codec)[0] == "history"


def test_the_system_column_has_two_names(codec):
    for column in ("system", "system_prompt", "System Prompt"):
        entry = only({"query": "Q?", column: "Be brief."}, codec, system="Be long.")
        assert entry.messages[0] == {"role": "system", "content": "Be brief."}
        assert entry.columns == {}


# -- roles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["critic", "model", "", "assistant2"])
def test_an_unknown_role_is_named(role, codec):
    for name, said in (("role", "content"), ("from", "value")):
        row = {"messages": turns(name, said, ("user", "What is 10+10?"), (role, "20"))}
        assert reason(row, codec) == ("role", role)


def test_calls_of_tools_reach_the_template(model_dir):
    written = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}</call>"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    codec = load_codec(model_dir(template=written))
    call = {"name": "add", "arguments": {"a": 10}}
    wanted = '[user]Q?[assistant]<call>add {"a": 10}</call>[tool]20[user]So?[assistant]'
    openai = {"function": {"name": "add", "arguments": '{"a": 10}'}, "type": "function", "id": "1"}
    forms = (
        [("user", "Q?"), ("function_call", json.dumps(call)), ("observation", "20"), ("user", "So?")],
        [("human", "Q?"), ("tool_call", call), ("tool_response", "20"), ("user", "So?"), ("gpt", "20")],
        [("user", "Q?"), ("function-call", str(call)), ("tool", "20"), ("human", "So?")],
    )
    for pairs in forms:
        assert only({"messages": turns("role", "content", *pairs)}, codec).text == wanted
    spoken = [USER | {"content": "Q?"}, {"role": "assistant", "content": None, "tool_calls": [openai]}]
    spoken += turns("role", "content", ("tool", "20"), ("user", "So?"))
    assert only({"messages": spoken}, codec).text == wanted


def test_messages_without_a_question_are_left_out(codec):
    for messages in (
        [{"role": "system", "content": "Be brief."}],
        [{"role": "user", "content": ""}],
        [USER, GOLD, {"role": "user", "content": " "}],
        [],
    ):
        assert reason({"messages": messages}, codec)[0] == "no_prompt"
    for column in ("messages", "prompt"):
        for messages in ([GOLD], [{"role": "system", "content": "S"}, {"role": "bot", "content": "20"}]):
            assert reason({column: messages}, codec)[0] == "only_answers"
    for messages in ("What is 10+10?", "[broken", "[1, 2]", 7, {"role": "user"}, [["user", "Q?"]]):
        assert reason({"messages": messages}, codec)[0] == "wrong_type"
    anthropic = [{"role": "user", "content": [{"type": "tool_result", "content": "20"}]}]
    assert reason({"messages": anthropic}, codec)[0] == "wrong_type"
    pictures = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]
    assert reason({"messages": pictures}, codec)[0] == "media"


# -- golds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"messages": [USER, GOLD]}, "20"),
        ({"messages": [USER, {"role": "assistant", "content": "<think>10 and 10</think>\n20"}]}, "20"),
        ({"query": "Q?", "response": "20"}, "20"),
        ({"query": "Q?", "response": ["20"]}, "20"),
        ({"prompt": [USER], "completion": [GOLD]}, "20"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "20", "style": "rule"}}, "20"),
        ({"prompt": [USER], "reward_model": '{"ground_truth": "20"}'}, "20"),
        ({"query": "Q?", "targets": ["Paris", "City of Paris"]}, ["Paris", "City of Paris"]),
        ({"query": "Q?", "output": [["1", "2"], ["3"]]}, [["1", "2"], ["3"]]),
        (
            {"query": "Q?", "answers": {"text": ["20"], "answer_start": [3]}},
            {"text": ["20"], "answer_start": [3]},
        ),
        ({"query": "Q?", "reward_model": {"ground_truth": {"target": ["20"]}}}, {"target": ["20"]}),
        # No answers: choices to choose from, messages, verdicts, and an object of anything else.
        ({"query": "Q?", "output": {"text": "20", "id": 3}}, None),
        ({"query": "Q?", "completion": [USER, GOLD]}, None),
        ({"query": "Q?", "targets": [True, False]}, None),
        # A column of golds, even an empty one, is the only place of them.
        ({"messages": [USER, GOLD], "solution": "21"}, "21"),
        ({"messages": [USER, GOLD], "solution": None}, None),
        ({"query": "Q?", "response": "20", "answer": "21"}, None),
        # Two are no answer, and neither is one that may be wrong.
        ({"query": "Q?", "response": "20", "output": "21"}, None),
        ({"prompt": "Q?", "completion": "20", "label": False}, None),
        ({"messages": [USER, GOLD], "label": False}, None),
    ],
)
def test_where_the_gold_stands(row, gold, codec):
    entry = only(row, codec)
    assert entry.columns.get("solution") == gold
    for name in ("response", "reward_model", "label", "completion"):
        assert entry.columns.get(name) == row.get(name)


# -- the beginning of an answer ----------------------------------------------------------------------------


def begins(said, **fields):
    return {"prompt": [USER, {"role": "assistant", "content": said, **fields}], "solution": "20"}


@pytest.mark.parametrize("said", ["Let me think:", "Let me think: ", " <think>\n", "20", "a\n\nb"])
@pytest.mark.parametrize("strips", [False, True])
def test_a_prompt_that_begins_the_answer_is_continued_as_by_transformers(said, strips, model_dir):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content"
        + ("|trim" if strips else "")
        + " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    directory = model_dir(template=template)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    row = begins(said)
    wanted = tokenizer.apply_chat_template(
        row["prompt"], chat_template=template, continue_final_message=True, tokenize=False
    )
    for prompt in (row["prompt"], json.dumps(row["prompt"])):
        entry = only({**row, "prompt": prompt}, load_codec(directory))
        assert entry.text == wanted
        assert entry.text.endswith(entry.opened)
        assert entry.opened == (said.strip() if strips else said)
        assert entry.messages == tuple(row["prompt"])
        assert entry.columns == {"solution": "20"}
        assert tuple(entry.token_ids) == tuple(tokenizer.encode(wanted, add_special_tokens=False))


EMPTY, OPENED = "<think>\\n\\n</think>\\n\\n", "<think>\\n"
TURN = "<|im_start|>assistant\n"


def thinking(*, conversation="", prompt="", off=""):
    """A template that writes thoughts in front of the last answer of a conversation, at the end of a prompt,
    and at the end of a prompt with thinking off."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and "
        "not m.content.startswith('<think>\\nA thought.') %}{{ '" + conversation + "' }}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '" + off + "' }}"
        "{% else %}{{ '" + prompt + "' }}{% endif %}{% endif %}"
    )


# As Qwen 3, as a model that always thinks, as that with an empty thought in conversations, as DeepSeek V3.1.
QWEN = thinking(conversation=EMPTY, off=EMPTY)
ALWAYS = thinking(prompt=OPENED)
ALWAYS_EMPTY = thinking(conversation=EMPTY, prompt=OPENED)
CLOSES = thinking(conversation="</think>", prompt="<think>", off="</think>")
CHANNELS = thinking(conversation="<|channel|>final<|message|>")


@pytest.mark.parametrize(
    ("template", "enable_thinking", "said", "behind"),
    [
        (QWEN, None, "The sum is", ""),
        (QWEN, True, "The sum is", ""),
        (QWEN, False, "The sum is", "<think>\n\n</think>\n\n"),
        (QWEN, None, "<think>\n", ""),
        (QWEN, True, "<think>\nOK so", ""),
        (QWEN, None, "<think>\nA thought.\n</think>\n\nThe sum", ""),
        (QWEN, False, "<think>\nA thought.\n</think>\n\nThe sum", ""),
        (QWEN, False, "<think>\n", "refused: it writes '<think>\\n\\n</think>' in front of '<think>'"),
        (ALWAYS, None, "<think>\nOK so", ""),
        (ALWAYS, None, "The sum is", ""),
        (ALWAYS_EMPTY, None, "<think>\nOK so", ""),
        (ALWAYS_EMPTY, None, "So", "refused: it writes '<think>\\n\\n</think>' in front of 'So'"),
        (CLOSES, None, "<think>\nOK so", ""),
        (CLOSES, None, "So", "refused: it writes '</think>' in front of 'So'"),
        (CLOSES, False, "So", "</think>"),
        (CLOSES, False, "<think>\nOK", "refused: it writes '</think>' in front of '<think>\\nOK'"),
        (CHANNELS, None, "So", "refused: it writes '<|channel|>final<|message|>' in front of 'So'"),
    ],
)
def test_what_a_template_writes_in_front_of_a_beginning(template, enable_thinking, said, behind, model_dir):
    codec = load_codec(model_dir(template=template), enable_thinking=enable_thinking)
    if behind.startswith("refused: "):
        assert reason(begins(said), codec) == ("not_continued", behind.removeprefix("refused: "))
        return
    entry = only(begins(said), codec)
    assert entry.text == f"<|im_start|>user\nWhat is 10+10?<|im_end|>\n{TURN}{behind}{said}"
    assert entry.opened == said
    # Without a beginning the prompt is what the template makes of it.
    assert only(begins(""), codec).text == codec.render([USER])


def test_the_beginning_of_an_answer_is_no_gold(codec):
    row = begins("Let me think:")
    del row["solution"]
    assert only(row, codec).columns == {}
    (words,) = table([row], codec).read_as
    assert words == "prompts: each ends with the beginning of an answer, which completions continue"
    assert only({"messages": row["prompt"]}, codec).columns == {"solution": "Let me think:"}


def test_an_empty_beginning_is_none(codec):
    entry = only(begins(""), codec)
    assert (entry.text, entry.opened, entry.messages) == (ASKED, "", (USER,))


def test_a_beginning_that_cannot_be_continued_is_refused(codec, model_dir):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert reason(begins("", tool_calls=[call]), codec) == ("not_continued", "a call of a tool")
    cuts = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    codec = load_codec(model_dir(template=cuts))
    assert only(begins("So"), codec).text == "[user]What is 10+10?[assistant]So"
    assert reason(begins("<think>a</think>So"), codec) == ("not_continued", "'<think>a</think>So'")


def test_a_gold_in_capitals_has_both_names(codec):
    assert only(FORMS["capitals"], codec).columns == {"Answer": "20", "answer": "20"}
    both = {"Question": "a", "QUESTION": "b", "solution": "20"}
    assert reason(both, codec)[0] == "no_prompt"


def test_what_was_read_from_elsewhere_is_counted(codec):
    rows = [FORMS["sharegpt"], FORMS["sharegpt"], {"query": "Q?", "solution": "3"}]
    assert table(rows, codec).read_as == {
        "prompts: the column conversations": 2,
        "gold answers: the last turn of the assistant": 2,
    }
    assert table([{"question": "Q?", "solution": "3"}], codec).read_as == {}
    (words,) = table([{"prompt": "Q?", "input": "3 1 2", "solution": "3"}], codec).read_as
    assert "not used for them: input" in words
    own = {"messages": [{"role": "system", "content": "Mine."}, USER], "solution": "20"}
    (words,) = table([own], codec, system="Be brief.").read_as
    assert "not --system" in words


def test_what_a_prompt_string_has_no_place_for_is_named(codec):
    found = table([{"prompt": "Q?", "system": "Be brief.", "tools": [{"name": "add"}]}], codec)
    assert found.unused_columns == ("system", "tools")
    assert table([{"query": "Q?", "system": "Be brief."}], codec).unused_columns == ()


# -- texts that cannot be encoded --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"query": "\ud83d What?"},
        {"prompt": "\ude00"},
        {"messages": [{"role": "user", "content": "Q\ud83d?"}]},
        {"query": "Q?", "system": "\ud83d"},
        {"query": "Q?", "solution": "\ud83d"},
        {"query": "Q?", "notes": {"a": ["\ud83d"]}},
        {"query": "Q?", "notes": {"\ud83d": 1}},
        {"query": "Q?", "\ud83d": 1},
        {"query": "Q?", "history": [["\ud83d", "a"]]},
    ],
)
def test_half_a_surrogate_pair_leaves_its_row_out(row, codec):
    found = table([row, {"query": "\U0001f600 \0 Q?", "solution": "3"}], codec)
    assert found.left_out == {"surrogate": 1}
    assert found.left_out_rows == {"surrogate": (0,)}
    assert len(found.entries) == 1
