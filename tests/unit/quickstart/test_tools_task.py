"""The embedded task for tools and its model: no leak of held-out pairs, a template that goes on where it
ended, and episodes that leave room to learn."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.quickstart import tools_task as task

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import make_tools_model

HELD_OUT_START = [(26, 28), (70, 91), (61, 55)]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Numbers and operators."}},
            "required": ["expression"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "37*46"}}}
EPISODE = [
    {"role": "user", "content": "What is 37*46?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "calculate", "content": "1702"},
    {"role": "assistant", "content": "The answer is 1702."},
]
WRITTEN = """\
<|im_start|>system
<tools>
{"name": "calculate", "arguments": ["expression"]}
</tools><|im_end|>
<|im_start|>user
What is 37*46?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "calculate", "arguments": {"expression": "37*46"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
1702
</tool_response><|im_end|>
<|im_start|>assistant
The answer is 1702.<|im_end|>
"""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(task.MODEL_DIR)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(task.MODEL_DIR).eval()


def test_held_out_and_training_pairs_partition_all_pairs():
    held_out, training = task.held_out_pairs(), task.training_pairs()
    assert len(held_out) == task.HELD_OUT == 512
    assert len(held_out) + len(training) == 8_100
    assert set(held_out) | set(training) == set(itertools.product(range(10, 100), repeat=2))


def test_the_split_is_the_one_the_model_was_made_with():
    # Another split would leak held-out pairs into the weights without any other test noticing.
    assert task.held_out_pairs()[:3] == HELD_OUT_START


def test_row_texts():
    for rows, pairs in (
        (task.training_rows(), task.training_pairs()),
        (task.held_out_rows(), task.held_out_pairs()),
    ):
        assert rows == [
            {"messages": [{"role": "user", "content": f"What is {a}*{b}?"}], "solution": str(a * b)}
            for a, b in pairs
        ]


def test_the_stored_tokenizer_is_the_one_the_script_makes(tokenizer):
    made = make_tools_model.make_tools_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template


def test_the_template_writes_an_episode_as_the_model_learned_it(tokenizer):
    rendered = tokenizer.apply_chat_template(EPISODE, tools=[SCHEMA], tokenize=False)
    assert rendered == WRITTEN
    written = [
        make_tools_model.prompt("What is 37*46?"),
        make_tools_model.call("37*46"),
        make_tools_model.between("1702"),
        make_tools_model.reply("1702"),
        "\n",
    ]
    assert "".join(written) == WRITTEN
    # What is sampled turn by turn and what is written as a whole are the same tokens.
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in written]
    ids = list(itertools.chain(*pieces))
    assert ids == tokenizer.encode(WRITTEN, add_special_tokens=False)
    assert [len(piece) for piece in pieces] == [37, 23, 17, 10, 1]
    # Each word of the format is one token.
    assert {"calculate", "expression", "arguments", "<tool_call>", "</tool_response>"} <= {
        tokenizer.decode([i]) for i in ids
    }


@pytest.mark.parametrize("tools", [[SCHEMA], None])
def test_each_rendering_begins_with_the_one_before(tokenizer, tools):
    system = {"role": "system", "content": "Be brief."}
    for messages in (EPISODE, [system, *EPISODE, {"role": "user", "content": "Again."}, *EPISODE[1:]]):
        former = ""
        for count in range(1, len(messages) + 1):
            options = {"tools": tools, "tokenize": False}
            whole = tokenizer.apply_chat_template(messages[:count], **options)
            opened = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=True, **options)
            assert whole.startswith(former)
            assert opened == whole + "<|im_start|>assistant\n"
            former = (
                opened if messages[count : count + 1] and messages[count]["role"] == "assistant" else whole
            )


def test_tools_show_and_text_stands_before_a_call(tokenizer):
    def written(messages, tools=None):
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    asked = EPISODE[:1]
    assert written(asked) == "<|im_start|>user\nWhat is 37*46?<|im_end|>\n"
    assert written(asked, [SCHEMA, SCHEMA]).count('{"name": "calculate", "arguments": ["expression"]}\n') == 2
    system = {"role": "system", "content": "Be brief."}
    assert written([system, *asked], [SCHEMA]).startswith("<|im_start|>system\nBe brief.\n<tools>\n")
    assert written([system, *asked]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    both = written([{"role": "assistant", "content": "I ask.", "tool_calls": [CALL, CALL]}])
    one = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "37*46"}}\n</tool_call>'
    assert both == f"<|im_start|>assistant\nI ask.\n{one}\n{one}<|im_end|>\n"
    as_text = {"function": {"name": "calculate", "arguments": '{"expression": "37*46"}'}}
    assert one in written([{"role": "assistant", "content": None, "tool_calls": [as_text]}])


def test_episodes_of_the_warm_up_guess_or_call_rightly_or_wrongly():
    rng = random.Random(0)
    a, b = task.training_pairs()[0]
    kinds = set()
    for _ in range(200):
        (asked, is_learned), *rest = make_tools_model.mixed_episode((a, b), rng)
        assert asked == make_tools_model.prompt(f"What is {a}*{b}?")
        assert not is_learned
        kinds.add((len(rest), f"{a}*{b}" in rest[0][0]))
        assert [learned for _, learned in rest] in ([True], [True, False, True])
    assert kinds == {(1, False), (3, True), (3, False)}


def test_sampled_accuracy_leaves_room_to_learn(model, tokenizer):
    accuracy = make_tools_model.sample_accuracy(model, tokenizer, task.held_out_pairs(), seed=0)
    assert 0.10 <= accuracy <= 0.35


def test_with_results_of_other_calls_next_to_nothing_is_right(model, tokenizer):
    pairs = task.held_out_pairs()
    assert make_tools_model.sample_accuracy(model, tokenizer, pairs, seed=0, shift=1) <= 0.02
