"""The embedded task and model: no leak of held-out pairs, exact texts, a tokenizer and weights that load."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.quickstart import task

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import make_model

HELD_OUT_START = [(81, 80), (62, 30), (98, 25)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(task.MODEL_DIR)


@pytest.fixture(scope="module")
def plain_tokenizer():
    return Tokenizer.from_file(str(task.MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(task.MODEL_DIR).eval()


def test_held_out_and_training_pairs_partition_all_pairs():
    held_out, training = task.held_out_pairs(), task.training_pairs()
    assert len(held_out) == task.HELD_OUT == 512
    assert len(held_out) + len(training) == 10_000
    assert set(held_out).isdisjoint(training)
    assert set(held_out) | set(training) == set(itertools.product(range(100), repeat=2))


def test_the_split_is_the_one_the_model_was_made_with():
    # Another split would leak held-out pairs into the weights without any other test noticing.
    assert task.held_out_pairs()[:3] == HELD_OUT_START


def test_row_texts():
    assert task.prompt_text(23, 45) == "What is 23+45?"
    assert make_model.target_text(23, 45) == "<think>23+45</think><answer>68</answer>"
    for rows, pairs in (
        (task.training_rows(), task.training_pairs()),
        (task.held_out_rows(), task.held_out_pairs()),
    ):
        assert rows == [
            {"messages": [{"role": "user", "content": f"What is {a}+{b}?"}], "solution": str(a + b)}
            for a, b in pairs
        ]


def test_the_warm_up_sees_no_held_out_pair():
    held_out = set(task.held_out_pairs())
    warm_up, validation = make_model.warm_up_pairs(), make_model.validation_pairs()
    assert warm_up
    assert validation
    assert held_out.isdisjoint(warm_up)
    assert held_out.isdisjoint(validation)
    assert set(warm_up).isdisjoint(validation)


def test_the_stored_tokenizer_is_the_one_the_script_makes(tokenizer):
    made = make_model.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    assert made.all_special_tokens == tokenizer.all_special_tokens


def test_digits_are_split(tokenizer):
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.tokenize("What is 90+07?")[-6:] == list("90+07?")
    several = [text for text in tokenizer.get_vocab() if re.search(r"\d", text) and len(text) > 1]
    assert several == []


def test_decoding_keeps_the_answer_tags_and_drops_the_special_tokens(tokenizer, plain_tokenizer):
    target = make_model.target_text(23, 45)
    ids = make_model.completion_ids(tokenizer, (23, 45))
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<think>", "2", "3", "+", "4", "5", "</think>"),
        *("<answer>", "6", "8", "</answer>", "<|im_end|>"),
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == target
    assert plain_tokenizer.decode(ids, skip_special_tokens=True) == target
    assert tokenizer.decode(ids) == target + "<|im_end|>"


@pytest.mark.parametrize(
    "messages",
    [
        task.held_out_rows()[0]["messages"],
        [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "  what's 5 + 17 ?\n"}],
        [
            {"role": "user", "content": "café 你好\n\n(a) <think>x</think>"},
            {"role": "assistant", "content": "<answer>1</answer>"},
            {"role": "user", "content": "again"},
        ],
    ],
)
@pytest.mark.parametrize("generate", [True, False])
def test_the_chat_template_agrees_with_plain_tokenizers(tokenizer, plain_tokenizer, messages, generate):
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    text += "<|im_start|>assistant\n" if generate else ""
    options = {"add_generation_prompt": generate}
    assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == text
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ids == plain_tokenizer.encode(text, add_special_tokens=False).ids


def test_sampled_accuracy_leaves_room_to_learn(model, tokenizer):
    figures = make_model.sample_figures(model, tokenizer, task.held_out_pairs(), seed=0)
    assert 0.25 <= figures.accuracy <= 0.40
    assert 0.85 <= figures.formatted <= 0.97
