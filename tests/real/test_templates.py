"""Real templates and tokenizers: prompts and end tokens are those of transformers and of the publishers."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import AutoTokenizer

from covey.data.errors import TemplateError
from covey.data.rows import prompt_table
from covey.data.text import load_codec
from support.real import NAMES, around, real

CONVERSATIONS = [
    [{"role": "user", "content": "What is 12+34?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  café 你好\n\n"}],
    [
        {"role": "user", "content": "{{ x }} {% y %} 1+1?"},
        {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nIt is 2."},
        {"role": "user", "content": "And 2+2?"},
    ],
]
ENDS = {
    "smollm2": {2},
    "qwen3": {151_645, 151_643},
    "llama3_1": {128_001, 128_008, 128_009},
    "gemma3": {1, 106},
}
CLOSES = {"smollm2": 2, "qwen3": 151_645, "llama3_1": 128_009, "gemma3": 106}


@cache
def tokenizer(name):
    return AutoTokenizer.from_pretrained(real(name))


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["question", "system", "turns"])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_that_of_transformers(name, messages, thinking):
    theirs = tokenizer(name)
    codec = load_codec(real(name), enable_thinking=thinking)
    told = {} if thinking is None else {"enable_thinking": thinking}
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **told)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **told)
    assert codec.render(messages) == text
    assert list(codec.encode([text])[0]) == ids


@pytest.mark.parametrize("name", NAMES)
def test_the_end_tokens_are_those_of_the_publisher(name, tmp_path):
    codec = load_codec(real(name) if name == "smollm2" else around(name, tmp_path / name))
    assert set(codec.stop_token_ids) == ENDS[name]
    assert "template" in codec.stop_sources[CLOSES[name]]


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_are_no_text(name):
    codec, closes = load_codec(real(name)), CLOSES[name]
    (ids,) = codec.encode(["Yes."])
    assert codec.decode([*ids, closes]) == "Yes."
    assert codec.written_out([closes]) == codec.tokenizer.id_to_token(closes)


BEGINNINGS = ("The answer is", "<think>\nOK so", "<think>\n", "**Answer**: 4 +", "你好")


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("begun", BEGINNINGS)
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_is_begun_stands_behind_the_prompt(name, begun, thinking):
    """Nothing stands between the two that the prompt alone does not have; a thought is refused where thinking
    is off."""
    codec = load_codec(real(name), enable_thinking=thinking)
    asked = {"role": "user", "content": "2+2?"}
    table = prompt_table(
        [{"prompt": [asked, {"role": "assistant", "content": begun}]}], codec, max_length=None
    )
    if name == "qwen3" and thinking is False and begun.startswith("<think>"):
        assert list(table.left_out) == ["not_continued"]
        return
    (entry,) = table.entries
    behind = codec.render([asked])
    assert entry.text.startswith(behind)
    # Templates of Llama and Gemma trim what a message says, as in transformers.
    assert entry.text.removeprefix(behind) in (begun, begun.rstrip())
    assert entry.opened == entry.text.removeprefix(behind)


@pytest.mark.parametrize("name", NAMES)
def test_chatml_begins_as_the_tokenizer_begins_a_text(name):
    codec = load_codec(real(name), chat_template="chatml")
    own = tokenizer(name)
    first, plain = codec.encode([codec.render([{"role": "user", "content": "2+2?"}])])[0], own.encode("2+2?")
    has_bos = own.bos_token_id is not None and plain[0] == own.bos_token_id
    assert has_bos == (name in ("llama3_1", "gemma3"))
    assert (first[0] == own.bos_token_id) == (has_bos or name == "smollm2")


def test_gemma_has_no_system_role_of_its_own():
    codec = load_codec(real("gemma3"))
    told, question = "Be brief.", "Why?"
    text = codec.render([{"role": "system", "content": told}, {"role": "user", "content": question}])
    assert text.startswith(f"<bos><start_of_turn>user\n{told}\n\n{question}<end_of_turn>")
    with pytest.raises(TemplateError):
        codec.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
