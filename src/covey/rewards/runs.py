r"""Mathematics within prose: each number or formula of a text from its first sign to its last.

In `It is 2x + 1, or $\frac{1}{2}$ of 5π (see 3).` these are `2x + 1`, `$\frac{1}{2}$`, `5π` and `3`. What
borders on more mathematics is part of it, so the tail of a formula is never found as an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from covey.rewards.quantities import FUNCTIONS, unit_end

NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\w))?"
DELIMITED = (
    r"\$\$[^$]{1,400}\$\$|\$(?![\s$])[^$\n]{0,400}[^\s$]\$(?!\d)"
    r"|\\\((?s:.{1,400}?)\\\)|\\\[(?s:.{1,400}?)\\\]"
)
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,40}\}){0,60}\}){0,80}\}"
_TOKEN = re.compile(
    rf"(?P<delimited>{DELIMITED})"
    rf"|(?P<environment>\\begin\{{(\w+\*?)\}}(?s:.{{1,800}}?)\\end\{{\w+\*?\}})"
    rf"|(?P<number>\d+(?:\s?:\s?\d+)+(?!\d)|\d{{1,4}}(?P<dash>[-/])\d{{1,2}}(?P=dash)\d{{1,4}}(?!\d)|{NUMBER}(?:\s?\\?[%‰])?)"
    rf"|(?P<command>\\(?:[a-zA-Z]+|[{{}}])\s*(?:\[[^\]]{{0,20}}\])?(?:{_GROUP}){{0,2}})"
    rf"|(?P<braced>{_GROUP})"
    r"|(?P<operator>(?:[-+*/^_=<>≤≥≠≈≡×÷·∙⋅±∓∪∩∈−–|]|:=)+)"
    r"|(?P<symbol>[πθφαβγλμσω∞∅°′√ℝℤℕ]|'(?=\s*[=(]))"
    r"|(?P<word>[A-Za-z\u00c0-\u024f]+(?:'[a-z]+)?|[^\W\d_πθφαβγλμσωA-Za-z]+)"
    r"|(?P<open>[(\[])|(?P<close>[)\]])|(?P<comma>[,;、])|(?P<space>[ \t]+)|(?P<other>.|\n)"
)
# Commands that stand around text.
_OF_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|emph|underline|section|item|quad|qquad|ldots|dots|,)")
_COIN = re.compile(r"[-−]?\\?[$€£¥₹]\s?$")
_BESIDE = re.compile(r" [=<>≤≥+*/^≠]")
_ARTICLES = frozenset("aAI")
# A longer formula is no answer, and a text of brackets alone takes no time.
_LONGEST = 160
_MATHS = frozenset(("delimited", "environment", "number", "command", "braced", "letter", "symbol", "close"))
_DASHES = re.compile(r"[-−–]+")


@dataclass(frozen=True, slots=True)
class Run:
    """A place of a text that holds mathematics, without the spaces around it."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    start: int
    end: int
    text: str


def runs(text: str) -> list[Run]:
    """The numbers and formulas of a text that stand by themselves, in their order."""
    tokens = _tokens(text)
    pairs = _pairs(tokens)
    parts = []
    i = 0
    while i < len(tokens):
        end = _end_of_run(tokens, i, pairs)
        if end == i:
            i += 1
            continue
        run = _trimmed(text, tokens, i, end)
        if run is not None:
            parts.append(run)
        i = end
    return parts


def _tokens(text: str) -> list[_Token]:
    tokens = []
    end = 0
    while m := _TOKEN.match(text, end):
        start, end = m.span()
        if m.lastgroup in ("number", "delimited", "command"):
            end = unit_end(text, end)
        tokens.append(_Token(_kind(str(m.lastgroup), m[0], text, start, end), start, end, text[start:end]))
    return tokens


def _kind(group: str, token: str, text: str, start: int, end: int) -> str:
    """The kind of a token as its neighbours make it."""
    if group == "command" and _OF_TEXT.match(token):
        return "word"
    if group != "word":
        return group
    if token in FUNCTIONS:
        return "letter"
    touches = (text[start - 1 : start], text[end : end + 1])
    if len(token) == 1 and token.isascii():
        is_bound = any(t and (t.isdigit() or t in "^_+-*/=()") for t in touches) or (
            _BESIDE.match(text, end) is not None
        )
        return "letter" if token not in _ARTICLES or is_bound else "word"
    # 2xy and ab/2 are products, 5cm and 3rd are none.
    is_product = len(token) <= 3 and token.isascii() and token.islower() and token[0] in "abcnkmpqrtuvwxyz"
    return "letter" if is_product and text[end : end + 1] in tuple("^_") else "word"


def _pairs(tokens: list[_Token]) -> set[int]:
    """The brackets that open and are closed again before a formula gets too long."""
    opened: list[int] = []
    pairs = set()
    for i, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(i)
        elif token.kind == "close" and opened:
            start = opened.pop()
            if i - start < _LONGEST:
                pairs.add(start)
    return pairs


