"""One row to one prompt: what the row means, rendered, and what the prompt has opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.data.errors import DataError, RowFault, TemplateError
from covey.data.forms import PROMPT_COLUMNS as PROMPT_COLUMNS
from covey.data.forms import ReadRow, read_row
from covey.data.images import ImageRules, with_blocks
from covey.data.kept import KeptCheck
from covey.data.messages import Message
from covey.data.plain import is_encodable
from covey.data.text import TextCodec
from covey.texts import tr

SYSTEM_PRESETS = {
    "r1": "You answer questions. First work the question through inside <think> and </think> tags, then give "
    "the final answer inside <answer> and </answer> tags, like this: <think> your reasoning </think> "
    "<answer> your answer </answer>"
}

# Behind the beginning of an answer, where a template is asked to go on; the space shows whether it strips.
_GOES_ON = "covey goes on here "
# The beginning of an answer that begins with a thought, and a thought of no words; of some templates its end
# alone.
_THINKS = re.compile(r"<(?:think|thinking|thought|reasoning)>|\[THINK\]", re.IGNORECASE)
_THOUGHT = re.compile(
    r"(?:<(think|thinking|thought|reasoning)>\s*)?</(?:think|thinking|thought|reasoning)>\Z"
    r"|(?:\[THINK\]\s*)?\[/THINK\]\Z",
    re.IGNORECASE,
)
# A mark of which the end is missing.
_CUT = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_SHOWN = 60
# An opening tag at the very end: the model goes on inside it.
_OPENED = re.compile(
    r"(?:<(?:think|thinking|thought|reasoning|answer|solution)>|\[THINK\])\s*\Z", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A row's prompt text, or the reason why it has none and what stands there; `messages` is None where no
    template made the text. `row` is what was read, `role` that of a message that is lost, `begun` the
    beginning of the answer where the row has one, as it stands at the end of the text."""

    row: ReadRow
    text: str = ""
    messages: tuple[Message, ...] | None = None
    reason: str = ""
    detail: str = ""
    role: str = ""
    begun: str = ""


def system_text(value: str) -> str:
    """The system prompt that `--system` means: a preset, the text of a file, or the words themselves."""
    if value in SYSTEM_PRESETS:
        return SYSTEM_PRESETS[value]
    path = os.path.expanduser(value)
    if "\0" not in path and os.path.isfile(path):
        try:
            value = Path(path).read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            words = tr(
                "system names the file {path}, but it cannot be read as UTF-8: {error}",
                path=path,
                error=error,
            )
            raise DataError(words, option="system") from error
    elif value.endswith((".txt", ".md")) and len(value.split()) == 1:
        words = tr("system names the file {value}, but it does not exist", value=value)
        raise DataError(words, option="system")
    if not is_encodable(value):
        words = tr("system contains half of a surrogate pair, which no tokenizer can read: type it again")
        raise DataError(words, option="system")
    return value


def render(
    row: Mapping[str, Any],
    codec: TextCodec,
    check: KeptCheck,
    *,
    system: str | None,
    is_raw: bool,
    tools: Sequence[Message] = (),
    may_be_empty: bool = False,
    images: ImageRules | None = None,
) -> Rendered:
    """The prompt of a row; a `prompt` string stays as it is when `is_raw`, all else goes through the
    template. `tools` are those of the run, of which the row may choose some by name.
    `may_be_empty`: the last message may have no text. `images` says how those of rows are read, None for a
    model that sees none."""
    read = read_row(row, system=system, is_raw=is_raw, tools=tools, may_be_empty=may_be_empty, images=images)
    if read.reason:
        return Rendered(row=read, reason=read.reason, detail=read.detail)
    if read.text is not None:
        return Rendered(row=read, text=read.text)
    kwargs = read.template_kwargs or {}
    begun = ""
    try:
        if read.continues:
            text, begun = _continued(read, codec)
        else:
            text = codec.render(with_blocks(read.messages), tools=read.tools, kwargs=kwargs)
        _check_places(text, read, codec)
        check.check(text, read.messages, read.tools, kwargs)
    except RowFault as fault:
        return Rendered(row=read, reason=fault.reason, detail=fault.detail, role=fault.role)
    except TemplateError as error:
        # Some take a text alone, and fail on a list of blocks.
        if not read.images or error.kind != "refusing_template":
            raise
        return Rendered(row=read, reason="images_lost", detail=str(error))
    return Rendered(row=read, text=text, messages=with_blocks(read.messages), begun=begun)


