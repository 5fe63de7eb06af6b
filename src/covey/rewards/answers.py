r"""Where a completion's answer and a column's gold stand in a text.

Marks come first, and nest: what is in `<answer>` may be a box, and a box may hold another. Of an answer the
candidates are, in this order:

1. `answer_tag`: the last `<answer>`, closed or cut off
2. `boxed`: the last `\boxed{}` or `\fbox{}`
3. `hashes`: what follows the last `####` on its line, where that reads as an answer and is no heading
4. `said`: what follows the last "the answer is", 答案是 or 故选, or stands before "is correct"
5. `last_line`: a choice letter, or several, on a last line of their own
6. `last_expression`: the last number or formula, whole: `5π` is not 5 and `2x+1` is not 1
"""

from __future__ import annotations

import json
import re
from typing import Any

from covey.rewards.prose import last_bold, last_expression, last_line, listed, plain, said
from covey.rewards.runs import is_list_mark, runs
from covey.rewards.tags import answer_tag
from covey.rewards.values import Kind, read

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))([^\s{}$\\]+)")
_DEEPEST = 4
_LONGEST_OBJECT = 4000
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_MARK = "####"


def extract_gold(text: str) -> str:
    """The gold of a solution text: in `<answer>`, else after the last `####`, else the last box, else all."""
    gold = answer_tag(text)
    if gold is None and _MARK in text:
        gold = text.rpartition(_MARK)[2]
    return _within((text if gold is None else gold).strip())


def find_answer(text: str) -> tuple[str | None, str]:
    """The answer of a completion and how it was found, by one of the names above; `none` without any.

    What is said outside of thoughts is searched first. Of thoughts, closed or not, marks alone count.
    """
    parsed = _find(without_thoughts(text))
    return parsed if parsed[0] is not None else _marked(text) or parsed


def without_thoughts(text: str) -> str:
    """A completion without what it thinks; where the prompt opened the thoughts, they end at the first
    `</think>`."""
    head, end, rest = text.partition("</think>")
    return _THOUGHTS.sub(" ", rest if end and "<think>" not in head else text)


def _find(text: str) -> tuple[str | None, str]:
    marked = _marked(text)
    if marked is not None:
        return marked
    only = _only_value(text)
    if only is not None:
        return only, "last_line"
    bold = last_bold(text)
    prose = plain(text)
    for find, name in (
        (_after_hashes, "hashes"),
        (said, "said"),
        (last_line, "last_line"),
        (lambda prose: bold or last_expression(prose), "last_expression"),
    ):
        answer = find(prose)
        if answer is not None:
            return answer, name
    return None, "none"


def extract_answer(text: str) -> str | None:
    """The answer of a completion, or None."""
    return find_answer(text)[0]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` or `\fbox{…}` whose braces close, or of `\boxed 5`; else None."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    content, start = None, -1
    opened: list[int] = []
    for token in _BOX.finditer(text):
        if token[0] == "}":
            begin = opened.pop() if opened else -1
            if begin >= 0:
                content, start = text[begin : token.start()], token.start()
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else -1)
    for bare in _BARE_BOX.finditer(text, max(start, 0)):
        content = bare[1].rstrip(".,;。")
    return content


def _within(text: str) -> str:
    """The innermost mark of what a mark holds, or the one value of an object."""
    for _ in range(_DEEPEST):
        boxed, only = last_boxed(text), _only_value(text)
        if boxed is not None:
            text = boxed.strip()
        elif _MARK in text:
            text = text.rpartition(_MARK)[2].strip()
        elif only is not None:
            text = only
        else:
            break
    return text


def _marked(text: str) -> tuple[str, str] | None:
    tagged = answer_tag(text, is_closed=False)
    if tagged is not None:
        return _within(re.sub(r"</\w{0,6}$", "", tagged.strip())), "answer_tag"
    boxed = last_boxed(text)
    return None if boxed is None else (_within(boxed.strip()), "boxed")


def _only_value(text: str) -> str | None:
    """The value of a JSON object that has one key; else None."""
    text = text.strip()
    if not (text.startswith('{"') and text.endswith("}") and len(text) <= _LONGEST_OBJECT):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _in_words(next(iter(value.values()))) if isinstance(value, dict) and len(value) == 1 else None


def _in_words(value: Any) -> str:
    """A JSON value as an answer would say it: the members of a list make a comma list, an object with one
    key is its value."""
    if isinstance(value, dict) and len(value) == 1:
        return _in_words(next(iter(value.values())))
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    return str(value)


def _after_hashes(text: str) -> str | None:
    """What follows the last `####` that is no heading: a heading has words, and lines behind it."""
    head, mark, behind = text.rpartition(_MARK)
    while mark:
        line, _, below = behind.strip(" \t").partition("\n")
        line = line.strip()
        value = read(line) if line else None
        if value is not None and value.kind is not Kind.NOTHING:
            is_words = value.kind is Kind.WORDS or any(i.kind is Kind.WORDS for i in value.items)
            if not is_words or not below.strip():
                return _within(line)
            own = runs(line)
            if own and own[0].start == 0 and not is_list_mark(line, own[0]):
                return listed(line, own)
        head, mark, behind = head.rpartition(_MARK)
    return None
