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

import re
import unicodedata

from covey.rewards.notation import ANSWER, ANSWER_CHINESE, COPULA, COPULA_CHINESE
from covey.rewards.runs import Run, is_list_mark, runs
from covey.rewards.tags import answer_tag
from covey.rewards.values import Kind, Value, read

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s+|(?=\d))([^\s{}$\\]+)")
_DEEPEST = 4
_LONGEST_WORDS = 60
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
    rf"(?P<said>{ANSWER}(?:\s*\([^()\n]{{1,20}}\))?[\s*]*(?:{COPULA}[\s*]*)+|{ANSWER_CHINESE}\s*(?:{COPULA_CHINESE}\s*)+)"
    rf"|(?P<chosen>(?:故|应|因此|所以|则|答案|综上|本题|此题|,|\.|^)\s*[选選][择項项]?\s*:?\s*(?=[(]?[A-J]))"
    rf"|\b(?P<right>{_LETTERS})\s*\)?\s*(?:is|are)\s+(?:the\s+)?(?:correct|right|best|true)(?!\s+(?:only|if))"
    rf"|(?P<right2>{_LETTERS})\s*(?:选项|项)?\s*(?:是|为)?\s*正确",
    re.IGNORECASE | re.MULTILINE,
)
_NOT = re.compile(r"(?:\bnot|n't|不是|并非|不为|≠|\\neq?)\s*(?:\b(?:just|only|be|equal to)\s+)?[\s:*$]*\Z")
_BUT = re.compile(r"\b(?:but|rather)\b|而是")
_SENTENCE = re.compile(r"[^\n。!?]*?(?=\.(?:\s|$)|[\n。!?]|$)")
_MORE = re.compile(
    r"\s*(?:,|、|;)?\s*(?:(?:\b(?:and|or)\b|和|或者?|与)\s*(?:maybe|perhaps|possibly|也许|可能)?\s*)?"
)
_EITHER = re.compile(r"\s*,?\s*(?:\bor\b|或者?)\s*(?:maybe|perhaps|possibly|也许|可能)?\s*(?:\w+\s+){0,2}")
_ANY = re.compile(rf"{_EITHER.pattern}|\s*,\s*")
# What is said of an answer, and is none.
_NO_ANSWERS = frozenset(
    [
        "correct",
        "right",
        "wrong",
        "incorrect",
        "reasonable",
        "consistent",
        "valid",
        "clear",
        "obvious",
        "below",
        "above",
        "found",
        "given",
        "unknown",
        "unclear",
        "fine",
        "complete",
        "done",
        "final",
    ]
)
_NOT_FIRST = frozenset(
    [
        "the",
        "a",
        "an",
        "what",
        "that",
        "as",
        "in",
        "to",
        "given",
        "found",
        "obtained",
        "this",
        "their",
        "its",
        "it",
        "not",
        "we",
        "all",
    ]
)


def extract_gold(text: str) -> str:
    """The gold of a solution text: in `<answer>`, else after the last `####`, else the last box, else all."""
    found = answer_tag(text)
    if found is None and _MARK in text:
        found = text.rpartition(_MARK)[2]
    return _within((text if found is None else found).strip())


def find_answer(text: str) -> tuple[str | None, str]:
    """The answer of a completion and how it was found, by one of the names above; `none` without any.

    What follows the last `</think>` is searched first, and the thoughts only where it holds no answer.
    """
    said = text.rpartition("</think>")[2]
    found = _find(said)
    return found if found[0] is not None or said == text else _find(text)


def _find(text: str) -> tuple[str | None, str]:
    tagged = answer_tag(text, is_closed=False)
    if tagged is not None:
        return _within(tagged.strip()), "answer_tag"
    boxed = last_boxed(text)
    if boxed is not None:
        return _within(boxed.strip()), "boxed"
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
    """The innermost mark of what a mark holds."""
    for _ in range(_DEEPEST):
        boxed = last_boxed(text)
        if boxed is not None:
            text = boxed.strip()
        elif _MARK in text:
            text = text.rpartition(_MARK)[2].strip()
        else:
            break
    return text


def _plain(text: str) -> str:
    """The end of a completion in half-width characters, without special tokens and bold type."""
    text = text[-_TAIL:].translate({ord("，"): ", ", ord("；"): "; "})
    text = re.sub(r"<\|[^|<>]{1,40}\|>|</?(?:think|answer|b|i|p|br|strong|em)\s*/?>", " ", text)
    text = re.sub(r"(?<![\w)}])\*\*|\*\*(?![\w({\\])", "", text)
    return unicodedata.normalize("NFKC", text)


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
    own = [r for r in runs(here) if not _NOT.search(text, start - 20, start + r.start)]
    if own and own[0].start == 0:
        return _listed(here, own)
    for part in (rest.strip(" *:"), re.split(r"[,，]", rest)[0].strip(" *:")):
        if _is_said(part):
            return part
    own = [r for r in own if r.end <= len(rest)]
    if own:
        return _result(own[-1].text)
    return None


def _listed(text: str, own: list[Run]) -> str:
    """The first of these and what is named in a row with it: `1, 2 and 3`."""
    end = 0
    for n, run in enumerate(own):
        between = text[own[n - 1].end : run.start] if n else ""
        if n and not (between.strip() and _MORE.fullmatch(between)):
            break
        end = run.end
    return _result(text[own[0].start : end]) if end == own[0].end else text[own[0].start : end]


def _is_said(part: str) -> bool:
    """Whether what follows "the answer is" is a whole answer: a word or a few, a tuple, a list of such."""
    words = part.lower().split()
    if not words or len(part) > _LONGEST_WORDS or words[0] in _NOT_FIRST or words[0] in _NO_ANSWERS:
        return False
    return len(words) <= 6 and _is_short(read(part))


def _is_short(value: Value) -> bool:
    if value.kind is Kind.LIST:
        return all(i.kind is not Kind.WORDS or _is_short(i) for i in value.items)
    return value.kind is Kind.TUPLE or (
        value.kind is Kind.WORDS and len(value.text) <= _LONGEST_WORD and not re.search(r"\d", value.text)
    )


def _last_line(text: str) -> str | None:
    """A choice on a last line of its own, or a whole text that is one word or a list of numbers."""
    whole = text.strip()
    line = whole.rpartition("\n")[2].strip()
    value = read(line) if 0 < len(line) <= _LONGEST_WORDS else None
    if value is not None and (value.kind is Kind.CHOICE or _are(value, Kind.CHOICE)):
        is_whole = line == whole or line.strip("()[].*$ ").isupper() or re.match(r"\(?[A-J][).:]", line)
        return line if is_whole else None
    if value is None or line != whole:
        return None
    return line if _are(value, Kind.NUMBER) or not re.search(r"\s", line) else None


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
        # 3 or 4 are two answers, though the last of them is a number.
        for before in reversed(found[:-1]):
            between = piece[before.end : first.start]
            if not (_EITHER if first is last else _ANY).fullmatch(between):
                break
            first = before
        if first.start > _NEAR // 4 or piece == text:
            return _result(last.text) if first is last else piece[first.start : last.end]
    return None


def _counts(text: str, run: Run) -> bool:
    """Whether a formula can be an answer: it numbers no line, and the text does not say that it is wrong."""
    return not is_list_mark(text, run) and not _NOT.search(text, run.start - 20, run.start)


def _result(text: str) -> str:
    """A formula without the marks around it; of `48+24 = 72` the reader of values takes the result."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 2 * len(opening) and text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip()
    return text
