"""What a completion says in prose: after "the answer is", on its last line, or in its last formula."""

from __future__ import annotations

import re

from covey.rewards.notation import (
    ANSWER,
    ANSWER_CHINESE,
    COPULA,
    COPULA_CHINESE,
    half_width,
    without_text_commands,
)
from covey.rewards.runs import Run, is_list_mark, runs
from covey.rewards.values import Kind, Value, read

_LONGEST_WORDS = 60
_LONGEST_WORD = 30
# The places of a text that are searched: an answer stands at the end.
_TAIL = 4000
_NEAR = 400

_FILLERS = re.compile(
    r"(?:[\s:*_\"'“”]|\b(?:therefore|thus|hence|then|indeed|simply|just|exactly|approximately|about|equal to"
    r"|given by|now|clearly|possibly|option|choice|letter)\b,?|约为?|大约|选项?)*"
)
_LETTER = r"\(?[A-J]\)?"
_LINK = r"\s*(?:[,、;]?\s*(?:&|\band\b|\bor\b|和|或|与)|[,、;]|(?<=[A-H]) (?=[A-H](?![A-Za-z])))\s*"
_LETTERS = rf"(?:[A-H]{{2,8}}|{_LETTER}(?:{_LINK}{_LETTER}){{0,7}})"
_CHOICE_HERE = re.compile(
    rf"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{{)?({_LETTERS})(?![A-Za-z0-9_]|\s*[=<>+/^≤≥]|\s+\*\s|-\w|'\w|\s+(?:is|are)\b)"
)
_SAID = re.compile(
    rf"(?P<said>{ANSWER}(?:\s*\([^()\n]{{1,20}}\))?[\s*]*(?:{COPULA}[\s*]*)+|\bfinal result\s+is\b"
    rf"|{ANSWER_CHINESE}\s*(?:{COPULA_CHINESE}\s*)+|【答案】|最终结果[为是:])"
    r"|(?P<reply>(?:^|\n)\s*答:\s*)"
    r"|(?P<chosen>(?:故|应|因此|所以|则|答案|综上|本题|此题|我|,|\.|^)\s*[选選][择項项]?\s*:?\s*(?=[(]?[A-J])"
    r"|\b(?:choose|pick|select|go with|matche?s?|corresponds to|only|ans:)\s+(?:(?:option|choice)\s*)?"
    r"(?=\(?[A-J]\b)"
    r"|\b(?:so|thus|hence|therefore),?\s+(?:it is\s+)?(?=\([A-J]\)|[A-J][.。]?\s*$)|的[是有为]\s*(?=[A-J]))"
    rf"|\b(?P<right>{_LETTERS})\s*\)?\s*(?:is|are)\s+(?:the\s+)?"
    r"(?:correct|right|best|true|(?:final )?answer\b)(?!\s+(?:only|if))"
    rf"|(?:\bonly|只有|所以|因此)\s*(?:选项)?(?P<fits>{_LETTERS})\s*(?:选项|项)?\s*(?:satisf\w+|符合|满足)"
    rf"|(?P<right2>{_LETTERS})\s*(?:选项|项)?\s*(?:是|为)?\s*正确",
    re.IGNORECASE | re.MULTILINE,
)
_NOT = re.compile(
    r"(?:\b(?:not|cannot|never|except|instead of|without)|n't|不是|并非|不为|不可能[是为]|除了?|≠|\\neq?)\s*"
    r"(?:\b(?:just|only|be|equal to)\s+)?[\s:*$]*\Z"
)
_SENTENCE = re.compile(r"[^\n。!?]*?(?=\.(?:\s|$)|[\n。!?]|$)")
_MORE = re.compile(
    r"\s*(?:[,、;]?\s*\(?(?:\b(?:and|or)\b|和|或者?|与)\s*(?:maybe|perhaps|possibly|也许|可能)?|[,、;])\s*"
)
# A bound is no value; half of 30, 25 less than 51 and 15 factorial are other numbers.
_BOUND = re.compile(
    r"(?:\b(?:more|less|fewer|greater|larger|smaller|higher|lower) than|\bat (?:least|most)|大于|小于|超过"
    r"|不足|至少|至多|多于|少于|根号|\b(?:twice|half of|square(?: root)? of|multiples? of|divisible by|over"
    r"|under|up to)|\d\s+to)\s*(?:或?等于\s*)?[\s$*]*\Z"
)
_CHANGED = re.compile(
    r"\s*(?:(?:less|more|fewer|times)\s+(?:than|as|pi\b)|squared|cubed|factorial|and a half|(?:over|to)\s+\d"
    r"|的[\d一二两三四五六七八九十几]*倍)"
)
# What rounds a number, or is the whole of which it is a part.
_ROUNDED = re.compile(
    r"[^\d\n]{0,30}\b(?:out of|of the|of all)\s+"
    r"|[^\d\n]{0,16}(?:\b(?:about|approximately|approx\.?|roughly)|≈|约)\s*\$?"
)
_QUESTION = re.compile(r"[^.!?。！？\n]*[?？]")
_NAMED = re.compile(r"\$?\s*[a-zA-Z](?:_\{?\w\}?)?\s*(?:[=<>≤≥≠]|\\(?:le|ge|ne)q?(?![a-z]))")
_AND = re.compile(r"\s*(?:[,、;]?\s*(?:\band\b|和|且)|[,;])\s*|\s*\n\s*[-*•]\s*")
_BOTH = re.compile(r"\s*[,、]?\s*(?:\band\b|和)\s*")
_EITHER = re.compile(r"\s*,?\s*\(?(?:\bor\b|或者?)\s*(?:maybe|perhaps|possibly|也许|可能)?\s*(?:\w+\s+){0,2}")
_COMMA = re.compile(r"\s*[,、]\s*")
_BOLD = re.compile(r"\*\*([^*\n]{1,80})\*\*")
# What is said of an answer, and is none.
_NO_ANSWERS = frozenset(
    (
        *("correct", "right", "wrong", "incorrect", "reasonable", "consistent", "valid", "clear", "obvious"),
        *("below", "above", "found", "given", "unknown", "unclear", "fine", "complete", "done", "final"),
        *("the", "a", "an", "what", "that", "as", "in", "to", "obtained", "this", "their", "its", "it"),
        *("not", "we"),
    )
)


