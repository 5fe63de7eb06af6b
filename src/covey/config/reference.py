"""docs/options.md: every option with its default beside those of TRL and ms-swift, and names that are none.

`python -m covey.config.reference` writes it to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from covey.config.dialect import MS_SWIFT
from covey.config.foreign import MOOT, REFUSED, REFUSED_PREFIXES, instead_of
from covey.config.names import ALIASES, SWITCHES
from covey.config.values import SPELLINGS, kind_of
from covey.options.declare import NONE
from covey.options.schema import FACTS, GROUPS, OPTIONS, REQUIRED, default_of, doc_of, group_of, rule_of

TAKEN: frozenset[str] = frozenset({*MS_SWIFT, "learning_rate", "kl_in_reward"})
"""Options whose default `covey rlhf` takes from ms-swift."""

_HEAD = """\
# Options

Every option of `covey train` and `covey rlhf`, with its default. Made from the code by
`python -m covey.config.reference > docs/options.md`; `covey train --help` says the same.

- A flag is `--NAME VALUE` or `--NAME=VALUE`. Dashes or underscores, upper or lower case are all the same.
- A list takes several words, `--reward_funcs accuracy format`, or one with commas,
  `--reward_funcs accuracy,format`. A flag given twice replaces.
- A word that begins with a dash and is no flag is a value, `--system "- be brief"`;
  one that looks like a flag stands behind an equals sign, `--NAME=VALUE`.
- A switch is `--NAME`, `--NAME true`, `--NAME false` or `--no_NAME`.
- An option that takes an object takes JSON: `--columns '{"final": "solution"}'`.
- A YAML file holds the same names, flat or under the names of the groups below. Flags override it.
- From Python the options are keyword arguments of `covey.train`.

The columns TRL and ms-swift have the defaults of TRL 1.16 and of ms-swift 4.6 with `--rlhf_type grpo`.
`covey train` has the first column; `covey rlhf` has ms-swift's where it is **bold**, and the first elsewhere.
"–" means that the tool has no such option.
"""


_LATER = ("Other names", "Other words for values", "Accepted without effect", "Refused")


def markdown() -> str:
    """Return docs/options.md."""
    headings = [*GROUPS.values(), *_LATER]
    lines = [_HEAD, *(f"- [{heading}](#{_anchor(heading)})" for heading in headings)]
    for group, heading in GROUPS.items():
        names = [name for name in OPTIONS if group_of(name) == group]
        lines += ["", f"## {heading}", "", f"In a YAML file: `{group}`.", ""]
        lines += ["| option | default | TRL | ms-swift | what it is |", "|---|---|---|---|---|"]
        lines += [_row(name) for name in names]
    lines += _aliases() + _spellings() + _moot() + _refused()
    return "\n".join(lines) + "\n"


def _anchor(heading: str) -> str:
    plain = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return plain.replace(" ", "-")


def _row(name: str) -> str:
    facts = FACTS[name]
    swift = f"**{facts.swift}**" if name in TAKEN else facts.swift
    return f"| `{name}` | {_default(name)} | {facts.trl} | {swift} | {cell(doc_of(name))}{_choices(name)} |"


def _choices(name: str) -> str:
    kind = kind_of(name)
    if not kind.choices or all(word in doc_of(name) for word in kind.choices):
        return ""
    return f" One of {', '.join(f'`{choice}`' for choice in kind.choices)}."


def _default(name: str) -> str:
    if name in REQUIRED:
        return "required"
    return cell(rule_of(name)) or _value(default_of(name))


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, str) and value.isspace():
        return f"`{value.encode('unicode_escape').decode()}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


def cell(text: str) -> str:
    """Return a text as it stands in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;").replace("*", "\\*")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _aliases() -> list[str]:
    by_option: dict[str, list[str]] = {}
    for alias, option in ALIASES.items():
        by_option.setdefault(option, []).append(alias)
    lines = ["", f"## {_LATER[0]}", "", "Names of TRL and ms-swift that mean one of the options above.", ""]
    lines += ["| type | for |", "|---|---|"]
    lines += [f"| {_quoted(aliases)} | `{option}` |" for option, aliases in by_option.items()]
    lines += [""]
    for name, (on, off) in SWITCHES.items():
        lines.append(
            f"`{name}` is a switch: true means `{ALIASES[name]} {on}`, false `{ALIASES[name]} {off}`."
        )
    return lines


def _spellings() -> list[str]:
    lines = ["", "## Other words for values", "", "| option | word | means |", "|---|---|---|"]
    for option, words in SPELLINGS.items():
        lines += [
            f"| `{option}` | `{word}` | {_value(value)} |"
            for word, value in words.items()
            if word != str(value)
        ]
    return lines


def _moot() -> list[str]:
    lines = ["", "## Accepted without effect", ""]
    lines += [
        "These names of TRL and ms-swift say what covey does anyway. They are accepted, and a note (W108)"
    ]
    lines += ["says so. Where values are listed, any other value is refused (E102).", ""]
    lines += ["| name | accepted values | what holds |", "|---|---|---|"]
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, moot in MOOT.items():
        groups.setdefault((moot.words, moot.values), []).append(name)
    for (words, values), names in groups.items():
        lines.append(f"| {_quoted(names)} | {_quoted(values) or 'any'} | {cell(words)} |")
    return lines


def _refused() -> list[str]:
    lines = ["", "## Refused", ""]
    lines += [
        "These names of TRL, of ms-swift and of earlier versions are refused (E102), because ignoring them "
        "would give another run.",
        "",
    ]
    lines += ["| name | why | type instead |", "|---|---|---|"]
    groups: dict[tuple[str, str], list[str]] = {}
    for name, words in REFUSED.items():
        groups.setdefault((words, instead_of(name)), []).append(name)
    for prefix, words in REFUSED_PREFIXES.items():
        groups.setdefault((words, instead_of(prefix)), []).append(f"{prefix}…")
    for (words, new), names in groups.items():
        lines.append(f"| {_quoted(names)} | {cell(words)} | {cell(new) or NONE} |")
    return [*lines, "", "Any other name is unknown (E101); an option with a name close to it is named."]


if __name__ == "__main__":
    sys.stdout.write(markdown())
