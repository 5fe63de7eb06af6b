"""The registry of codes: complete, used, and printed as docs/codes.md has it."""

import re
from pathlib import Path

import covey
from covey.codes import CODES, TABLE, facts_of_codes
from covey.codes.page import markdown
from support.code_facts import FACTS, rendered

SOURCE = Path(covey.__file__).parent
REPOSITORY = SOURCE.parent.parent


def used() -> set[str]:
    text = "".join(
        path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path.parent.name != "codes"
    )
    return set(re.findall(r"""["']([EWF]\d{3})["']""", text))


def test_each_code_that_is_used_is_registered() -> None:
    assert used() - set(CODES) == set()


def test_each_code_that_is_registered_is_used() -> None:
    assert set(CODES) - used() == set()


def test_codes_are_complete_and_in_order() -> None:
    for code in CODES.values():
        assert code.title and not code.title.endswith(".")
        assert code.why.endswith(".")
    for letter in "EWF":
        numbers = [code for code, *_ in TABLE if code.startswith(letter)]
        assert numbers == sorted(set(numbers)), "each number once"


def test_the_page_is_the_registry() -> None:
    page = REPOSITORY / "docs" / "codes.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run: python -m covey.codes > docs/codes.md"


def test_what_explain_says_is_that_of_source_and_docs() -> None:
    found = FACTS.read_text(encoding="utf-8")
    assert found == rendered(), "run, in tests: python -m support.code_facts"
    for code, facts in facts_of_codes().items():
        assert code in CODES
        for page in facts.pages:
            assert (REPOSITORY / page.partition("#")[0]).is_file()
