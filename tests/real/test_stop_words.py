"""Stop words by real tokenizers, and of a real model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from covey.data.text import load_codec
from covey.models.load import load_policy
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.stop_strings import StopSearch
from covey.types import Finish, GenerationRequest, SamplingParams, TurnId
from support.engines import sampled
from support.real import NAMES, real

TEXT = "答案是 42。\n\nQuestion: Ответ — «сорок»? 😀👩‍🚀 </answer> x²  \tok [end]\r\n"
STRINGS = ("。\n", "Question:", "«со", "👩", "wer> x", "²  \tok", "end]\r\n", "о", "\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_word_is_found_at_the_token_that_completes_it(name: str) -> None:
    """Against decoding all that was sampled anew, for texts and for tokens of any kind."""
    tokenizer = load_codec(real(name)).tokenizer
    draw, size = random.Random(1), tokenizer.get_vocab_size()
    written = tokenizer.encode(TEXT, add_special_tokens=False).ids
    for number in range(60):
        tokens = [t if number < 5 or draw.random() < 0.8 else draw.randrange(size) for t in written * 2]
        tokens = [draw.randrange(size) for _ in range(number % 7)] + tokens[draw.randrange(20) :]
        ends = range(1, len(tokens) + 1)
        texts = [tokenizer.decode(tokens[:end], skip_special_tokens=True) for end in ends]
        for string in STRINGS:
            expected = next((end for end, text in zip(ends, texts, strict=True) if string in text), None)
            assert StopSearch(tokenizer, [string]).first_end(tokens) == expected, (string, tokens)


def test_engines_end_a_real_model_at_the_same_token() -> None:
    """A model that goes on with another question, as base models do."""
    directory: Path = real("smollm2")
    codec = load_codec(directory)
    policy = load_policy(directory, device=torch.device("cpu"), disable_dropout=True)
    policy.use_stream("prefix")
    text = "Question: What is 2+2?\nAnswer: 4\n\nQuestion: What is 3+3?\nAnswer:"
    (prompt,) = codec.encode([text])
    turns = [
        TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=sibling)
        for sibling in range(6)
    ]

    def asked(*strings: str) -> list[GenerationRequest]:
        how = SamplingParams(
            temperature=1.0, max_new_tokens=24, stop_token_ids=codec.stop_token_ids, stop_strings=strings
        )
        return [GenerationRequest(prompt_token_ids=prompt, sampling=how, turn=turn) for turn in turns]

    free = sampled(NativeEngine(policy), asked())
    for strings in (("\n\n",), ("\nQ", "1")):
        ends = [StopSearch(codec.tokenizer, strings).first_end(c.token_ids) for c in free]
        expected = [c.token_ids[:end] for c, end in zip(free, ends, strict=True)]
        for kind in (NativeEngine, GenerateEngine):
            found = sampled(kind(policy, tokenizer=codec.tokenizer), asked(*strings))
            assert [c.token_ids for c in found] == expected
            assert all(c.finish is Finish.STOP for c, end in zip(found, ends, strict=True) if end)
        assert any(ends)
