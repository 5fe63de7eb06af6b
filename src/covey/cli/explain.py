"""`covey explain CODE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from covey.codes import CODES, chinese_codes, pages_of_codes
from covey.config.argv import read_words
from covey.errors import ConfigError
from covey.options.verbs import VerbOptions
from covey.plan.words import wrapped
from covey.texts import tr
from covey.texts.language import Language
from covey.texts.terminal import say
from covey.types import Fix, Problem

_USAGE: Mapping[Language, str] = {
    "en": "covey explain CODE    say what a code means; the codes are\n\n",
    "zh": "covey explain CODE    说明一个代码的含义；全部代码如下\n\n",
}

_LABEL: Mapping[Language, str] = {"en": "in the documentation", "zh": "文档"}


def explain(argv: Sequence[str], language: Language = "en") -> int:
    """Print title, reason and pages of each code; without a code, list them all."""
    codes = chinese_codes() if language == "zh" else CODES
    _, words = read_words("explain", argv, VerbOptions, most=None)
    if not words:
        listed = "".join(f"  {code.code}  {code.title}\n" for code in codes.values())
        say((_USAGE[language] + listed).removesuffix("\n"))
        return 0
    unknown = [_unknown(word) for word in words if word.upper() not in CODES]
    if unknown:
        raise ConfigError(unknown)
    for word in words:
        code = codes[word.upper()]
        head = f"{code.code} {code.title}"
        say("\n".join([head, wrapped(code.why, "  "), *_pages(code.code, language)]))
    return 0


def _pages(code: str, language: Language) -> list[str]:
    """The sections of the documentation that name the code."""
    pages = pages_of_codes().get(code, [])
    return [f"  {_LABEL[language]}", *(f"    {page}" for page in pages)] if pages else []


def _unknown(word: str) -> Problem:
    near = _nearest(word.upper())
    return Problem(
        code="E113",
        option=word,
        seen=tr("There is no code {word}.", word=word),
        why=CODES["E113"].why,
        cause=tr(
            "The nearest code is {near}: {title}.",
            near=near,
            title=tr(CODES[near].title),
        ),
        fixes=(
            Fix(text=tr("`covey explain {near}`", near=near)),
            Fix(text=tr("`covey explain` lists every code")),
        ),
    )


def _nearest(word: str) -> str:
    """The code with the longest common beginning, and of those the one with the nearest number."""
    digits = word[1:].isdigit()

    def distance(code: str) -> tuple[int, int]:
        same = next((i for i, letter in enumerate(code) if word[i : i + 1] != letter), len(code))
        return -same, abs(int(word[1:]) - int(code[1:])) if digits else 0

    return min(CODES, key=distance)
