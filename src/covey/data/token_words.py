"""Names the tokens that end completions, and those that completions never have, for people."""

from __future__ import annotations

from covey.data.text import TextCodec
from covey.texts import joined, tr

_MOST_NAMED = 8


def stop_tokens_in_words(codec: TextCodec) -> str:
    """End tokens, ids and who asked for each: `<|im_end|> (257; template, tokenizer), </s> (2; config)`."""
    words = []
    for token_id in codec.stop_token_ids:
        content, sources = codec.tokenizer.id_to_token(token_id), codec.stop_sources.get(token_id, ())
        named = content if content is not None else tr("(not in the tokenizer)")
        words.append(f"{named} ({'; '.join([str(token_id), ', '.join(sources)])})")
    return ", ".join(words) or "none"


def banned_tokens_in_words(codec: TextCodec) -> str:
    """Return the banned tokens and their ids: `<|image_pad|> (3), <|video_pad|> (4)`; "" where none are."""
    shown = codec.banned_token_ids[:_MOST_NAMED]
    words = [f"{codec.tokenizer.id_to_token(i)} ({i})" for i in shown]
    more = len(codec.banned_token_ids) - len(shown)
    return joined(", ", [*words, *([tr("{more:,} more", more=more)] if more else [])])