def plain(text: str) -> str:
    """The end of a completion in half-width characters, without special tokens and bold type."""
    text = re.sub(
        r"<\|[^|<>]{1,40}\|>|</?(?:think|answer|b|i|p|br|strong|em)\s*/?>", " ", text.strip()[-_TAIL:]
    )
    text = re.sub(r"(?<![\w)}])(?:\*\*|__)|(?:\*\*|__)(?![\w({\\])", "", text)
    return re.sub(r"\b(?:minus|negative)\s+(?=\d)|负(?=\d)", "-", half_width(text))


def last_bold(text: str) -> str | None:
    """The one number or formula that the last line has in bold type."""
    line = text.strip().rpartition("\n")[2]
    values = [r for bold in _BOLD.findall(line) for r in runs(plain(bold))]
    return _result(values[0].text) if len(values) == 1 else None


def last_words(text: str, gold: str) -> str | None:
    """What a completion without marks says in words, where its gold is in words: all that follows the last
    "the answer is" up to the end of its sentence, else as much of the end of the text as the gold is long.
    """
    text = plain(text).strip(" \n\t.。!！*_\"'")
    phrases = [m for m in _SAID.finditer(text) if m["said"]]
    if phrases:
        line = text[_filled(text, phrases[-1].end()) :].split("\n")[0].strip()
        first = line.split(",")[0].strip()
        return first if read(first) == read(gold) else line
    text = text.rpartition("\n")[2].removesuffix("的")
    if not gold.isascii():
        before = text[: -len(gold)]
        is_part = len(gold) == 1 and re.search(r"[^\W是为]\Z", before)
        return None if is_part or re.search(r"(?:不|非|没有)\Z", before) else text[-len(gold) :]
    words = text.split()
    count = len(gold.split())
    first_word = re.match(r"\W*(\w+)\W*,", text)
    if first_word is not None and count == 1 and first_word[1].casefold() in ("yes", "no"):
        return first_word[1]
    is_denied = words[:-count] and re.search(r"\b(?:not|no|never|or)\b|n't\b", " ".join(words[:-count]))
    return None if is_denied else " ".join(words[-count:])


def of_sentence(text: str) -> str:
    """The number or formula that a marked sentence such as `There are 72 students.` says; else the text."""
    if not re.search(r"\d", text) or read(text).kind is not Kind.WORDS or read(text).text.isdigit():
        return text
    prose = plain(without_text_commands(text))
    return said(prose) or last_expression(prose) or text


def said(text: str) -> str | None:
    """What follows the last phrase that announces an answer, or the letters that it says are correct."""
    for phrase in reversed(list(_SAID.finditer(text))):
        letters = phrase["right"] or phrase["right2"] or phrase["fits"]
        if letters is not None:
            is_upper = letters.strip("()") == letters.strip("()").upper() or len(letters) > 3
            if is_upper and not _NOT.search(text, phrase.start() - 20, phrase.start("right")):
                return letters
            continue
        value = _value_at(text, phrase.end(), is_reply=phrase["reply"] is not None)
        if value is not None:
            return value
    return None


def _filled(text: str, start: int) -> int:
    match = _FILLERS.match(text, start)
    return match.end() if match else start


