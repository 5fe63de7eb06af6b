"""Text that must not become control tokens: results of tools, and what environments say.

A template is rendered with the marks of such a text replaced by private characters, and these become the
marks again after the rendering, piece by piece, so that the tokenizer sees no mark as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from covey.data.text import TextCodec

# Private characters of Unicode.
_FIRST, _NUMBER = 0xF0000, 0xFFFD


class Untrusted:
    """Hides the marks of texts for one tokenizer. A text is encoded by the instance that has hidden it."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # Each hidden mark by its private character, and the other way round.
        self._hidden: dict[str, str] = {}
        self._chars: dict[str, str] = {}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Matches every text that the tokenizer always makes one token of, whitespace aside, and the private
        characters, which stand for marks here."""
        marks = sorted((mark for mark in self._known if mark.strip()), key=len, reverse=True)
        private = f"[{chr(_FIRST)}-{chr(_FIRST + _NUMBER)}]"
        return re.compile("|".join([*map(re.escape, marks), private]))

    @cached_property
    def _known(self) -> frozenset[str]:
        added = self._codec.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added)

    @cached_property
    def _special(self) -> frozenset[str]:
        """The marks that are no part of any text, such as those between turns."""
        added = self._codec.tokenizer.get_added_tokens_decoder().values()
        return frozenset(t.content for t in added if t.special)

    def hide(self, text: str) -> str:
        """Return the text with each of its marks as a private character."""
        return self._hidden_in(text, frozenset())

    def hide_own(self, text: str, sampled: frozenset[str]) -> str:
        """Return a text of the model with its special marks as private characters, except those that it has
        `sampled` as one token each."""
        return self._hidden_in(text, sampled | (self._known - self._special))

    def _hidden_in(self, text: str, but: frozenset[str]) -> str:
        def private(match: re.Match[str]) -> str:
            mark = match[0]
            if mark in but:
                return mark
            if mark not in self._chars:
                char = chr(_FIRST + len(self._chars))
                self._chars[mark], self._hidden[char] = char, mark
            return self._chars[mark]

        return self._marks.sub(private, text)

    def hidden_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message whose text, or whose text blocks, are hidden."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self.hide(content)}
        if isinstance(content, list):
            blocks = [
                {**block, "text": self.hide(block["text"])}
                if isinstance(block, Mapping) and isinstance(block.get("text"), str)
                else block
                for block in content
            ]
            return {**message, "content": blocks}
        return dict(message)

    def shown(self, text: str) -> str:
        """Return a rendered text with its marks as they were written."""
        return "".join(self._hidden.get(char, char) for char in text) if self._hidden else text

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a rendered text. Marks that the template wrote are control tokens; hidden
        ones are the tokens of their characters."""
        if not any(char in text for char in self._hidden):
            return self._codec.encode([text])[0]
        parts = re.split(f"([{''.join(self._hidden)}])", text)
        pieces = [piece for part in parts if part for piece in self._pieces(part)]
        return tuple(token for ids in self._codec.encode(pieces) for token in ids)

    def _pieces(self, part: str) -> list[str]:
        """Return a part in pieces of which none is a hidden mark as a whole."""
        if part not in self._hidden:
            return [part]
        mark = self._hidden[part]
        halves = [mark[0], mark[1:]]
        is_safe = not any(self._marks.search(half) for half in halves)
        return [half for half in halves if half] if is_safe else list(mark)
