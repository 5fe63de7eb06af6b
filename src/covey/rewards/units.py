"""A text as the sequence of its words, in languages with and without spaces between them."""

from __future__ import annotations

import re

# Scripts that put no space between words, and the punctuation that is written with them.
_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u0f00-\u109f"  # Tibetan, Burmese
    "\u1780-\u17ff"  # Khmer
    "\u2e80-\u2fdf\u3001-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese, Japanese
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f"  # their wide and narrow forms
    "\U00020000-\U0003ffff"  # rare Chinese characters
)
_UNIT = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


def units(text: str) -> list[str]:
    """The words between spaces, in small letters; of scripts without spaces each character is one.

    `units("Das ist 你好, ok")` is `["das", "ist", "你", "好", ",", "ok"]`. Korean has spaces, and words.
    """
    return _UNIT.findall(text.lower())
