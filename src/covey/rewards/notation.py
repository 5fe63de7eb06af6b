r"""One way of writing for what is written in many: Unicode, LaTeX and punctuation brought to a common form.

Here `−３½ ％` becomes `-3 1/2 %` and `\left( 1,\! 000 \right]。` becomes `(1,000]`.
"""

from __future__ import annotations

import re
import unicodedata

# How an answer is announced, at the start of a gold and within a completion.
OPENING = (
    r"(?:(?:so|thus|hence|therefore|所以|因此|故|综上)[, :]*)?(?:(?:the|my|our)\s+)?"
    r"(?:(?:final|correct|right|best)\s+)?(?:最终|最后|正确)?的?"
)
ANSWER = r"\b(?:answers?|options?|choices?)\b"
COPULA = r"(?:\b(?:is|are|was|be|(?:should|must|would|will|has to) be|comes out (?:to|as)|equals?)\b|[:=])"
ANSWER_CHINESE = r"(?:[【\[]?(?:答案|解答)[】\]]?|应?[选選][择项]?)"
COPULA_CHINESE = r"(?:应该?|就)?(?:[为有:=]|是(?!\W*$)|等于)"

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_BEFORE = {
    **{c: f" {a}/{b} " for c, a, b in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅖25", "⅛18", "⅜38")},
    "，": ", ",
    "∶": ":",
    "º": "°",
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **{c: f"({n})" for n, c in enumerate("①②③④⑤⑥⑦⑧⑨", start=1)},
    "…": r"\ldots ",
    "℃": "°C",
    "℉": "°F",
}
_AFTER = {
    **dict.fromkeys("−–—‐‑‒﹣", "-"),
    **dict.fromkeys("“”„", '"'),
    **dict.fromkeys("‘’", "'"),
    **{"。": ".", "、": ", ", "⁄": "/", "∕": "/", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot "},
    **{"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp "},
    **{"≈": r"\approx ", "≃": r"\approx ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}"},
    **{"∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "π": r"\pi "},
    **{"θ": r"\theta ", "∠": r"\angle ", "≡": r"\equiv ", "【": "[", "】": "]", "《": "", "》": ""},
}
_BEFORE_TABLE = {ord(c): text for c, text in _BEFORE.items()}
_AFTER_TABLE = {ord(c): text for c, text in _AFTER.items()}

_TAG = re.compile(
    r"</?(?:answer|think|solution|final_answer|final|b|i|p|br|strong|em)\s*/?>|<\|[^|<>]{1,40}\|>", re.I
)
_LEAD_IN = re.compile(
    rf"^\W*{OPENING}{ANSWER}(?:(?:\s*{COPULA})+\s*|\s+)"
    rf"|^\s*{OPENING}{ANSWER_CHINESE}\s*(?:{COPULA_CHINESE}\s*)*",
    re.IGNORECASE,
)
_LATEX_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\text\s*\{\s*not\s*\}", r" not "),
        (r"\\text\s*\{\s*(?:negative|minus)\s*\}\s*", r"-"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", r""),
        (
            r"\\(?:displaystyle|limits|nolimits|hfill|textstyle|[lL]arge|LARGE|[hH]uge|bf|rm|it)(?![a-zA-Z])",
            r"",
        ),
        (r"\\(?:color|textcolor)\s*\{\w+\}|\\tag\*?\s*\{[^{}]*\}", r""),
        (r"\\(?:boldsymbol|bm|mathsf|emph|underline|framebox)\s*\{([^{}]*)\}", r"\1"),
        (r"^\s*\\(?:implies|Rightarrow|therefore|to)(?![a-zA-Z])", r""),
        (r"\\mathbf\s*\{\s*([RNZQC])\s*\}", r"\\mathbb{\1}"),
        (r"\\in\s*([RNZQC])(?![a-zA-Z])", r"\\in \\mathbb{\1}"),
        (r"\\backslash(?![a-zA-Z])|(?<=\\mathbb\{R\})\s*-\s*(?=\\\{)", r"\\setminus "),
        (r"\\(?:mathrm|text)\s*\{\s*lg\s*\}", r"\\lg "),
        (r"(?:\\mathrm\s*\{C\}|\bC)_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (r"(?<!\\)\\[!,;: ]|(?<!\\)~|\\q?quad(?![a-zA-Z])", r" "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}", r", "),
        (r"\\(?:mathrm|text|rm)\s*\{\s*([ei])\s*\}", r" \1 "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\lt(?![a-zA-Z])", r"<"),
        (r"\\gt(?![a-zA-Z])", r">"),
        (r"\\(?:mid|vert)(?![a-zA-Z])", r"|"),
        (r"\^\s*(?:\\prime|\{\s*\\prime\s*\})", r"'"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", r"°"),
        (r"\\degree(?:s)?(?![a-zA-Z])", r"°"),
        (r"\\geq(?:slant)?(?![a-zA-Z])", r"\\ge"),
        (r"\\leq(?:slant)?(?![a-zA-Z])", r"\\le"),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\%", r"%"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"[,;\s]*\(?\s*[kn]\s*\\in\s*\\mathbb\s*\{[ZN]\}(?:\^\{?[*+]\}?)?\s*\)?\s*$", r""),
    )
)
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^\s*(?:\\approx(?![a-zA-Z])|=)", r""),
        (r"(?<!\\)~", " "),
        (r">=", r"\\ge "),
        (r"<=", r"\\le "),
        (r"\{,\}", r","),
        (r"\*\*", r"^"),
        (r"\(\s*mod\s*([^()]*)\)", r"\\pmod{\1}"),
        (r"\b([ap])\.m\b\.?", r"\1m"),
        (
            r"(?:\\text\s*\{\s*)?\b(?:all|the)\s+real\s+numbers(?:\s*\})?|(?:全体|所有|一切)?实数集?|\(-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)",
            r"\\mathbb{R}",
        ),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
    )
)
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mbox|operatorname|rm|bf)\s*\{([^{}]*)\}"
)
_JOINED = re.compile(
    r",?\s+(?:and|or)\s+|,?\s+&\s+(?=[A-J](?!\w))|(?<=[\w)}\]])\s*(?:或者?|和|且)\s*(?=[\d\\({\[-]|[A-Za-z])",
)
_SYSTEM = re.compile(r"(?:\\left\s*\\\{\s*)?\\begin\{(cases|array)\}(?:\{[lcr|]+\})?((?s:.*?))\\end\{\1\}")
_ALIGNED = re.compile(
    r"\\begin\{((?:align(?:ed|at)?|split|gather(?:ed)?|eqnarray|equation|multline)\*?)\}((?s:.*?))\\end\{\1\}"
)
_OPEN, _CLOSE = "([{", ")]}"


