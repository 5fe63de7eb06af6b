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

from covey.rewards.notation import ANSWER, ANSWER_CHINESE, COPULA, COPULA_CHINESE, half_width
from covey.rewards.runs import Run, is_list_mark, runs
from covey.rewards.tags import answer_tag
from covey.rewards.values import Kind, Value, read

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))([^\s{}$\\]+)")
_DEEPEST = 4
_LONGEST_WORDS = 60
_SENTENCE_WORDS = 4
_LONGEST_WORD = 30
# The places of a text that are searched for a last expression: an answer stands at the end.
_TAIL = 4000
_NEAR = 400
_MARK = "####"

_FILLERS = re.compile(
    r"(?:[\s:*_\"“”]|\b(?:therefore|thus|hence|then|indeed|simply|just|exactly|approximately|about|equal to"
    r"|given by|now|clearly|option|choice|letter)\b,?|约为?|大约)*"
)
_LETTER = r"\(?[A-J]\)?"
_LETTERS = rf"(?:[A-H]{{2,8}}|{_LETTER}(?:\s*(?:,|、|;|&|\band\b|\bor\b|和|或|与)\s*{_LETTER}){{0,7}})"
_CHOICE_HERE = re.compile(
    rf"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{{)?({_LETTERS})\}}?(?=[\s*$}}]*(?:$|[.,:;)。、!?]|选项|项|\s[a-z(]|[\u4e00-\u9fff]))"
)
_SAID = re.compile(
    rf"(?P<said>{ANSWER}(?:\s*\([^()\n]{{1,20}}\))?[\s*]*(?:{COPULA}[\s*]*)+"
    rf"|{ANSWER_CHINESE}\s*(?:{COPULA_CHINESE}\s*)+|【答案】)"
    r"|(?P<chosen>(?:故|应|因此|所以|则|答案|综上|本题|此题|,|\.|^)\s*[选選][择項项]?\s*:?\s*(?=[(]?[A-J])"
    r"|\b(?:choose|pick|select|go with|matche?s?)\s+(?:(?:option|choice)\s*)?(?=\(?[A-J]\b)"
    r"|\b(?:so|thus|hence|therefore),?\s+(?:it is\s+)?(?=\([A-J]\)))"
    rf"|\b(?P<right>{_LETTERS})\s*\)?\s*(?:is|are)\s+(?:the\s+)?(?:correct|right|best|true)(?!\s+(?:only|if))"
    rf"|(?P<right2>{_LETTERS})\s*(?:选项|项)?\s*(?:是|为)?\s*正确",
    re.IGNORECASE | re.MULTILINE,
)
_NOT = re.compile(r"(?:\bnot|n't|不是|并非|不为|≠|\\neq?)\s*(?:\b(?:just|only|be|equal to)\s+)?[\s:*$]*\Z")
_SENTENCE = re.compile(r"[^\n。!?]*?(?=\.(?:\s|$)|[\n。!?]|$)")
_MORE = re.compile(
    r"\s*(?:,|、|;)?\s*(?:(?:\b(?:and|or)\b|和|或者?|与)\s*(?:maybe|perhaps|possibly|也许|可能)?\s*)?"
)
# A bound is no value, and 25 less than 51 is not 25.
_BOUND = re.compile(
    r"(?:\b(?:more|less|fewer|greater|larger|smaller|higher|lower) than|\bat (?:least|most)|大于|小于|超过"
    r"|不足|至少|至多|多于|少于)\s*(?:或?等于\s*)?[\s$*]*\Z"
)
_MORE_THAN = re.compile(r"\s*(?:less|more|fewer|times)\s+(?:than|as)\b")
_QUESTION = re.compile(r"[^.!?。！？\n]*[?？]")
_NAMED = re.compile(r"\$?\s*[a-zA-Z](?:_\{?\w\}?)?\s*(?:[=<>≤≥≠]|\\(?:le|ge|ne)q?(?![a-z]))")
_AND = re.compile(r"\s*(?:,|;|\band\b|和|且)\s*")
_EITHER = re.compile(r"\s*,?\s*(?:\bor\b|或者?)\s*(?:maybe|perhaps|possibly|也许|可能)?\s*(?:\w+\s+){0,2}")
_ANY = re.compile(rf"{_EITHER.pattern}|\s*,\s*")
# What is said of an answer, and is none.
_NO_ANSWERS = frozenset(
    (
        *("correct", "right", "wrong", "incorrect", "reasonable", "consistent", "valid", "clear", "obvious"),
        *("below", "above", "found", "given", "unknown", "unclear", "fine", "complete", "done", "final"),
        *("the", "a", "an", "what", "that", "as", "in", "to", "obtained", "this", "their", "its", "it"),
        *("not", "we"),
    )
)


def extract_gold(text: str) -> str:
    """The gold of a solution text: in `<answer>`, else after the last `####`, else the last box, else all."""
    found = answer_tag(text)
    if found is None and _MARK in text:
        found = text.rpartition(_MARK)[2]
    return _within((text if found is None else found).strip())


