"""The text files of a model directory: tokenizer, chat templates and generation_config.json.

With these, another program makes the same prompts as the run and ends completions at the same tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

from covey.texts import tr

GENERATION = "generation_config.json"
_SETTINGS = "tokenizer_config.json"
_TEMPLATE, _OLD_TEMPLATE, _NAMED_TEMPLATES = (
    *("chat_template.jinja", "chat_template.json"),
    "additional_chat_templates",
)
_TOKENIZER = (
    *("tokenizer.json", _SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_MEDIA = ("image", "video", "audio", "boi")
# What transformers makes of a config.json where there is no generation_config.json.
_OF_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The text files of `origin`, with the changes that a run's options make to them.

    `template` is a chat template that was typed; it replaces all templates of `origin`. `stop_token_ids` are
    the tokens that end completions, the template's own first; if it is empty, those of `origin` stay.
    """

    origin: Path
    template: str | None = None
    stop_token_ids: tuple[int, ...] = ()

    def write(self, directory: Path) -> None:
        """Write the files into a directory."""
        copy_text_files(self.origin, directory)
        if self.template is not None:
            _remove_templates(directory)
            (directory / _TEMPLATE).write_text(self.template, encoding="utf-8")
        if self.stop_token_ids:
            write_stops(directory, self.stop_token_ids, read_json(self.origin / "config.json"))


def write_stops(directory: Path, stop_token_ids: Sequence[int], config: Mapping[str, Any]) -> None:
    """Write these end tokens, in this order, into generation_config.json of a directory. Its other fields
    stay; if there is no such file, they are taken from `config`, the content of a config.json."""
    path = directory / GENERATION
    said = read_json(path) or {name: config[name] for name in _OF_CONFIG if config.get(name) is not None}
    now = list(stop_token_ids) if len(stop_token_ids) > 1 else stop_token_ids[0]
    if not isfile(path) or _as_list(said.get("eos_token_id")) != list(stop_token_ids):
        path.write_text(json.dumps({**said, "eos_token_id": now}, indent=2, sort_keys=True) + "\n", "utf-8")


def stops_of(directory: Path) -> list[int]:
    """The end tokens that generation_config.json of a directory lists, or config.json where there is none, in
    their order."""
    said = read_json(directory / GENERATION) or read_json(directory / "config.json")
    return _as_list(said.get("eos_token_id"))


def banned_ids(value: Any, vocab: int | None, placeholders: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the tokens, ascending, that `suppress_tokens` of a generation_config.json bans from completions,
    and `placeholders`.

    Ids outside of the vocabulary ban nothing, as in transformers. Raises ValueError for anything but a list
    of ids.
    """
    ids = _as_list(value)
    if any(type(i) is not int for i in ids):
        raise ValueError(tr("suppress_tokens is no list of token ids: {value!r:.80}", value=value))
    return tuple(sorted({i for i in (*ids, *placeholders) if i >= 0 and (vocab is None or i < vocab)}))


def placeholder_ids(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that stand for images, video and audio or begin an image, as a config.json names
    them: a model that wrote one would ask for an image that nobody has."""
    named = [config.get(f"{kind}_token_{end}") for kind in _MEDIA for end in ("id", "index")]
    return [value for value in named if type(value) is int]


def copy_text_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, chat templates, generation_config.json and the files that describe how images are
    prepared, as far as `source` has them."""
    copy_tokenizer(source, target)
    copy_processors(source, target)
    _copy(source / GENERATION, target / GENERATION)


def copy_processors(source: Path, target: Path) -> None:
    """Copy the files that describe how images are prepared, as far as `source` has them."""
    for name in _PROCESSORS:
        _copy(source / name, target / name)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and the chat templates. Templates of `source` replace all of `target`; if
    `source` has none, those of `target` stay."""
    held = own_template(target) if own_template(source) is None else None
    if held is None:
        _remove_templates(target)
    for name in (*_TOKENIZER, _TEMPLATE, _OLD_TEMPLATE):
        _copy(source / name, target / name)
    for path in sorted((source / _NAMED_TEMPLATES).glob("*.jinja")):
        (target / _NAMED_TEMPLATES).mkdir(exist_ok=True)
        _copy(path, target / _NAMED_TEMPLATES / path.name)
    if held is not None:
        (target / _TEMPLATE).write_text(held, encoding="utf-8")


def own_template(directory: Path) -> str | None:
    """The chat template of a directory, or None. If there are several, it is the one named default."""
    file = directory / _TEMPLATE
    if isfile(file):
        return file.read_text(encoding="utf-8")
    template = read_json(directory / _SETTINGS).get("chat_template")
    if template is None:
        template = read_json(directory / _OLD_TEMPLATE).get("chat_template")
    if isinstance(template, list):
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _remove_templates(directory: Path) -> None:
    for name in (_TEMPLATE, _OLD_TEMPLATE):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / _NAMED_TEMPLATES, ignore_errors=True)
    settings = read_json(directory / _SETTINGS)
    if settings.pop("chat_template", None) is not None:
        text = json.dumps(settings, indent=2) + "\n"
        (directory / _SETTINGS).write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file, or no object in it."""
    if not isfile(path):
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _copy(source: Path, target: Path) -> None:
    if isfile(source):
        target.write_bytes(source.read_bytes())


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]
