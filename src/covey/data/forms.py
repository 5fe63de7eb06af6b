"""What a row means: its prompt, system message, tools and gold, in every form that data sets write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.data.errors import RowFault
from covey.data.images import IMAGE_COLUMNS, WRITTEN, ImageRules, in_messages, names_files, read_images
from covey.data.messages import (
    MARK,
    Marks,
    Message,
    chosen_tools,
    is_image,
    messages_of,
    parsed,
    tools_of,
    written_messages,
)
from covey.data.plain import is_encodable, plain_columns
from covey.media.source import ImageSource
from covey.texts import joined, plural, tr
from covey.types import GOLD_COLUMNS, GOLD_KEYS

# Where a prompt is looked for, in this order.
PROMPT_COLUMNS = (
    *("prompt", "messages", "conversations", "conversation"),
    *("query", "question", "problem", "instruction", "input"),
)
_LISTS = ("messages", "conversations", "conversation")
_SYSTEM = ("system", "system_prompt")
# What holds the answer of a conversation; it is the gold where no column is.
RESPONSES = ("response", "output", "completion", "targets", "target", "answers", "answer_key")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")

_KNOWN = (
    *PROMPT_COLUMNS,
    *_SYSTEM,
    *GOLD_COLUMNS,
    *RESPONSES,
    *MEDIA_COLUMNS,
    *("history", "tools", "chat_template_kwargs", "reward_model", "chosen", "rejected", "label"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """What a row holds.

    `text` is a prompt that no template touches; else `messages` go through the template, with `tools` and
    `template_kwargs`. `continues` is whether the last of them is the beginning of the assistant's answer,
    which the completion continues. `columns` goes to the rewards. `read_as` says what was read from another
    column than covey's own form uses. `reason` is why there is no prompt, a key of `plan/reasons.py`, and
    `detail` what stands there; `media` names the columns with images, sound or video that the model does not
    take, `unread` those with bytes, `unused` those that a prompt through the template would have and a
    `prompt` string has not. `images` are those of the messages, in the order of the marks in their texts.
    """

    columns: Mapping[str, Any]
    text: str | None = None
    messages: tuple[Message, ...] = ()
    continues: bool = False
    tools: tuple[Message, ...] = ()
    template_kwargs: Mapping[str, Any] | None = None
    read_as: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""
    media: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    images: tuple[ImageSource, ...] = ()


def standard_names(columns: Iterable[str]) -> Mapping[str, str]:
    """The columns that have a meaning, by the name covey knows them by: `{"question": "Question "}`.

    A name is the same in capitals and with spaces around it. The exact name comes first; two others that are
    the same name stand for nothing.
    """
    columns_by_name: dict[str, list[str]] = {}
    for column in columns:
        columns_by_name.setdefault("_".join(column.lower().split()), []).append(column)
    names = {}
    for name in _KNOWN:
        same = columns_by_name.get(name, [])
        if name in same:
            names[name] = name
        elif len(same) == 1:
            names[name] = same[0]
    return names


def names_a_prompt(columns: Sequence[str]) -> bool:
    """Whether one of the columns is where a prompt is looked for."""
    return any(name in standard_names(columns) for name in PROMPT_COLUMNS)


def are_pairs(columns: Sequence[str]) -> bool:
    """Whether the columns are a better and a worse answer, as preference training takes them."""
    names = standard_names(columns)
    return "chosen" in names and "rejected" in names


def read_row(
    row: Mapping[str, Any],
    *,
    system: str | None,
    is_raw: bool,
    tools: Sequence[Message] = (),
    may_be_empty: bool = False,
    images: ImageRules | None = None,
) -> ReadRow:
    """Read a row; a `prompt` string stays as it is when `is_raw`. Where the run has `tools`, a row has those
    that it names, or all of them. `may_be_empty`: the last message may have no text. `images` says how they
    are read, None for a model that sees none."""
    names = standard_names(row)
    seen = () if images is None else IMAGE_COLUMNS
    media = tuple(names[n] for n in MEDIA_COLUMNS if n in names and n not in seen and _holds(row[names[n]]))
    if media:
        return ReadRow(columns=row, reason="media", media=media)
    shown = {names[n]: row[names[n]] for n in seen if n in names}
    columns, unread = plain_columns(
        {n: v for n, v in row.items() if n not in shown}, None if images is None else is_image
    )
    reading = _Reading(columns, names, tools, images=images, shown=shown, may_be_empty=may_be_empty)
    try:
        read = reading.read(system=system, is_raw=is_raw)
    except RowFault as fault:
        in_column = (reading.column,) if fault.reason == "media" else ()
        reason, detail = fault.reason, fault.detail
        columns = plain_columns(columns)[0]
        return ReadRow(columns=columns, reason=reason, detail=detail, media=in_column, unread=tuple(unread))
    columns = columns if images is None else plain_columns(columns)[0]
    if not is_encodable(columns) or not is_encodable([read.text, *read.messages]):
        # The messages may hold what the columns no longer do.
        return ReadRow(columns=columns, reason="surrogate", unread=tuple(unread))
    return replace(read, unread=tuple(unread)) if unread else read


class _Reading:
    """One row while it is read."""

    def __init__(
        self,
        columns: dict[str, Any],
        names: Mapping[str, str],
        tools: Sequence[Message] = (),
        *,
        images: ImageRules | None = None,
        shown: Mapping[str, Any] | None = None,
        may_be_empty: bool = False,
    ) -> None:
        self._columns = columns
        self._rules, self._shown = images, shown or {}
        self._marks = None if images is None else Marks(MARK, WRITTEN)
        self._images: tuple[ImageSource, ...] = ()
        self._tools, self._may_be_empty = tools, may_be_empty
        self._names = names
        self._used: set[str] = set()
        self._read_as: list[str] = []
        self.column = ""

    def read(self, *, system: str | None, is_raw: bool) -> ReadRow:
        """Its prompt, and what is left for the rewards."""
        has_images = any(map(_holds, self._shown.values()))
        name = next((n for n in PROMPT_COLUMNS if not _is_empty(self._value(n))), None)
        if name is None:
            raise RowFault("no_prompt")
        self.column = self._names[name]
        self._use(name)
        value = self._value(name)
        history = self._history()
        turns = written_messages(value) if isinstance(value, str) else None
        if turns is not None:
            column = _in_words([self.column])
            self._say(tr("prompts: {column}, a text that is a list of messages", column=column))
            value = turns
        if isinstance(value, str) and name in _LISTS:
            raise RowFault("wrong_type")
        if isinstance(value, str) and WRITTEN in value:
            if self._marks is None:
                raise RowFault("media")
            has_images = True
        if isinstance(value, str) and name == "prompt" and is_raw and not history and not has_images:
            self._others()
            return self._done(text=value)
        if isinstance(value, str):
            content = self._with_input(name, value)
            content = content if self._marks is None else self._marks.in_text(content)
            if history or name in ("instruction", "input") or self.column != name:
                self._say(tr("prompts: {columns}", columns=self._used_in_words()))
            messages = [*history, {"role": "user", "content": content}]
        else:
            messages = messages_of(value, self._marks)
            if name.startswith("conversation") or self.column != name:
                self._say(tr("prompts: {columns}", columns=_in_words([self.column])))
        self._others()
        # A `prompt` of messages, as TRL has it, holds no answer: it may hold the beginning of one.
        begun = self._begun(messages) if name == "prompt" and not isinstance(value, str) else None
        return self._conversation(messages, system, begun)

    def _begun(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The assistant's last message, taken off the messages, where the completion continues it."""
        if not messages or messages[-1]["role"] != "assistant":
            return None
        if messages[-1].get("tool_calls"):
            raise RowFault("not_continued", tr("a call of a tool"))
        last = messages.pop()
        if not last["content"].strip():
            return None
        self._say(tr("prompts: each ends with the beginning of an answer, which completions continue"))
        return last

    def _conversation(
        self, messages: list[dict[str, Any]], system: str | None, begun: dict[str, Any] | None
    ) -> ReadRow:
        """A prompt that goes through the template; `begun` is the beginning of its answer."""
        if self._marks is None and any(WRITTEN in (m["content"] or "") for m in messages):
            raise RowFault("media")
        # Data of other tools ends with the gold assistant turn; the policy writes that turn itself.
        answer = None
        while begun is None and messages and messages[-1]["role"] == "assistant":
            answer = messages.pop()["content"].replace(MARK, WRITTEN)
        if self._rules is not None and self._marks is not None:
            column = [one for value in self._shown.values() for one in read_images(value, self._rules)]
            given = messages if begun is None else [*messages, begun]
            self._images = in_messages(given, self._marks.named, column, self._rules)
        asked = [m for m in messages if m["role"] not in ("system", "developer")]
        if not asked and (answer is not None or begun is not None):
            raise RowFault("only_answers")
        if not asked or not (self._may_be_empty or (asked[-1]["content"] or "").strip()):
            raise RowFault("no_prompt")
        own = self._system()
        if messages[0]["role"] not in ("system", "developer"):
            content = own if own is not None else system
            if own is not None:
                self._use(*(n for n in _SYSTEM if self._value(n) == own))
            if content:
                messages.insert(0, {"role": "system", "content": content})
        elif own is not None and own != messages[0]["content"]:
            self._say(tr("the system message of the messages is used, not that of the column system"))
        elif system and own is None and system != messages[0]["content"]:
            self._say(tr("the system message of the messages is used, not --system"))
        if begun is not None:
            messages.append(begun)
        return self._done(messages=tuple(messages), answer=answer, continues=begun is not None)

    def _done(
        self,
        *,
        text: str | None = None,
        messages: tuple[Message, ...] = (),
        answer: str | None = None,
        continues: bool = False,
    ) -> ReadRow:
        tools = () if text is not None or self._value("tools") == [] else tuple(self._tools)
        if text is None and not _is_empty(tools_value := self._value("tools")):
            tools = chosen_tools(tools_value, tools) if tools else tuple(tools_of(tools_value))
        kwargs = self._value("chat_template_kwargs") if text is None else None
        columns = {n: v for n, v in self._columns.items() if n not in self._used}
        if self._rules is not None:
            columns |= {n: v for n, v in self._shown.items() if names_files(v)}
            columns = plain_columns(columns)[0]
        columns.update(self._golds(answer))
        return ReadRow(
            columns=columns,
            text=text,
            messages=messages,
            continues=continues,
            tools=tools,
            template_kwargs=kwargs if isinstance(kwargs, Mapping) else None,
            read_as=tuple(self._read_as),
            unused=() if text is None else self._of_templates(),
            images=self._images,
        )

    def _golds(self, answer: str | None) -> dict[str, Any]:
        """The gold where covey looks for it, if the row has it elsewhere."""
        named = next((n for n in GOLD_COLUMNS if n in self._names), None)
        if named is not None:
            if self._names[named] == named:
                return {}
            self._say(tr("gold answers: {where}", where=_in_words([self._names[named]])))
            return {named: self._value(named)}
        if isinstance(self._value("label"), bool):  # a verdict on the answer, which may be a wrong one
            return {}
        where, value = self._response() or (tr("the last turn of the assistant"), _behind_thoughts(answer))
        if value is None or value == "":
            return {}
        self._say(tr("gold answers: {where}", where=where))
        return {"solution": value}

    def _response(self) -> tuple[str, Any] | None:
        model = self._value("reward_model")
        model = parsed(model) if isinstance(model, str) else model
        if isinstance(model, Mapping) and model.get("ground_truth") is not None:
            where = tr("ground_truth in the column {column}", column=self._names["reward_model"])
            return where, model["ground_truth"]
        there = [n for n in RESPONSES if not _is_empty(self._value(n))]
        if len(there) != 1:
            return None
        value = self._value(there[0])
        if isinstance(value, list) and len(value) == 1:
            value = value[0].get("content") if isinstance(value[0], Mapping) else value[0]
        if not _may_be_gold(value):
            return None
        return _in_words([self._names[there[0]]]), _behind_thoughts(value)

    def _history(self) -> list[dict[str, Any]]:
        """The turns before a prompt that is one text."""
        value = self._value("history")
        if _is_empty(value) or not isinstance(self._columns[self.column], str):
            return []
        self._use("history")
        value = parsed(value) if isinstance(value, str) else value
        if not isinstance(value, list):
            raise RowFault("history")
        if value and all(isinstance(turn, Mapping) for turn in value):
            return messages_of(value, self._marks)
        messages = []
        for pair in value:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise RowFault("history")
            turns = zip(("user", "assistant"), pair, strict=True)
            messages += [{"role": role, "content": said} for role, said in turns if said is not None]
        return messages_of(messages, self._marks)

    def _with_input(self, name: str, value: str) -> str:
        """An instruction with its input on the line below, as Alpaca's are."""
        input_text = self._value("input")
        if name != "instruction" or not isinstance(input_text, str) or not input_text.strip():
            return value
        self._use("input")
        return f"{value}\n{input_text}"

    def _system(self) -> str | None:
        values = (self._value(name) for name in _SYSTEM)
        return next((v for v in values if isinstance(v, str) and v.strip()), None)

    def _others(self) -> None:
        """Note a further column that looks like a prompt and is not used."""
        there = (n for n in (*PROMPT_COLUMNS, "history") if not _is_empty(self._value(n)))
        others = [self._names[n] for n in there if self._names[n] not in self._used]
        if others:
            used = self._used_in_words()
            self._say(
                tr("prompts: {used}; not used for them: {others}", used=used, others=joined(", ", others))
            )

    def _of_templates(self) -> tuple[str, ...]:
        """The columns that only a template could write."""
        there = (n for n in (*_SYSTEM, "tools", "chat_template_kwargs") if not _is_empty(self._value(n)))
        return tuple(self._names[n] for n in there)

    def _used_in_words(self) -> str:
        return _in_words([column for column in self._columns if column in self._used])

    def _value(self, name: str) -> Any:
        return self._columns.get(self._names[name]) if name in self._names else None

    def _use(self, *names: str) -> None:
        self._used.update(self._names[n] for n in names)

    def _say(self, words: str) -> None:
        self._read_as.append(words)


def _in_words(columns: Sequence[str]) -> str:
    names = joined(tr(" and "), columns)
    return plural(len(columns), "the column {columns}", "the columns {columns}", columns=names)


def _may_be_gold(value: Any) -> bool:
    """Whether a value is a text, a number, a list of such, or an object that says where its answer is."""
    if isinstance(value, list):
        return all(isinstance(v, str | int | float | list) and not isinstance(v, bool) for v in value)
    if isinstance(value, Mapping):
        return any(str(key).casefold() in (*GOLD_KEYS, "aliases", "answer_start") for key in value)
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def _behind_thoughts(answer: Any) -> Any:
    """An answer without the thoughts in front of it."""
    return answer.rpartition("</think>")[2].strip() if isinstance(answer, str) else answer


def _holds(value: Any) -> bool:
    """Return whether a column of images holds any; an array of pixels has no truth value of its own."""
    return bool(len(value) if hasattr(value, "__len__") else value)
