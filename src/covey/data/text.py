"""Text to tokens and back, read from a model's directory without importing torch.

`tokenizer.json` is read by `tokenizers`, the chat template by Jinja in its sandbox: what AutoTokenizer does,
without the seconds that importing it costs a command that only checks its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from covey.errors import CoveyError


class TemplateError(CoveyError, ValueError):
    """A chat template that is missing, or that refused the messages it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """A model's tokenizer, chat template and end tokens."""

    tokenizer: Tokenizer
    chat_template: jinja2.Template | None
    special_tokens: Mapping[str, str]
    stop_token_ids: tuple[int, ...]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, opened for the assistant's turn."""
        if self.chat_template is None:
            raise TemplateError("the model has no chat template")
        try:
            return self.chat_template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of rendered prompts; nothing is added."""
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [tuple(e.ids) for e in encoded]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text in templates: here, just its
    body."""

    # Read by jinja from the class; never changed.
    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def load_codec(model_dir: Path) -> TextCodec:
    """Read tokenizer, template and end tokens of a model directory.

    Raises FileNotFoundError where there is no tokenizer.json. End tokens are those of generation_config.json,
    config.json and the tokenizer, together.
    """
    settings = _read_json(model_dir / "tokenizer_config.json")
    template_file = model_dir / "chat_template.jinja"
    template = (
        template_file.read_text(encoding="utf-8")
        if template_file.is_file()
        else settings.get("chat_template")
    )
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(path)
    tokenizer = Tokenizer.from_file(str(path))
    # A file may carry the padding and truncation of its last use.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token") and value is not None and not isinstance(value, bool)
    }
    stop = _ids(_read_json(model_dir / "generation_config.json").get("eos_token_id"))
    stop |= _ids(_read_json(model_dir / "config.json").get("eos_token_id"))
    if "eos_token" in special:
        stop |= _ids(tokenizer.token_to_id(special["eos_token"]))
    return TextCodec(
        tokenizer=tokenizer,
        chat_template=None if template is None else _compiled(template),
        special_tokens=special,
        stop_token_ids=tuple(sorted(stop)),
    )


def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the model's chat template is broken: {error}") from error


def model_problem(directory: Path) -> str | None:
    """Why a directory is no model that can be loaded, or None; reads no weights and no torch."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    if not (directory / "config.json").is_file():
        return f"{directory} has no config.json"
    if not (directory / "tokenizer.json").is_file():
        return f"{directory} has no tokenizer.json"
    if not any(directory.glob("*.safetensors")):
        return f"{directory} has no .safetensors file, the only format of weights that is read"
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{directory}/config.json is no JSON: {error}"
    return None


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {int(value)}


def model_context(directory: Path) -> int | None:
    """Positions of the model, from its config.json; None where it does not say."""
    config = _read_json(directory / "config.json")
    config = config.get("text_config", config)
    value = config.get("max_position_embeddings", config.get("n_positions"))
    return value if isinstance(value, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