def _end_of_run(tokens: list[_Token], begin: int, pairs: set[int]) -> int:
    """The token behind the run that begins here; `begin` itself where none does."""
    if tokens[begin].kind not in ("open", "operator") and tokens[begin].kind not in _MATHS - {"close"}:
        return begin
    end = i = begin
    opened: list[int] = []
    while i < min(len(tokens), begin + _LONGEST):
        token = tokens[i]
        if token.kind == "open":
            if i not in pairs:
                break
            opened.append(i)
        elif token.kind == "close":
            if not opened:
                break
            opened.pop()
        elif token.kind == "comma":
            if not opened:
                break
        elif token.kind == "space":
            if not _goes_on(tokens, begin, i, is_within=bool(opened)):
                break
        elif token.kind not in _MATHS and token.kind != "operator":
            break
        i += 1
        if not opened:
            end = i
    # A bracket around words is no mathematics; what stands before it is, and then what is within.
    if opened and end <= opened[0]:
        return max(end, begin)
    return end


def _goes_on(tokens: list[_Token], begin: int, i: int, *, is_within: bool) -> bool:
    """Whether the mathematics goes on behind a space."""
    if i + 1 >= len(tokens) or i == begin:
        return False
    before, after = tokens[i - 1], tokens[i + 1]
    if after.kind in ("word", "other", "space"):
        return False
    if is_within:
        return True
    # A dash between words is punctuation; a minus has a space on both sides or on none, or begins a number.
    if before.kind == "operator":
        return i - 1 > begin or not _DASHES.fullmatch(before.text)
    if after.kind == "operator":
        behind = tokens[i + 2] if i + 2 < len(tokens) else None
        return behind is not None and behind.kind not in ("word", "other")
    if before.text in FUNCTIONS or after.text in FUNCTIONS:
        return True
    if after.kind == "open":
        is_modulus = i + 2 < len(tokens) and tokens[i + 2].text == "mod"
        return is_modulus
    if {before.kind, after.kind} & {"command", "symbol"}:
        return "word" not in (before.kind, after.kind) and "delimited" not in (before.kind, after.kind)
    return _is_mixed(tokens, i)


def _is_mixed(tokens: list[_Token], i: int) -> bool:
    """Whether the space stands in a mixed number such as `2 1/3`."""
    kinds = [t.kind for t in tokens[i - 1 : i + 4]]
    return kinds == ["number", "space", "number", "operator", "number"] and tokens[i + 2].text == "/"


def _trimmed(text: str, tokens: list[_Token], begin: int, end: int) -> Run | None:
    """The run without signs of prose at its ends; None where it borders on what is missing."""
    own = tokens[begin:end]
    while own and own[-1].kind in ("space", "comma"):
        own.pop()
    # `= 5` and a dash before a number are of the sentence, a sign is of the number.
    while own and (own[0].kind == "space" or own[0].text in ("=", "≈", ":=", "|", "*", "–")):
        own.pop(0)
    if (
        own
        and own[-1].kind == "operator"
        and _DASHES.fullmatch(own[-1].text)
        and _is_prose_dash(text, own[-1])
    ):
        own.pop()
    if not own or not any(t.kind in _MATHS for t in own):
        return None
    start, stop = own[0].start, own[-1].end
    body = text[start:stop]
    if own[0].kind == "operator" and not re.fullmatch(r"[-+−±]|[<>≤≥]", own[0].text):
        return None
    if own[-1].kind == "operator" or _touches_word(text, start, stop, own):
        return None
    if not _says_something(own):
        return None
    coin = _COIN.search(text, max(0, start - 4), start)
    if coin and own[0].kind == "number":
        start = coin.start()
        body = text[start:stop]
    return Run(start, stop, body)


def _is_prose_dash(text: str, dash: _Token) -> bool:
    return text[dash.end : dash.end + 1].isspace() or dash.end == len(text)


def _touches_word(text: str, start: int, stop: int, own: list[_Token]) -> bool:
    """Whether a letter stands right before or behind: `3rd`, `GPT4`, `x_max`."""
    before, behind = text[start - 1 : start], text[stop : stop + 1]
    if own[0].kind == "delimited" or own[-1].kind == "delimited":
        return False
    is_word = before.isascii() and (before.isalnum() or before in ("_", "\\"))
    return is_word or (behind.isascii() and (behind.isalnum() or behind == "_"))


def _says_something(own: list[_Token]) -> bool:
    """Whether there is a number, a formula or an operation, and not a letter alone."""
    kinds = {t.kind for t in own}
    if kinds & {"number", "delimited", "environment", "symbol", "command"}:
        return True
    if "braced" in kinds and any(re.search(r"[|<>=\d]", t.text) for t in own):
        return True
    return "letter" in kinds and "operator" in kinds and len(own) > 2


def is_list_mark(text: str, run: Run) -> bool:
    """Whether a run only numbers a line: `3. Then …`, `(2) So …`."""
    behind = text[run.end : run.end + 2]
    if not re.fullmatch(r"\(?\d{1,2}\)?", run.text):
        return False
    line = text.rfind("\n", 0, run.start) + 1
    alone = not text[line : run.start].strip(" \t(#*")
    return alone and re.match(r"[.):、]\s?\S|\s*\S", behind) is not None and behind[:1] in tuple(".):、")
