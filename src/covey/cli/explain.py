"""`covey explain CODE`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from covey.codes import CODES, chinese_codes
from covey.config.argv import read_words
from covey.config.names import nearest
from covey.errors import ConfigError
from covey.options.verbs import VerbOptions
from covey.plan.words import wrapped
from covey.texts import tr
from covey.texts.language import Language
from covey.types import Fix, Problem

_USAGE: Mapping[Language, str] = {
    "en": "covey explain CODE    say what a code means; the codes are\n\n",
    "zh": "covey explain CODE    说明一个代码的含义；全部代码如下\n\n",
}


def explain(argv: Sequence[str], language: Language = "en") -> int:
    """Print title and reason of each code; without one, list them all."""
    codes = chinese_codes() if language == "zh" else CODES
    _, words = read_words("explain", argv, VerbOptions, most=None)
    if not words:
        listed = "".join(f"  {code.code}  {code.title}\n" for code in codes.values())
        sys.stdout.write(_USAGE[language] + listed)
        return 0
    unknown = [_unknown(word) for word in words if word.upper() not in CODES]
    if unknown:
        raise ConfigError(unknown)
    for word in words:
        code = codes[word.upper()]
        sys.stdout.write(f"{code.code} {code.title}\n{wrapped(code.why, '  ')}\n")
    return 0


def _unknown(word: str) -> Problem:
    near = nearest(word, tuple(CODES), cutoff=0.0) or "E101"
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
