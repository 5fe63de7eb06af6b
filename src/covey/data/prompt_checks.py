"""Checks of a chat template: whether its prompts begin as its own conversations do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from covey.data.errors import TemplateError
from covey.data.text import CLOSED, TextCodec
from covey.texts import tr


@dataclass(frozen=True, slots=True)
class PromptProblem:
    """How prompts differ from conversations, in words; `opening` is what the template writes in front of an
    answer in conversations but not in prompts, or ""."""

    words: str
    opening: str = ""


def prompt_problem(codec: TextCodec) -> PromptProblem | None:
    """How a prompt of the template differs from the beginning of the template's own conversations.

    None if it does not differ, there is no template, or the template refuses a plain conversation.
    """
    turns = [{"role": "user", "content": "a"}]
    answered = [*turns, {"role": "assistant", "content": CLOSED}]
    try:
        prompt = codec.render(turns)
        plain, whole = (codec.render(t, add_generation_prompt=False) for t in (turns, answered))
    except TemplateError:
        return None
    bos = codec.special_tokens.get("bos_token", "")
    (ids,) = codec.encode([prompt])
    if ids[:2] == (codec.tokenizer.token_to_id(bos),) * 2:
        return PromptProblem(tr("puts {bos} twice at the start of a prompt", bos=bos))
    # What reasoning models put before an answer in a conversation is no part of a prompt.
    opening = re.sub("</?think>", "", whole.removeprefix(prompt).partition(CLOSED)[0]).strip()
    if prompt == plain and whole.startswith(prompt) and opening:
        words = tr("does not end a prompt with {opening!r}, with which every answer starts", opening=opening)
        return PromptProblem(words, opening)
    return None


def unwritten_prefix(codec: TextCodec) -> str:
    """What the tokenizer puts in front of a plain text, where no prompt of the template begins with it; else
    ""."""
    try:
        prompt = codec.render([{"role": "user", "content": "a"}])
    except TemplateError:
        return ""
    (ids,) = codec.encode([prompt])
    is_there = ids[: len(codec.prefix_ids)] == codec.prefix_ids
    return "" if is_there else codec.written_out(codec.prefix_ids)
