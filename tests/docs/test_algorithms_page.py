"""docs/algorithms.md and the options say the same: every option, value and default is on the page."""

from __future__ import annotations

import re
from pathlib import Path

from covey.config.filters import FILTERS
from covey.config.reference import markdown
from covey.config.values import kind_of
from covey.options.schema import FACTS, OPTIONS, group_of
from covey.training.objective import SCHEDULED_OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
NAMES = [name for name in OPTIONS if group_of(name) == "algorithm"]
NAMES += [
    f"{option}_{part}"
    for option in SCHEDULED_OPTIONS
    for part in ("end", "schedule")
    if option == "temperature"
]
NAMES += FILTERS


def sections() -> dict[str, dict[str, list[str]]]:
    """Of each section its rows by what stands in the first cell."""
    found: dict[str, dict[str, list[str]]] = {}
    rows: dict[str, list[str]] = {}
    for line in PAGE.splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line.removeprefix("## "), {})
        elif match := re.match(r"\| `(\w+)` \|", line):
            assert match[1] not in rows, f"{match[1]} stands twice"
            rows[match[1]] = [cell.strip() for cell in line.split("|")[2:-1]]
    return found


def section_of(name: str) -> dict[str, list[str]]:
    (rows,) = [rows for rows in sections().values() if name in rows]
    return rows


def defaults_here() -> dict[str, str]:
    """The default column of docs/options.md."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", markdown(), re.MULTILINE)
    return dict(reversed(rows))  # options come before the words for their values


def test_every_option_stands_once_with_its_defaults() -> None:
    here = defaults_here()
    for name in NAMES:
        expected = [here[name], FACTS[name].trl, FACTS[name].swift]
        assert section_of(name)[name][:3] == expected, name


def test_every_value_stands_in_the_section_of_its_option() -> None:
    checked = 0
    for name in NAMES:
        kind = kind_of(name)
        for choice in kind.choices:
            assert choice in section_of(name), (name, choice)
            checked += 1
    assert checked > 35


def test_every_row_is_an_option_or_a_value() -> None:
    values = {choice for name in NAMES for choice in kind_of(name).choices}
    for title, rows in sections().items():
        assert set(rows) <= {*NAMES, *values}, title


def test_every_value_has_a_source_and_a_use() -> None:
    for title, rows in sections().items():
        for name, cells in rows.items():
            if name not in NAMES:
                assert all(cells), (title, name)
