"""The tables of docs/doctor.md, which are made from the rules and the verdicts of the code: `python -m
support.doctor_page` writes them."""

from __future__ import annotations

import re
from pathlib import Path

import covey
from covey.codes import CODES
from covey.doctor.verdicts import BY_CODE, MEANINGS, NAMED
from covey.health.rule import Rule
from covey.health.rule_list import RULES

PAGE = Path(covey.__file__).parents[2] / "docs" / "doctor.md"


def rendered(page: str) -> str:
    """Return the page with the tables of the code in the place of those that stand there."""
    for name, table in (("verdicts", verdicts()), ("rules", rules())):
        page, found = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, t=table: m[1] + t + m[2],
            page,
            flags=re.DOTALL,
        )
        assert found == 1, name
    return page


def verdicts() -> str:
    """Return the table of verdicts, each with the findings that lead to it."""
    lines = ["| verdict | means | by | exit code |", "|---|---|---|---|"]
    for meaning in MEANINGS:
        codes = [c for word, named in BY_CODE for c in named if str(word) == str(meaning.word)]
        by = ", ".join(f"{c} ({CODES[c].title})" for c in codes)
        lines.append(f"| {meaning.word} | {meaning.means} | {by} | {meaning.exit_code} |")
    return "\n".join(lines) + "\n"


def rules() -> str:
    """Return the table of rules: when each holds, and for how long before it is said."""
    lines = ["| code | speaks when | for |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {r.code} | {r.when} | {_lasting(r)} |" for r in RULES)]) + "\n"


def _lasting(rule: Rule) -> str:
    return "once" if rule.streak == 1 else f"{rule.streak} {rule.each}s"


def unnamed() -> set[str]:
    """Return the codes of rules by which a run is called nothing."""
    named = {code for _, codes in BY_CODE for code in codes}
    return {rule.code for rule in RULES} - named - set(NAMED)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
