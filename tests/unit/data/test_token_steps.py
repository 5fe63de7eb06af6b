"""Which token ends a step: exact for characters that are spread over tokens, tokens that hold several
characters, and tokenizers of both families, byte-level and with byte fallback."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from covey.rewards.steps import step_ends

TEXT = "先算 12+3。\n\n再见🙂\n\n\n\nthe end\n\n完"


def byte_level(extra=()):
    """A byte-level tokenizer that has learnt these words, and no others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.add_tokens(list(extra))
    return tokenizer


def with_fallback():
    """The family of Llama: pieces with a mark for the space, and bytes for what is no piece."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "你",
        "\n",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    rest = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *rest])
    return tokenizer


def slow(codec, ids, text, ends):
    """The fewest tokens whose text begins as the whole does up to there, by trying every number."""
    return tuple(
        next((n for n in range(1, len(ids) + 1) if codec.decode(ids[:n]).startswith(text[:end])), len(ids))
        for end in ends
    )


@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_a_character_is_written_by_the_token_with_its_last_byte(make, codec):
    codec = replace(codec, tokenizer=make())
    ids = codec.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert codec.decode(ids) == TEXT and len(ids) > len(TEXT)
    ends = step_ends(TEXT, "\n\n")
    found = codec.tokens_until(ids, TEXT, ends)
    assert found == slow(codec, ids, TEXT, ends)
    if make is byte_level:
        assert found == tuple(len(TEXT[:end].encode()) for end in ends)
    # Every character, not separators alone: three bytes of a Chinese one are three tokens.
    every = range(1, len(TEXT) + 1)
    assert codec.tokens_until(ids, TEXT, every) == slow(codec, ids, TEXT, every)


def test_a_space_that_begins_no_text_is_kept_behind_one(codec):
    codec = replace(codec, tokenizer=with_fallback())
    begun, ids = ([codec.tokenizer.token_to_id(t) for t in tokens] for tokens in (["▁a"], ["▁b", "\n", "a"]))
    assert codec.decode(begun) + codec.decode(ids) == "ab\na"
    text = codec.decode_behind(begun, ids)
    assert codec.decode(begun) + text == codec.decode([*begun, *ids]) == "a b\na"
    assert codec.decode_behind((), ids) == "b\na"
    assert codec.decode_behind(ids, ids[1:]) == "\na"
    assert codec.tokens_until(ids, text, [1, 2, 3, 4]) == (1, 1, 2, 3)
    assert codec.tokens_until(ids, codec.decode(ids), [1, 2, 3]) == (1, 2, 3)


def test_a_token_over_a_boundary_is_of_the_step_that_it_ends(codec):
    codec = replace(codec, tokenizer=byte_level(["\n\nthe", ".\n\n\n\n"]))
    tokenizer = codec.tokenizer
    text = "ab\n\nthe x.\n\n\n\ny"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = [tokenizer.decode([i]) for i in ids]
    assert pieces == ["a", "b", "\n\nthe", " ", "x", ".\n\n\n\n", "y"]
    # "ab", then "the x.", an empty step whose separator came with the last token, and "y".
    assert codec.tokens_until(ids, text, step_ends(text, "\n\n")) == (3, 6, 6, 7)


def test_special_tokens_write_nothing(codec):
    codec = replace(codec, tokenizer=byte_level())
    eos = codec.tokenizer.token_to_id("<eos>")
    ids = [eos, *codec.tokenizer.encode("a\n\nb", add_special_tokens=False).ids, eos]
    text = codec.decode(ids)
    assert text == "a\n\nb"
    assert codec.tokens_until(ids, text, [3, 4]) == (4, 5)


@pytest.mark.parametrize("make", [byte_level, with_fallback])
def test_bytes_that_are_no_text_lead_nowhere_else(make, codec):
    """A model may sample any bytes: every boundary still is within the completion, and they rise."""
    codec = replace(codec, tokenizer=make())
    draw = random.Random(3)
    size, broken = codec.tokenizer.get_vocab_size(), 0
    for _ in range(300):
        ids = [draw.randrange(size) for _ in range(draw.randrange(1, 25))]
        text = codec.decode(ids)
        # A step ends behind a separator, which is no such byte.
        ends = [i for i, char in enumerate(text, start=1) if char != "\ufffd"][-3:]
        found = codec.tokens_until(ids, text, ends)
        assert all(1 <= n <= len(ids) for n in found)
        assert list(found) == sorted(found)
        if make is byte_level:
            assert found == slow(codec, ids, text, ends)
        broken += "\ufffd" in text
    assert broken > 50