def tidy(text: str) -> str:
    """A gold or answer without tags, delimiters, lead-in and closing point, in plain characters."""
    text = text if text.isascii() else half_width(text).translate(_AFTER_TABLE)
    text = re.sub(r"(\d),\\!\s*(\d{3})", r"\1,\2", _TAG.sub(" ", text))
    text = _LEAD_IN.sub("", _in_one_line(_undelimited(text)))
    text = re.sub(r"\$(?![\s$])([^$\n]{0,400}[^\s$])\$(?!\d)", r"\1", _undelimited(text))
    # Most texts hold no command.
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    if "\\" in text:
        for pattern, new in _LATEX_REWRITES:
            text = pattern.sub(new, text)
    return re.sub(r"\s+", " ", text).strip()


def half_width(text: str) -> str:
    """A text with full-width characters, superscripts and subscripts written in plain ones."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT.sub(lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
    return unicodedata.normalize("NFKC", text.translate(_BEFORE_TABLE))


def squeeze(text: str) -> str:
    r"""The tidied text without the spaces and braces that mean nothing: `x^{2} + Y` is `x^2+Y`."""
    text = re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)
    text = re.sub(r"(?<=[_^])\{(\w)\}", r"\1", text)
    return re.sub(r"(?:^|(?<=[(\[{,=]))\+", "", text).rstrip(".")


def without_text_commands(text: str) -> str:
    r"""`\textbf{(B)} 12` as `(B) 12`."""
    return _TEXT_COMMAND.sub(lambda m: f" {m[1]} ", text).strip()


def in_brackets(text: str) -> tuple[str, str]:
    r"""What one pair of brackets around all of a text holds, and the pair: `[1, 2)` is `1, 2` and `[)`."""
    text = text.strip().replace("\\{", "{").replace("\\}", "}")
    if text[:1] not in tuple(_OPEN) or text[-1:] not in tuple(_CLOSE):
        return "", ""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and i < len(text) - 1:
            return "", ""
    return (text[1:-1].strip(), text[0] + text[-1]) if depth == 0 else ("", "")


def split_list(text: str) -> list[str]:
    """The parts of a text between its commas, semicolons, "and" and "or", those in brackets left whole."""
    text = _JOINED.sub(", ", text)
    marks: dict[str, list[int]] = {";": [], ", ": [], ",": []}
    depth = 0
    for i, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and character == ";":
            marks[";"].append(i)
        elif depth == 0 and character == ",":
            marks[","].append(i)
            if text[i + 1 : i + 2] == " ":
                marks[", "].append(i)
    # `1,000, 2,000` are two: where some commas have a space behind them, those alone part the list.
    places = marks[";"] or marks[", "] or marks[","]
    starts = [0, *(p + 1 for p in places)]
    parts = [text[a:b].strip() for a, b in zip(starts, [*places, len(text)], strict=True)]
    return [p for p in parts if p] if len(parts) > 1 else [text.strip()]


def _in_one_line(text: str) -> str:
    """The last line of an aligned calculation, or the equations of a system as a list; titles left out."""
    if "\\" not in text:
        return text
    text = re.sub(r"^\s*\\text(?:bf)?\s*\{\s*(?:Final )?(?:Answer|答案)\s*:?\s*\}\s*:?", "", text, flags=re.I)
    system = _SYSTEM.fullmatch(text.replace("\\right.", "").strip())
    if system:
        return ", ".join(
            row.replace("&", "").strip(" ,;") for row in re.split(r"\\\\", system[2]) if row.strip()
        )
    aligned = _ALIGNED.fullmatch(text.strip())
    if aligned is None:
        return text
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", aligned[2]) if row.strip()]
    return rows[-1].replace("&", "").strip(" .,") if rows else ""


def _undelimited(text: str) -> str:
    """Without the marks around all of it: markdown, paired dollar signs, LaTeX brackets, a point."""
    for _ in range(4):
        before = text
        # 6! is a factorial.
        text = re.sub(r"[\s.,;:?]+$|(?<![\w)}])!$|(?<=[^\W\d]{2})!$", "", text.strip())
        if len(text) > 1 and text[-1] == "\\":
            text = text[:-1].rstrip()
        for mark in ("**", "__", "$$", "$", "`", '"'):
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        for opening, closing in (("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(opening) and text.endswith(closing):
                text = text[2:-2]
        if text == before:
            return text
    return text