def _check_places(text: str, read: ReadRow, codec: TextCodec) -> None:
    """Raise RowFault("images_lost") where the template does not write a place for each image."""
    if not read.images:
        return
    assert codec.vision is not None, "a model that sees none has no images"
    places = text.count(codec.vision.token)
    if places != len(read.images):
        words = tr("images: {num}, places for them: {places}", places=places, num=len(read.images))
        raise RowFault("images_lost", words)


def _continued(read: ReadRow, codec: TextCodec) -> tuple[str, str]:
    """The text up to the end of the last message, which no mark closes, and how that message stands there.

    As `apply_chat_template(..., continue_final_message=True)` of transformers: where the template strips
    messages, the spaces at the end are gone. What the template writes in front of the message
    is kept where `_front` says so.
    """
    *before, last = read.messages
    begun = last["content"].strip()
    asked = [*before, {**last, "content": last["content"] + _GOES_ON}]
    kwargs = read.template_kwargs or {}
    whole = codec.render(with_blocks(asked), add_generation_prompt=False, tools=read.tools, kwargs=kwargs)
    text, mark, rest = whole.rpartition(_GOES_ON.rstrip())
    if not rest.startswith(" "):
        text = text.rstrip()
    whole_at_end = last["content"] if text.endswith(last["content"]) else begun
    start = text.rfind(whole_at_end)
    shown = repr(begun if len(begun) <= _SHOWN else f"{begun[:_SHOWN]} ...")
    if not mark or start < 0 or text[start:].strip() != begun:
        raise RowFault("not_continued", shown)
    prompt = codec.render(with_blocks(before), tools=read.tools, kwargs=kwargs)
    front, odd = _front(text[:start], prompt, begun)
    if odd:
        odd = odd if len(odd) <= _SHOWN else f"{odd[:_SHOWN]} ..."
        raise RowFault("not_continued", tr("it writes {odd!r} in front of {begun}", odd=odd, begun=shown))
    return front + text[start:], text[start:]


def _front(written: str, prompt: str, begun: str) -> tuple[str, str]:
    """The prompt that precedes the beginning of an answer: what the template has `written` there, or the
    prompt that it makes without a beginning.

    Most templates make both the same. If only one of them has a thought, the policy must not be given a
    thought that no completion contains. An empty thought in front of the beginning (Qwen 3) is left out. A
    thought that the prompt opens is left out if the beginning opens one itself, or has none. A thought that
    the prompt also closes (thinking is off) stays.

    The second value is other text that the template writes there, or a closed thought in front of a
    beginning that thinks; "" if there is neither.
    """
    pairs = enumerate(zip(written, prompt, strict=False))
    both = written[: next((n for n, (a, b) in pairs if a != b), min(len(written), len(prompt)))]
    parted = (_CUT.search(both) or _OPENED.search(both)) if both != written else None
    same = len(both) if parted is None else parted.start()
    added, prompted = written[same:].strip(), prompt[same:].strip()
    thinks = _THINKS.match(begun) is not None
    front = written
    if added and prompted and begun.startswith(prompted):
        front = written[:same]
    elif added and (prompted or not _THOUGHT.fullmatch(added)):
        return written, added
    elif added or (_THOUGHT.search(prompted) and not thinks):
        front = prompt
    closed = _THOUGHT.search(front.rstrip())
    return front, closed[0] if closed is not None and thinks else ""


def opened(rendered: Rendered) -> str:
    """What the prompt has opened of the assistant's turn: the beginning of an answer, or `<think>\\n` where
    its text ends with that, else nothing.

    A tag that ends the last message's own text opens nothing: the template then adds no turn of the
    assistant.
    """
    if rendered.begun:
        return rendered.begun
    tag = opened_by(rendered.text)
    if tag and rendered.messages:
        last = str(rendered.messages[-1].get("content") or "")
        if rendered.text.rstrip().endswith(last.rstrip()) and last.strip():
            return ""
    return tag


def opened_by(text: str) -> str:
    """Return the opening tag that ends a text, with the space behind it; "" where none does."""
    match = _OPENED.search(text[-40:])
    return "" if match is None else match.group()
