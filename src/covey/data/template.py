"""Chat templates: Jinja in its sandbox, with the filters and tags that templates in the wild use."""

from __future__ import annotations

import json
from datetime import datetime
from os.path import expanduser
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from covey.data.errors import TemplateError
from covey.texts import tr

# What `--chat_template chatml` stands for.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text in templates: here, just its
    body."""

    # Read by jinja from the class; never changed.
    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def typed_template(value: str, *, begins: str = "") -> str:
    """The template that `--chat_template` names: `chatml`, or the text of a file.

    `begins` is what the tokenizer puts in front of a plain text; no template is given it, so chatml writes
    it.
    """
    if value == "chatml":
        return (f"{{{{ {json.dumps(begins)} }}}}" if begins else "") + CHATML
    path = Path(expanduser(value))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            tr(
                "chat_template must be chatml or a file with a Jinja template, but {value} cannot be "
                "read: {error}",
                value=value,
                error=error,
            ),
            kind="unreadable_template",
            names_option=True,
        ) from error


def compiled(template: str, whose: str) -> jinja2.Template:
    """A template ready to render; `whose` names it in the error of one that does not parse."""
    try:
        return _environment().from_string(template)
    except MemoryError:
        raise
    except Exception as error:  # Python compiles what Jinja has made of it, and raises anything
        words = tr("{whose} cannot be used: {error}", whose=whose, error=in_words(error))
        raise TemplateError(words, kind="broken_template") from error


def in_words(error: Exception) -> str:
    """The error of a template in words: its own message, or the kind of the error with it."""
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    return value


def _environment() -> jinja2.Environment:
    # Nothing is computed while a template is compiled, where jinja would hide what that takes: it is not
    # optimized, and a `finalize` that is given the context keeps constants from being written out early.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
        optimized=False,
        finalize=_as_it_is,
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
