"""The registry of codes: complete, used, and printed as docs/codes.md has it."""

import re
from pathlib import Path

import covey
from covey.codes import CODES, pages_of_codes
from covey.codes.page import markdown
from support.code_pages import PAGES, anchor, rendered

SOURCE = Path(covey.__file__).parent
REPOSITORY = SOURCE.parent.parent


def used() -> set[str]:
    """Codes that stand in the source but for where a check or the registry declares them."""
    files = {path: path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    texts = [
        re.sub(r'Code\(\s*code="\w+"', "", text) if "checks" in path.parts else text
        for path, text in files.items()
        if path.parent.name != "codes"
    ]
    return set(re.findall(r"""["']([EWF]\d{3})["']""", "".join(texts)))


def test_each_code_that_is_used_is_registered() -> None:
    assert used() - set(CODES) == set()


def test_each_code_that_is_registered_is_used() -> None:
    assert set(CODES) - used() == set()


def test_codes_are_complete_and_in_order() -> None:
    for code in CODES.values():
        assert code.title and not code.title.endswith(".")
        assert code.why.endswith(".")
    for letter in "EWF":
        numbers = [code for code in CODES if code.startswith(letter)]
        assert numbers == sorted(set(numbers)), "each number once"


def test_the_page_is_the_registry() -> None:
    page = REPOSITORY / "docs" / "codes.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run: python -m covey.codes > docs/codes.md"


def test_the_pages_of_a_code_are_those_that_name_it() -> None:
    assert PAGES.read_text(encoding="utf-8") == rendered(), "run, in tests: python -m support.code_pages"
    pages = pages_of_codes()
    assert set(pages) <= set(CODES)
    for page in {page for of_code in pages.values() for page in of_code}:
        name, _, section = page.partition("#")
        headings = re.findall(r"^#{2,} (.+)$", (REPOSITORY / name).read_text(encoding="utf-8"), re.MULTILINE)
        assert not section or section in map(anchor, headings)