def _value_at(text: str, start: int, *, is_reply: bool = False) -> str | None:
    """The answer that is said from here on: a choice, a formula, a word or two, else the last formula of the
    sentence; of a reply that of its first clause."""
    start = _filled(text, start)
    sentence = _SENTENCE.match(text, start)
    rest = sentence[0] if sentence else ""
    choice = _CHOICE_HERE.match(text, start)
    if choice and not (choice[1] == "I" and text[choice.end() :][:1] == " "):
        return re.sub(r"^\(([A-J])\)$", r"\1", choice[1])
    here = text[start : start + _NEAR]
    own = [r for r in runs(here) if _counts(here, r, is_said=True)]
    if own and own[0].start == 0 and not is_reply:
        return listed(here, own)
    parts = () if is_reply else (rest.strip(" *:"), rest.split(",")[0].strip(" *:"))
    for part in parts:
        if _is_said(part):
            return part
    end = len(rest.split(", ")[0]) if is_reply else len(rest)
    own = [r for r in own if r.end <= end]
    return _whole(here, own[-1], own[-1]) if own else None


def listed(text: str, own: list[Run]) -> str:
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
    if value.kind is Kind.MATHS:
        return value.text.startswith(("\\mathbb", "\\emptyset"))
    is_word = value.kind is Kind.WORDS and len(value.text) <= _LONGEST_WORD
    return value.kind in (Kind.TUPLE, Kind.NUMBER) or (is_word and not re.search(r"\d", value.text))


def last_line(text: str) -> str | None:
    """A choice on a last line of its own, or a whole text that is one word or a list of numbers."""
    whole = text.strip()
    line = whole.rpartition("\n")[2].strip()
    value = read(line) if 0 < len(line) <= _LONGEST_WORDS else None
    if value is not None and (value.kind is Kind.CHOICE or _are(value, Kind.CHOICE)):
        is_whole = line == whole or line.strip("()[].*$ ").isupper() or re.match(r"\(?[A-J][).:]", line)
        return line if is_whole else None
    first = whole.partition("\n")[0].strip()
    is_short = first != line and len(first) <= _LONGEST_WORDS and first[:2].strip("(").isupper()
    if is_short and read(first).kind is Kind.CHOICE:
        return first
    if value is None or line != whole or "=" in line:
        return None
    if _are(value, Kind.NUMBER):
        return line
    is_word = value.kind is Kind.WORDS and not re.search(r"[\s\d]", line) and len(line) <= _LONGEST_WORD
    return line if is_word else None


def _are(value: Value, kind: Kind) -> bool:
    return bool(value.items) and all(i.kind is kind for i in value.items)


def last_expression(text: str) -> str | None:
    """The last number or formula of a text, or the last two or more that are named in a row."""
    # Most texts end with it, and a formula that the cut may have halved is looked for in the whole.
    for piece in (text[-_NEAR:], text):
        candidates = _without_asides(piece, [r for r in runs(piece) if _counts(piece, r)])
        if not candidates:
            continue
        first = last = candidates[-1]
        for before in reversed(candidates[:-1]):
            if not _is_joined(piece, before, first, is_row=first is not last):
                break
            first = before
        if first.start > _NEAR // 4 or piece == text:
            return _whole(piece, first, last)
    return None


def _is_joined(text: str, before: Run, after: Run, *, is_row: bool) -> bool:
    """Whether two are one answer: 3 or 4, 1 and 3, x = 2 and y = 3; in a row commas join, too."""
    between = text[before.end : after.start]
    if _NAMED.match(before.text) and _NAMED.match(after.text) and _AND.fullmatch(between):
        return True
    if _is_span(text, before, after) or _EITHER.fullmatch(between):
        return True
    if "=" not in before.text + after.text and _BOTH.fullmatch(between):
        return True
    return is_row and _COMMA.fullmatch(between) is not None


def _without_asides(text: str, candidates: list[Run]) -> list[Run]:
    """Without what rounds the one before it, and what a last sentence holds beside a formula between marks:
    `$2\\sqrt{5}$, or about 4.47`."""
    kept: list[Run] = []
    for run in candidates:
        if not kept or not _ROUNDED.fullmatch(text, kept[-1].end, run.start):
            kept.append(run)
    if not kept:
        return kept
    start = max(text.rfind(mark, 0, kept[-1].start) for mark in ("\n", ". ", "。", "! ", "? "))
    marked = [r for r in kept if r.start > start and r.text.startswith(("$", "\\(", "\\["))]
    return kept if not marked else kept[: kept.index(marked[-1]) + 1]


def _counts(text: str, run: Run, *, is_said: bool = False) -> bool:
    """Whether a formula can be an answer: no number of a line, no bound, not asked for and not denied."""
    before = run.start - 24
    return not (
        (not is_said and is_list_mark(text, run))
        or _NOT.search(text, before, run.start)
        or _BOUND.search(text, before, run.start)
        or _CHANGED.match(text, run.end)
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
    expression = re.sub(r"\$([^$]+)\$|\\\((.+?)\\\)", lambda m: m[1] or m[2], text[first.start : last.end])
    return re.sub(r"\s*\n\s*[-*•]\s*", ", ", expression)


def _result(text: str) -> str:
    """A formula without the marks around it, and without those within: `$24$ cm`."""
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
            return inner.strip(" .,;\n")
    return re.sub(r"\$([^$]+)\$|\\\((.+?)\\\)", lambda m: m[1] or m[2], text)
