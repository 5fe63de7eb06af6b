"""Chat templates: Jinja in its sandbox, with the filters and tags that templates in the wild use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from os.path import expanduser
from pathlib import Path
from types import MappingProxyType
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

# What `--chat_template chatml-tools` stands for: chatml, with tools, calls and results as Hermes has them.
# What it wrote of a conversation stays the same when messages are added: what follows the results of tools,
# which stand in one turn of the user, closes that turn.
CHATML_TOOLS = r"""
{%- set rest = messages %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages and messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
        {%- set rest = messages[1:] %}
    {%- endif %}
    {{- '# Tools\n\nThese functions can be called; each line describes one as JSON:\n<tools>\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\n' }}
    {%- endfor %}
    {{- '</tools>\n\nTo call one, write its name and arguments as JSON between these marks:\n' }}
    {{- '<tool_call>\n{"name": "<name>", "arguments": {"<argument>": <value>}}\n</tool_call>\n' }}
    {{- 'Each call has marks of its own. Results come between <tool_response> and </tool_response>.' }}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set turn = namespace(has_results=false) %}
{%- for message in rest %}
    {%- if message['role'] == 'tool' %}
        {{- '' if turn.has_results else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}
    {%- else %}
        {{- '<|im_end|>\n' if turn.has_results else '' }}
        {{- '<|im_start|>' + message['role'] + '\n' + message['content'] }}
        {%- for call in message['tool_calls'] or () %}
            {%- set name, given = call.function.name, call.function.arguments %}
            {{- '' if loop.first and not message['content'] else '\n' }}
            {{- '<tool_call>\n{"name": ' + (name | tojson) + ', "arguments": ' }}
            {{- (given if given is string else given | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
    {%- set turn.has_results = message['role'] == 'tool' %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ('<|im_end|>\n' if turn.has_results else '') + '<|im_start|>assistant\n' }}
{%- endif %}
"""

# The values of --chat_template that are no files.
OWN_TEMPLATES: Mapping[str, str] = MappingProxyType({"chatml": CHATML, "chatml-tools": CHATML_TOOLS})


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
    """The template that `--chat_template` names: one of OWN_TEMPLATES, or the text of a file.

    `begins` is what the tokenizer puts in front of a plain text; no template is given it, so ours write it.
    """
    if value in OWN_TEMPLATES:
        return (f"{{{{ {json.dumps(begins)} }}}}" if begins else "") + OWN_TEMPLATES[value]
    path = Path(expanduser(value))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            tr(
                "chat_template must be chatml, chatml-tools or a file with a Jinja template, but {value} "
                "cannot be read: {error}",
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
