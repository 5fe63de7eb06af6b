"""Stop words as a tokenizer makes texts: special tokens are in none."""

from __future__ import annotations

from typing import Any

from covey.data.stop_words import stop_words


def test_a_word_that_is_a_special_token_is_looked_for_among_the_tokens(codec: Any) -> None:
    end, start = (codec.tokenizer.token_to_id(f"<|im_{name}|>") for name in ("end", "start"))
    found = stop_words(codec, ["<|im_start|>", "Question:", "<|im_end|>", "</answer>", "Question:"])
    assert found.token_ids == (start, end) and found.hidden == ()
    # A token that is not special is in the text.
    assert found.strings == ("Question:", "</answer>")


def test_a_word_with_a_special_token_in_it_is_in_no_text(codec: Any) -> None:
    found = stop_words(codec, ["ok", "<|im_end|>\n"])
    assert found.hidden == (("<|im_end|>\n", "<|im_end|>"),) and found.token_ids == ()
    assert stop_words(codec, []).strings == ()
