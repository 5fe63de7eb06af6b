"""The catalogue of covey's texts: `make translations` brings it up to date with the source and compiles it.

A text that is new comes into covey.po with an empty translation, and one that is gone leaves it. Exit code 1
where a text has no translation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from string import Formatter

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

import covey
from covey.codes import CODES
from covey.options.declare import facts_of, fields_of
from covey.options.schema import GROUPS, Config
from covey.options.verbs import (
    CommonOptions,
    DoctorOptions,
    ExportOptions,
    PlanOptions,
    RolloutOptions,
    SelftestOptions,
    VerifyOptions,
)
from covey.texts import forms

ROOT = Path(covey.__file__).parent
PO = ROOT / "texts" / "zh" / "LC_MESSAGES" / "covey.po"
_KEYWORDS = {"tr": None, "plural": (2, 3)}
VERBS = (
    *(CommonOptions, DoctorOptions, ExportOptions, PlanOptions, RolloutOptions, SelftestOptions),
    VerifyOptions,
)
_NOUNS = {"counted": (2,)}


def source_texts() -> Iterator[tuple[str | tuple[str, str], str]]:
    """Every text of the source with the file in which it stands; of a counted one both forms."""
    for path in sorted(ROOT.rglob("*.py")):
        where, file = str(path.relative_to(ROOT)), path.read_bytes()
        for _, text, _, _ in extract("python", BytesIO(file), keywords=_KEYWORDS):
            yield (text[0], text[1]) if isinstance(text, tuple) else text, where
        for _, noun, _, _ in extract("python", BytesIO(file), keywords=_NOUNS):
            yield forms(str(noun)), where
    for code in CODES.values():
        yield code.title, code.code
        yield code.why, code.code
    for heading in GROUPS.values():
        yield heading, "options"
    for declares in (Config, *VERBS):
        for name, field in fields_of(declares).items():
            facts = facts_of(declares)[name]
            why = "" if facts.bounds is None else facts.bounds.why
            yield from ((text, f"--{name}") for text in (field.description, facts.rule, why) if text)


def kept() -> Catalog:
    """The catalogue as it is in covey.po."""
    with PO.open("rb") as file:
        return read_po(file, locale="zh")


def current(before: Catalog) -> Catalog:
    """The catalogue of the source's texts, with the translations of a former one."""
    now = Catalog(locale="zh", project="covey", header_comment=_HEADER, charset="utf-8", fuzzy=False)
    now.creation_date = now.revision_date = before.creation_date
    for text, where in source_texts():
        one = text[0] if isinstance(text, tuple) else text
        former = before.get(one)
        string = former.string if former is not None and former.string else ""
        now.add(text, string, locations=[(where, 0)])
    return now


_HEADER = """\
# What covey says, in Chinese. `make translations` brings this file up to date and compiles it.
# {name} is a value: each one that the Chinese text has stands in the English one, with the same format."""


def po_bytes(catalog: Catalog) -> bytes:
    """A catalogue as covey.po has it."""
    out = BytesIO()
    write_po(out, catalog, width=110, include_lineno=False, sort_by_file=True, omit_header=False)
    return out.getvalue()


def mo_bytes(catalog: Catalog) -> bytes:
    """A catalogue as covey.mo has it."""
    out = BytesIO()
    write_mo(out, catalog)
    return out.getvalue()


def faults(catalog: Catalog) -> list[str]:
    """What is wrong with translations: none at all, or a value that the English text does not have."""
    found = []
    for message in catalog:
        if not message.id:
            continue
        for text in [message.string] if isinstance(message.string, str) else message.string:
            if not text:
                found.append(f"no translation: {message.id!r}")
            elif not _fields(text) <= _fields(_one(message)):
                found.append(
                    f"{sorted(_fields(text) - _fields(_one(message)))} are no values of {message.id!r}"
                )
    return found


def _one(message: Message) -> str:
    return message.id if isinstance(message.id, str) else message.id[0]


def _fields(text: str) -> set[str]:
    """The values of a template; a text with braces that are none has no values."""
    try:
        return {field for _, field, _, _ in Formatter().parse(text) if field and re.fullmatch(r"\w+", field)}
    except ValueError:
        return set()


def main() -> int:
    """Bring covey.po up to date, and compile it."""
    catalog = current(kept())
    PO.write_bytes(po_bytes(catalog))
    PO.with_suffix(".mo").write_bytes(mo_bytes(catalog))
    wrong = faults(catalog)
    sys.stdout.write("\n".join([*wrong, f"{len(catalog)} texts, {len(wrong)} faults", ""]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
