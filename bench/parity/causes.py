"""Why a side that calls math-verify differs from the right value of a pair."""

from __future__ import annotations

import re
from collections.abc import Mapping

from covey.rewards.accuracy import extract_gold
from parity.pairs import Pair, Verdict

CAUSES: Mapping[str, str] = {
    "no text": "the gold is a JSON number or list",
    "no gold": "the gold is empty",
    "word": "the gold is a word, a name or a choice letter",
    "bare": "the gold has no LaTeX delimiters: nothing is read",
    "bare, in part": "the gold has no LaTeX delimiters: one number of it is read",
    "plain": "the answer is plain text: nothing is read",
    "dollars": "the answer is LaTeX outside a box: nothing is read",
    "place": "another place of the completion counts",
    "thoughts": "the thoughts count",
    "one of it": "one number of the sentence counts",
    "unit": "units are ignored",
    "scale": "number words are ignored",
    "undone": "a calculation that is not done is worked out",
    "notation": "a notation is not understood",
}
# What stands beside a number and is not part of it: units, words and separators.
_BESIDE = re.compile(
    r"\\text\{[^{}]*\}(?:\^\d)?|\^\\circ|\\[,;! ]|(?<![\\A-Za-z])[A-Za-z]{2,}(?:/[a-z]+)?"
    r"|[\u4e00-\u9fff]+|[\s$.。,]+"
)
_LETTERS = re.compile(r"\(?[A-G](?:[,、\s]*[A-G])*\)?")
_LATEX = re.compile(r"\\boxed|\$[^$]+\$|\\\(|\\\[")
# Where gold and answer were both read, the cause was given pair by pair. These are the completions.
_READ_BY_HAND: Mapping[str, tuple[str, ...]] = {
    "place": (
        "#### 72\n\nThis can be checked: 72 / 6 = 12.",
        "#### 12\n\nThis can be checked: 12 * 6 = 72.",
        "#### 72 (that is 6 dozen)",
        "The answer is **64**. Let me know if you have 1 more question!",
        "Answer: 8. Check: 8 * 8 = 64",
        r"\boxed{12} is wrong, so \boxed{15}",
        "<answer>12</answer> Let me correct this. <answer>15</answer>",
        "<answer>15</answer><answer>12</answer>",
        "\\boxed{19}\n<answer>20</answer>",
        "<answer>20</answer>\nSo \\boxed{19}.",
        "<answer>20</answer>\nThe answer is 19.",
        "The answer is 19.\n#### 20",
        "<answer>19</answer>\nSo \\boxed{20}.",
        "\\boxed{20}\n<answer>19</answer>",
        "#### 19\nThe rest is 20.",
        "<answer>19</answer> #### 20",
    ),
    "one of it": (
        "It takes 1 hour and 45 minutes.",
        r"\boxed{5 \text{ hours } 30 \text{ minutes}}",
        "The answer is x + 3.",
        "So f(x) = x^2 + 1.",
        "The answer is not 64.",
        "The answer is 64x.",
        "<answer>84x</answer>",
        "So n > 31.",
        "<answer>x > 84</answer>",
        "So there are more than 31 birds left.",
        "The answer is either 72 or 73.",
        "The answer is 72, or maybe 73.",
        "<answer>6, 7, 8</answer>",
        "The answer is 25 less than 51, that is 26.",
        "How many of the numbers from 1 to 10 are divisible by 3?",
    ),
    "unit": (
        r"\boxed{5 \text{ m}}",
        r"\boxed{5 \text{ km}}",
        r"\boxed{5 \text{ mm}}",
        "The length is 5 meters.",
        r"\boxed{72 \text{ m}}",
        r"\boxed{72 \text{ m/s}}",
        "<answer>72 miles per hour</answer>",
        r"\boxed{24 \text{ m}^2}",
        "<answer>8美元</answer>",
        "<answer>30 hours</answer>",
        "<answer>30 seconds</answer>",
        "<answer>60 km/h</answer>",
        "<answer>9 g</answer>",
        "<answer>9 pounds</answer>",
        "<answer>May 5</answer>",
        "<answer>5</answer>",
    ),
    "scale": (
        "#### $18k",
        r"\boxed{5 \text{ million}}",
        "<answer>2.5 million</answer>",
        "<answer>4.2万元</answer>",
        r"\boxed{350000000}",
        r"\boxed{3.5 \times 10^8}",
        r"\boxed{350{,}000{,}000}",
        r"\boxed{3.5}",
        "So there are 31 thousand birds left.",
        "<answer>72 thousand students</answer>",
        "<answer>72 dozen eggs</answer>",
    ),
}


def cause_of(pair: Pair, verdict: Verdict) -> str:
    """The name, in `CAUSES`, of the cause of a value that is not the right one."""
    if not isinstance(pair.gold, str) and pair.gold is not None:
        return "no text"
    core = (extract_gold(pair.gold) or "").strip() if pair.gold is not None else ""
    if not core:
        return "no gold"
    if not verdict.gold:
        return "word" if _is_word(core) else "bare"
    if _is_in_part(pair.gold, core, verdict.gold[-1]):
        return "bare, in part"
    if not verdict.answer:
        return "dollars" if _LATEX.search(pair.completion) else "plain"
    for cause, completions in _READ_BY_HAND.items():
        if pair.completion in completions:
            return cause
    if "think>" in pair.completion and not _is_sum(verdict.answer[-1]):
        return "thoughts"
    return "notation" if pair.right else "undone"


def _is_word(core: str) -> bool:
    """Whether a gold is in words or choice letters, and not a formula."""
    if _LETTERS.fullmatch(core) or "\\text" in core:
        return True
    has_word = re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}|[\u4e00-\u9fff]", core)
    return has_word is not None and not re.search(r"[\\\d=<>^|+]", core)


def _is_in_part(gold: str, core: str, read: str) -> bool:
    """Whether math-verify took less than the gold says; a unit, a full stop or `x=` before it is no loss."""
    left = [_BESIDE.sub("", text) for text in (core, read)]
    return not _LATEX.search(gold) and re.sub(r"^[a-z]=", "", left[0]) != left[1]


def _is_sum(answer: str) -> bool:
    return re.search(r"\d\s*[-+*/]\s*\d", answer) is not None