def find_answer(text: str) -> tuple[str | None, str]:
    """The answer of a completion and how it was found, by one of the names above; `none` without any.

    What follows the last `</think>` is searched first. Of thoughts, closed or not, marks alone count.
    """
    found = _find(without_thoughts(text))
    return found if found[0] is not None else _marked(text) or found


def without_thoughts(text: str) -> str:
    """A completion without what it thinks."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def last_words(text: str, gold: str) -> str | None:
    """What a completion without marks says in words, where its gold is in words: all that follows the last
    "the answer is" up to the end of its sentence, else as much of the end of the text as the gold is long.
    """
    text = _plain(text).strip(" \n\t.。!！*_\"'")
    said = [m for m in _SAID.finditer(text) if m["said"]]
    if said:
        filled = _FILLERS.match(text, said[-1].end())
        return text[filled.end() if filled else said[-1].end() :].split("\n")[0].strip()
    text = text.rpartition("\n")[2].removesuffix("的")
    if not gold.isascii():
        before = text[: -len(gold)]
        is_part = len(gold) == 1 and re.search(r"[^\W是为]\Z", before)
        return None if is_part or re.search(r"不\Z|非\Z|没有\Z", before) else text[-len(gold) :]
    words = text.split()
    count = len(gold.split())
    first = re.match(r"\W*(\w+)\W*,", text)
    if first is not None and count == 1 and first[1].casefold() in ("yes", "no"):
        return first[1]
    is_denied = words[:-count] and re.search(r"\b(?:not|no|never|or)\b|n't\b", " ".join(words[:-count]))
    return None if is_denied else " ".join(words[-count:])


def of_sentence(text: str) -> str:
    """The number or formula that a marked sentence such as `There are 72 students.` says; else the text."""
    if len(text.split()) < _SENTENCE_WORDS or read(text).kind is not Kind.WORDS:
        return text
    prose = _plain(text)
    return _said(prose) or _last_expression(prose) or text


def _find(text: str) -> tuple[str | None, str]:
    marked = _marked(text)
    if marked is not None:
        return marked
    only = _only_value(text)
    if only is not None:
        return only, "last_line"
    prose = _plain(text)
    for find, name in (
        (_after_hashes, "hashes"),
        (_said, "said"),
        (_last_line, "last_line"),
        (_last_expression, "last_expression"),
    ):
        found = find(prose)
        if found is not None:
            return found, name
    return None, "none"


def extract_answer(text: str) -> str | None:
    """The answer of a completion, or None."""
    return find_answer(text)[0]


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` or `\fbox{…}` whose braces close, or of `\boxed 5`; else None."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    found, place = None, -1
    opened: list[int] = []
    for token in _BOX.finditer(text):
        if token[0] == "}":
            begin = opened.pop() if opened else -1
            if begin >= 0:
                found, place = text[begin : token.start()], token.start()
        elif token[0][-1] == "{" and token[0] != "\\{":
            opened.append(token.end() if len(token[0]) > 1 else -1)
    for bare in _BARE_BOX.finditer(text, max(place, 0)):
        found = bare[1].rstrip(".,;。")
    return found


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
    if not (text.startswith('{"') and text.endswith("}") and len(text) <= _TAIL):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return column_text(found) if isinstance(found, dict) and len(found) == 1 else None


def column_text(column: Any) -> str:
    """A gold column's value as text: the members of a list make a comma list, an object of one key is its
    value."""
    if isinstance(column, dict) and len(column) == 1:
        return column_text(next(iter(column.values())))
    if isinstance(column, list | tuple):
        return ", ".join(column_text(c) for c in column)
    return str(column)


def _plain(text: str) -> str:
    """The end of a completion in half-width characters, without special tokens and bold type."""
    text = re.sub(r"<\|[^|<>]{1,40}\|>|</?(?:think|answer|b|i|p|br|strong|em)\s*/?>", " ", text[-_TAIL:])
    text = re.sub(r"(?<![\w)}])(?:\*\*|__)|(?:\*\*|__)(?![\w({\\])", "", text)
    return half_width(text)


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
                return _listed(line, own)
        head, mark, behind = head.rpartition(_MARK)
    return None


def _said(text: str) -> str | None:
    for said in reversed(list(_SAID.finditer(text))):
        letters = said["right"] or said["right2"]
        if letters is not None:
            if letters.strip("()") == letters.strip("()").upper() and not _NOT.search(
                text, said.start() - 20, said.start()
            ):
                return letters
            continue
        found = _value_at(text, said.end())
        if found is not None:
            return found
    return None


def _value_at(text: str, start: int) -> str | None:
    """The answer that is said from here on: a choice, a formula, a word or two, else the last formula of the
    sentence."""
    filled = _FILLERS.match(text, start)
    start = filled.end() if filled else start
    sentence = _SENTENCE.match(text, start)
    rest = sentence[0] if sentence else ""
    choice = _CHOICE_HERE.match(text, start)
    if choice and not (choice[1] == "I" and text[choice.end() :][:1] == " "):
        return re.sub(r"^\(([A-J])\)$", r"\1", choice[1])
    here = text[start : start + _NEAR]
    own = [r for r in runs(here) if _counts(here, r, is_said=True)]
    if own and own[0].start == 0:
        return _listed(here, own)
    for part in (rest.strip(" *:"), re.split(r"[,，]", rest)[0].strip(" *:")):
        if _is_said(part):
            return part
    own = [r for r in own if r.end <= len(rest)]
    return _whole(here, own[-1], own[-1]) if own else None


def _listed(text: str, own: list[Run]) -> str:
    """The first of these and what is named in a row with it: `1, 2 and 3`."""
    last = own[0]
    for run in own[1:]:
        between = text[last.end : run.start]
        if not (between.strip() and _MORE.fullmatch(between)) and not _is_span(text, last, run):
            break
        last = run
    return _whole(text, own[0], last)


def _is_said(part: str) -> bool:
    """Whether what follows "the answer is" is a whole answer: a word or a few, a tuple, a list of such."""
    words = part.lower().split()
    if not words or len(part) > _LONGEST_WORDS or words[0] in _NO_ANSWERS:
        return False
    return len(words) <= 6 and _is_short(read(part))


def _is_short(value: Value) -> bool:
    if value.kind is Kind.LIST:
        return all(i.kind is not Kind.WORDS or _is_short(i) for i in value.items)
    is_named_set = value.kind is Kind.MATHS and value.text.startswith(("\\mathbb", "\\emptyset"))
    return (
        value.kind in (Kind.TUPLE, Kind.NUMBER)
        or is_named_set
        or (
            value.kind is Kind.WORDS and len(value.text) <= _LONGEST_WORD and not re.search(r"\d", value.text)
        )
    )


def _last_line(text: str) -> str | None:
    """A choice on a last line of its own, or a whole text that is one word or a list of numbers."""
    whole = text.strip()
    line = whole.rpartition("\n")[2].strip()
    value = read(line) if 0 < len(line) <= _LONGEST_WORDS else None
    if value is not None and (value.kind is Kind.CHOICE or _are(value, Kind.CHOICE)):
        is_whole = line == whole or line.strip("()[].*$ ").isupper() or re.match(r"\(?[A-J][).:]", line)
        return line if is_whole else None
    if value is None or line != whole or "=" in line:
        return None
    if _are(value, Kind.NUMBER):
        return line
    is_word = value.kind is Kind.WORDS and not re.search(r"[\s\d]", line) and len(line) <= _LONGEST_WORD
    return line if is_word else None


def _are(value: Value, kind: Kind) -> bool:
    return bool(value.items) and all(i.kind is kind for i in value.items)


def _last_expression(text: str) -> str | None:
    """The last number or formula, or the last two or more between which "or" stands."""
    # Most texts end with it, and a formula that the cut may have halved is looked for in the whole.
    for piece in (text[-_NEAR:], text):
        found = [r for r in runs(piece) if _counts(piece, r)]
        if not found:
            continue
        first = last = found[-1]
        # 3 or 4 are two answers, though the last of them is a number, and x = 2 and y = 3 are one.
        for before in reversed(found[:-1]):
            between = piece[before.end : first.start]
            is_joined = (_EITHER if first is last else _ANY).fullmatch(between) or (
                _AND.fullmatch(between) and _NAMED.match(before.text) and _NAMED.match(first.text)
            )
            if not is_joined and not _is_span(piece, before, first):
                break
            first = before
        if first.start > _NEAR // 4 or piece == text:
            return _whole(piece, first, last)
    return None


def _counts(text: str, run: Run, *, is_said: bool = False) -> bool:
    """Whether a formula can be an answer: no number of a line, no bound, not asked for and not denied."""
    before = run.start - 20
    return not (
        (not is_said and is_list_mark(text, run))
        or _NOT.search(text, before, run.start)
        or _BOUND.search(text, before, run.start)
        or _MORE_THAN.match(text, run.end)
        or _QUESTION.match(text, run.end)
    )


def _is_span(text: str, before: Run, after: Run) -> bool:
    """Whether two numbers with their units are one: `1 hour and 45 minutes`."""
    between = text[before.end : after.start]
    has_units = before.text[-1].isalpha() and after.text[-1].isalpha() and after.text[0].isdigit()
    return has_units and re.fullmatch(r"\s*(?:and|,)?\s*", between) is not None


def _whole(text: str, first: Run, last: Run) -> str:
    """The text of a run, or from one to another."""
    if first is last:
        return _result(last.text)
    return re.sub(r"\$([^$]+)\$", r"\1", text[first.start : last.end])


def _result(text: str) -> str:
    """A formula without the marks around it; of `48+24 = 72` the reader of values takes the result."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 2 * len(opening) and text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip(" .,;\n")
    return text
