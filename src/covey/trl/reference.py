"""docs/trl-fields.md: each field of TRL's GRPOConfig, its default there, and what it does here.

`python -m covey.trl.reference` writes it to standard output.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields
from typing import Any

from covey.config.foreign import instead_of
from covey.config.names import look_up
from covey.config.reference import cell
from covey.texts import joined
from covey.trl.fields import OTHER_DEFAULTS, Fields

_HEAD = """\
# The fields of GRPOConfig

`covey.trl.GRPOConfig` has every field of TRL 1.16's, those of transformers' TrainingArguments among them.
Made from the code by `python -m covey.trl.reference > docs/trl-fields.md`.

- **taken**: the field does what it does in TRL. If covey's option has another name, the last column has it.
- **other default**: the same; where nobody sets it, covey does what the last column says.
- **no effect**: its value changes no result, for the reason that is given.
- **one value**: the values that are listed say what covey does anyway; others are refused (E102).
- **refused**: a value is refused (E102), with what to type instead where there is something.
"""


def markdown() -> str:
    """Return docs/trl-fields.md."""
    rows = [_row(one) for one in fields(Fields)]
    return (
        "\n".join([_HEAD, "| field | TRL's default | here | what it is here |", "|---|---|---|---|", *rows])
        + "\n"
    )


def _row(one: Field[Any]) -> str:
    default = OTHER_DEFAULTS[one.name][0] if one.name in OTHER_DEFAULTS else _shown(one)
    here, words = _answer(one.name)
    return f"| `{one.name}` | {default} | {here} | {cell(words)} |"


def _answer(name: str) -> tuple[str, str]:
    """Return what covey does with a field, and why."""
    known = look_up(name)
    if known.option is not None:
        renamed = "" if known.option == name else f"`{known.option}`"
        if name not in OTHER_DEFAULTS:
            return "taken", renamed
        return "other default", joined(" ", [word for word in (renamed, OTHER_DEFAULTS[name][1]) if word])
    if known.moot is not None and known.moot.means:
        options = dict.fromkeys(option for option, _ in known.moot.means.values())
        return "taken", joined(", ", [f"`{option}`" for option in options])
    if known.moot is None:
        return "refused", _with_instead(known.refused or "", name)
    if not known.moot.values:
        return "no effect", known.moot.words
    values = joined(", ", [f"`{value}`" for value in known.moot.values])
    return "one value", f"{values}. {_with_instead(known.moot.words, name)}"


def _with_instead(words: str, name: str) -> str:
    instead = instead_of(name)
    return f"{words} Instead: {instead}." if instead else words


def _shown(one: Field[Any]) -> str:
    value = one.default if one.default is not MISSING else None
    if value is None or value == "":
        return "not set"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


if __name__ == "__main__":
    sys.stdout.write(markdown())
