"""Text to tokens and back, read from a model's directory without importing torch.

`tokenizer.json` is read by `tokenizers`, the chat template by Jinja in its sandbox: this does what
AutoTokenizer does, without the seconds that importing it would add to a command that only checks its
arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate
from os.path import isfile
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from covey.data.errors import ModelError, one_line
from covey.data.errors import TemplateError as TemplateError
from covey.data.model_files import model_context as model_context
from covey.data.model_files import model_problem as model_problem
from covey.data.model_files import read_json, vocabulary_of
from covey.data.plain import is_encodable
from covey.data.template import compiled, in_words, typed_template
from covey.data.template_trial import TemplateTrial
from covey.data.vision import AS_THEY_ARE, ImageOptions, VisionSpec, vision_spec
from covey.text_files import GENERATION, banned_ids, own_template, placeholder_ids
from covey.texts import tr

# What a template is given on every rendering, which chat_template_kwargs may not replace.
_OWN_ARGUMENTS = ("messages", "add_generation_prompt")
# Stands for the assistant's text where a template is asked how it closes a turn.
CLOSED = "covey asks how a turn ends"
# What looks like an end token, as `<|im_end|>` or `</s>`, and may be none.
_MARK = re.compile(r"<[^\s<>]{1,40}>")
# So many tokens on both sides of a place show whether a space stands there.
_NEAR = 4
# Of tokenizer_config.json: image_token, boi_token (begin of image) and such.
_MEDIA_TOKEN = re.compile(r"image|audio|video|vision|^[be]o[iav]_")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """A model's tokenizer, chat template and end tokens.

    `stop_token_ids` begin with the template's own; `stop_sources` says who asked for each.
    `banned_token_ids` are never sampled: those that generation_config.json bans, and placeholders of images.
    `prefix_ids` is what the tokenizer puts in front of a text of its own accord; `template_kwargs` reaches
    the template on every rendering. `unstoppable` is the mark that the template ends an assistant's turn with
    where no single token stands for it, or "". `template_text` is what `chat_template` was made of; `trial`
    tries what it is to be rendered with. `vision` says how prompts hold images, None for a model that sees
    none.
    """

    tokenizer: Tokenizer
    chat_template: jinja2.Template | None
    special_tokens: Mapping[str, str]
    stop_token_ids: tuple[int, ...]
    stop_sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    banned_token_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unstoppable: str = ""
    template_text: str | None = None
    trial: TemplateTrial | None = None
    vision: VisionSpec | None = None

    def identity(self) -> str:
        """A digest of all that makes prompts of messages: tokenizer, template, and what the template is
        given."""
        told = [self.template_text, dict(self.special_tokens), self.prefix_ids, dict(self.template_kwargs)]
        # Templates write the day, if anything of the time.
        told += [date.today().isoformat()] if "strftime_now" in (self.template_text or "") else []
        text = json.dumps([self.tokenizer.to_str(), told], default=repr)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, opened for the assistant's turn unless told otherwise.

        `tools` and `kwargs` are those of this conversation, beside what every rendering is given.
        """
        if self.chat_template is None:
            raise TemplateError(
                tr(
                    "the model has no chat template: give one with --chat_template FILE or "
                    "--chat_template chatml"
                ),
                names_option=True,
            )
        arguments = {
            **given_to_all(self.special_tokens, self.template_kwargs),
            **self._of_conversation(tools, kwargs or {}),
            "messages": [dict(m) for m in (self.vision.given(messages) if self.vision else messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        if self.trial is not None:
            self.trial.ask(arguments)
        try:
            text = self.chat_template.render(**arguments)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            words = tr("the chat template does not accept the messages: {error}", error=in_words(error))
            raise TemplateError(words, kind="refusing_template") from error
        except Exception as error:  # a template is a program, which fails in any way
            words = tr("the chat template fails: {error}", error=in_words(error))
            raise TemplateError(words, kind="broken_template") from error
        if not is_encodable(text):
            raise TemplateError(
                tr("the chat template writes half of a surrogate pair, which no tokenizer can read")
            )
        return text if self.vision is None else self.vision.framed(text)

    def _of_conversation(
        self, tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = {**kwargs, **({"tools": [dict(tool) for tool in tools]} if tools else {})}
        for name, value in own.items():
            if name in _OWN_ARGUMENTS:
                raise TemplateError(
                    tr(
                        "chat_template_kwargs sets {name!r}, but covey passes this value to the template "
                        "itself",
                        name=name,
                    ),
                    names_option=True,
                )
            if self.template_kwargs.get(name, value) != value:
                raise TemplateError(
                    tr("the row and the command give the template different values for {name!r}", name=name)
                )
        return own

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[tuple[int, ...]]:
        """Token ids of texts; nothing is added to rendered prompts.

        With `add_special_tokens` the tokenizer's own (a BOS token) come first, but not before a text that
        writes them out itself. What the tokenizer would add at the end is left out: a prompt goes on.
        """
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [tuple(e.ids) for e in encoded]
        if not (add_special_tokens and self.prefix_ids):
            return ids
        size = len(self.prefix_ids)
        return [i if i[:size] == self.prefix_ids else self.prefix_ids + i for i in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_behind(self, before: Sequence[int], token_ids: Sequence[int], *, marks: bool = False) -> str:
        """Text of token ids that follow others, with the space that some tokenizers write in front of a word
        unless it begins the text; with `marks` special tokens are written out."""
        text = self.written_out(token_ids) if marks else self.decode(token_ids)
        last, first = before[-_NEAR:], token_ids[:_NEAR]
        is_parted = last and self.decode([*last, *first]) == f"{self.decode(last)} {self.decode(first)}"
        return f" {text}" if is_parted else text

    def tokens_until(self, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> tuple[int, ...]:
        """How many of the tokens it takes to have written the text up to each of these characters, which
        rise; `text` is what `decode` or `decode_behind` makes of them. A character is written by the token
        with its last byte.
        """
        if text.startswith(" ") and self.decode(token_ids) == text[1:]:
            text, ends = text[1:], [end - 1 for end in ends]
        written = self._written(token_ids, text)
        if written is not None:
            return tuple(min(bisect_left(written, end) + 1, len(token_ids)) for end in ends)
        return tuple(self._fewest(token_ids, text[:end]) for end in ends)

    def _fewest(self, token_ids: Sequence[int], head: str) -> int:
        """The fewest tokens whose text begins with `head`, by decoding them from the first one on."""

        def has_written(number: int) -> bool:
            return self.decode(token_ids[:number]).startswith(head)

        return bisect_left(range(1, len(token_ids)), True, key=has_written) + 1

    def _written(self, token_ids: Sequence[int], text: str) -> list[int] | None:
        """The characters that the tokens up to each have written; None where that is known of all of them
        together alone, as of bytes that are no text."""
        stream = DecodeStream(skip_special_tokens=True)
        parts: list[str] = []
        for token_id in token_ids:
            # The library raises Exception itself.
            try:
                parts.append(stream.step(self.tokenizer, token_id) or "")
            except Exception:  # noqa: BLE001
                return None
        return list(accumulate(len(p) for p in parts)) if text.startswith("".join(parts)) else None

    def tokens_beyond(self, rows: int | None) -> tuple[tuple[str, int], ...]:
        """Tokens, with their ids, that an embedding of so many rows has none for; those of images and sound,
        which no text has, aside."""
        if rows is None:
            return ()
        media = {token for name, token in self.special_tokens.items() if _MEDIA_TOKEN.search(name)}
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        beyond = [(i, token) for token, i in ids.items() if i >= rows and token not in media]
        return tuple((token, i) for i, token in sorted(beyond))

    def num_unknown(self, token_ids: Sequence[int]) -> int:
        """How many of these ids are no token of the tokenizer, as the padding of a vocabulary; they decode to
        no text."""
        counts = Counter(token_ids)
        return sum(number for i, number in counts.items() if self.tokenizer.id_to_token(i) is None)

    def written_out(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))


def load_codec(
    model_dir: Path,
    *,
    chat_template: str | None = None,
    enable_thinking: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    adapter: Path | None = None,
    images: ImageOptions = AS_THEY_ARE,
) -> TextCodec:
    """Read tokenizer, template and end tokens of a model directory.

    `chat_template` is `chatml`, `chatml-tools` or a file and replaces the model's own; so does the template
    of an `adapter`, with which it was trained, and its generation_config.json. End tokens are those of
    generation_config.json, config.json and the tokenizer, and the one that the template puts after an
    assistant's turn. Raises FileNotFoundError where there is no tokenizer.json, ModelError where it is
    broken, TemplateError where the template is.
    """
    settings = read_json(model_dir / "tokenizer_config.json")
    tokenizer = read_tokenizer(model_dir)
    prefix_ids = _prefix_ids(tokenizer)
    begins = "".join(tokenizer.id_to_token(i) or "" for i in prefix_ids)
    template, whose = _template(model_dir, adapter, chat_template, begins)
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and value is not None and not isinstance(value, bool)
    }
    kwargs = _template_kwargs(enable_thinking, chat_template_kwargs)
    trial = None if template is None else TemplateTrial(template, whose, given_to_all(special, kwargs))
    codec = TextCodec(
        tokenizer=tokenizer,
        chat_template=None if template is None else compiled(template, whose),
        template_text=template,
        special_tokens=special,
        stop_token_ids=(),
        prefix_ids=prefix_ids,
        template_kwargs=kwargs,
        trial=trial,
        vision=vision_spec(model_dir, tokenizer, images),
    )
    codec = codec if trial is None else _tried(codec, trial)
    closing, unstoppable = _closing(codec)
    asked = {
        "template": closing,
        "generation_config": _ids(_generation(model_dir, adapter).get("eos_token_id")),
        "config": _ids(read_json(model_dir / "config.json").get("eos_token_id")),
        "tokenizer": _ids(tokenizer.token_to_id(special.get("eos_token", ""))),
    }
    sources = {i: tuple(w for w, named in asked.items() if i in named) for ids in asked.values() for i in ids}
    banned = _banned(model_dir)
    return replace(
        codec,
        stop_token_ids=tuple(i for i in sources if i not in banned),
        stop_sources=sources,
        banned_token_ids=banned,
        unstoppable=unstoppable,
    )


def _tried(codec: TextCodec, trial: TemplateTrial) -> TextCodec:
    """Return the codec once its template has been tried, with messages in the form that this takes."""
    if codec.vision is None:
        trial.start()
        return codec
    return replace(codec, vision=codec.vision.tried(trial, codec.render))


def _banned(model_dir: Path) -> tuple[int, ...]:
    try:
        said = read_json(model_dir / GENERATION).get("suppress_tokens")
        own = placeholder_ids(read_json(model_dir / "config.json"))
        return banned_ids(said, vocabulary_of(model_dir), own)
    except ValueError as error:
        raise ModelError(f"{model_dir / GENERATION}: {error}") from error


def _template(
    model_dir: Path, adapter: Path | None, typed: str | None, begins: str
) -> tuple[str | None, str]:
    """The template, and whose it is in words; ours begin with the text `begins`."""
    if typed is not None:
        made = typed_template(typed, begins=begins)
        return made, tr("the chat template {chat_template}", chat_template=typed)
    if adapter is not None and (template := own_template(adapter)) is not None:
        return template, tr("the chat template of the adapter {adapter}", adapter=adapter)
    return own_template(model_dir), tr("the model's chat template")


def _generation(model_dir: Path, adapter: Path | None) -> dict[str, Any]:
    """generation_config.json of an adapter that has one, else of the model."""
    said = {} if adapter is None else read_json(adapter / GENERATION)
    return said or read_json(model_dir / GENERATION)


def given_to_all(special_tokens: Mapping[str, str], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a template gets for every conversation."""
    return {"tools": None, "documents": None, **special_tokens, **kwargs}


def read_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model's directory; FileNotFoundError where there is none, ModelError where it is
    broken."""
    path = model_dir / "tokenizer.json"
    if not isfile(path):
        raise FileNotFoundError(path)
    # The library raises Exception itself.
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(
            tr("{path} is not a tokenizer: {one_line}", path=path, one_line=one_line(error))
        ) from error
    # A file may carry the padding and truncation of its last use.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _prefix_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer's post-processor puts before a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    starts = [n for n in range(len(whole)) if whole[n : n + len(plain)] == plain]
    return tuple(whole[: starts[0]]) if starts else ()


def _template_kwargs(
    enable_thinking: bool | None, chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    kwargs = dict(chat_template_kwargs or {})
    for name in _OWN_ARGUMENTS:
        if name in kwargs:
            raise TemplateError(
                tr(
                    "chat_template_kwargs sets {name!r}, but covey passes this value to the template itself",
                    name=name,
                ),
                names_option=True,
            )
    if enable_thinking is None:
        return kwargs
    if kwargs.get("enable_thinking", enable_thinking) != enable_thinking:
        raise TemplateError(
            tr(
                "enable_thinking is {enable_thinking}, but chat_template_kwargs sets another value",
                enable_thinking=enable_thinking,
            ),
            names_option=True,
        )
    return {**kwargs, "enable_thinking": enable_thinking}


def _closing(codec: TextCodec) -> tuple[list[int], str]:
    """The token that the template puts after an assistant's text, where it puts one; else the mark that it
    puts there and that is no token, or nothing."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": CLOSED}]
    try:
        text = codec.render(turns, add_generation_prompt=False)
    except TemplateError:
        return [], ""
    before, _, after = text.rpartition(CLOSED)
    if not before:
        return [], ""
    added = {token.content: i for i, token in codec.tokenizer.get_added_tokens_decoder().items()}
    closing = [c for c in added if c.strip() and after.lstrip().startswith(c)]
    if closing:
        return [added[max(closing, key=len)]], ""
    mark = _MARK.match(after.lstrip())
    known = None if mark is None else codec.tokenizer.token_to_id(mark[0])
    return ([known], "") if known is not None else ([], mark[0] if mark else "")


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [int(i) for i in values if value is not None]
