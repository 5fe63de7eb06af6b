"""What covey says to people: English templates with named values, which a catalogue has in other languages.

    tr("{option} is {value}, which is below 0.", option=name, value=x)

gives English text, a `str` in every way, that remembers its template and its values. A catalogue (gettext,
kept with Babel by `make translations`) has the template in another language, which is filled with the same
values; one that is such a text itself is put into that language, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from covey.texts.values import LONGEST as LONGEST
from covey.texts.values import Shown
from covey.texts.values import Whole as Whole
from covey.texts.values import fitted as fitted
from covey.texts.values import visible as visible

Kept = TypeVar("Kept", bound="Text")

# What `packed` has of a text.
_PACKED = {"template", "values", "plural", "number", "english", "width"}


class Text(str):
    """English text with the template and the values that it was made of.

    Template and values are joined as by `str.format`; without values the template is taken as it stands.
    `plural` is the template's other form, where the number `number` chooses between two. It is filled with
    spaces up to `width` columns.
    """

    __slots__ = ("number", "plural", "template", "values", "width")

    template: str
    values: Mapping[str, Any]
    plural: str
    number: int
    width: int

    def __new__(
        cls: type[Kept],
        template: str,
        values: Mapping[str, Any] | None = None,
        *,
        plural: str = "",
        number: int = 1,
        english: str | None = None,
        width: int = 0,
    ) -> Kept:
        values = {name: _fitted(value) for name, value in (values or {}).items()}
        if english is None:
            english = plural if plural and number != 1 else template
            english = english.format_map(values) if values else english
        self = super().__new__(cls, f"{english:<{width}}")
        self.template = template
        self.values = values
        self.plural, self.number, self.width = plural, number, width
        return self

    # So the text of an exception is the one that it was raised with.
    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined("", (self, other))

    def __radd__(self, other: str) -> str:
        return joined("", (other, self))

    def __copy__(self: Kept) -> Kept:
        return self

    def __deepcopy__(self: Kept, memo: object) -> Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (super().__str__(),)


def tr(template: str, /, **values: Any) -> str:
    """Return the text of a template and its values; an error of `str.format` where they do not fit. A text
    stays what it is."""
    return template if isinstance(template, Text) and not values else Text(template, values)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 prompt`, `2 prompts`, `1,000 prompts`."""
    one, many = forms(noun)
    return Text(one, {"n": number}, plural=many, number=number)


def plural(number: int, one: str, many: str, /, **values: Any) -> str:
    """Return one of two texts, by `number`: `plural(n, "{names} is", "{names} are", names=...)`."""
    return Text(one, values, plural=many, number=number)


def forms(noun: str) -> tuple[str, str]:
    """Return the templates of one and of several, with the number as `n`."""
    return f"{{n:,}} {noun}", f"{{n:,}} {noun}{'es' if noun.endswith('s') else 's'}"


def joined(separator: str, texts: Iterable[str]) -> str:
    """Return texts side by side, each of which stays what it is, and the separator, too.

    A comma and a semicolon are those of the language, too.
    """
    separator = _STOPS.get(separator, separator)
    values = {f"part{number}": text for number, text in enumerate(texts)}
    return Text("{between}".join(f"{{{name}}}" for name in values), {"between": separator, **values})


_STOPS = {", ": tr(", "), "; ": tr("; ")}
"""What stands between the parts of an enumeration."""


def capital(text: str) -> str:
    """Return a text that begins with a capital letter, where its language has those."""
    return written(text, text[:1].upper() + text[1:])


def written(text: str, english: str) -> str:
    """Return a text that is written in another way in English: in small letters, say."""
    return Text("{text}", {"text": text}, english=english)


def padded(text: str, width: int) -> str:
    """Return a text with spaces behind it, up to `width` columns in any language."""
    return Text("{text}", {"text": text}, width=width)


def filled(text: str, /, **values: Any) -> str:
    """Return a text whose template was declared without its values: `filled(_ADVICE, file="r.py")`."""
    return Text(text.template if isinstance(text, Text) else text, values)


def replaced(text: str, old: str, new: str) -> str:
    """Return a text with `old` replaced by `new` in its values; in a string without a template, anywhere."""
    if not isinstance(text, Text):
        return text.replace(old, new)
    values = {name: _replaced_value(value, old, new) for name, value in text.values.items()}
    return _like(text, values, str.replace(text, old, new))


def has_value(text: str, value: str) -> bool:
    """Return whether a text was made with this value, or one of its values was; False of plain strings."""
    values = text.values.values() if isinstance(text, Text) else ()
    return any(str.__str__(str(v)) == value or (isinstance(v, Text) and has_value(v, value)) for v in values)


def packed(text: str) -> Any:
    """Return what JSON can hold of a text: a string as it is, a `Text` as an object with its template."""
    if not isinstance(text, Text):
        return text
    return {
        "template": text.template,
        "values": {name: _packed_value(value) for name, value in text.values.items()},
        "plural": text.plural,
        "number": text.number,
        "english": str.__str__(text),
        "width": text.width,
    }


def unpacked(value: Any) -> str:
    """Return the text that `packed` made this of."""
    if not isinstance(value, Mapping):
        return str(value)
    return Text(
        value["template"],
        {name: _unpacked_value(v) for name, v in value["values"].items()},
        plural=value["plural"],
        number=value["number"],
        english=value["english"],
        width=value["width"],
    )


def packed_in(value: Any) -> Any:
    """Return a value of JSON with each of its texts `packed`."""
    if isinstance(value, Mapping):
        return {name: packed_in(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [packed_in(of) for of in value]
    return packed(value) if isinstance(value, str) else value


def unpacked_in(value: Any) -> Any:
    """Return what `packed_in` made this of."""
    if isinstance(value, Mapping):
        is_text = value.keys() == _PACKED
        return unpacked(value) if is_text else {name: unpacked_in(of) for name, of in value.items()}
    return [unpacked_in(of) for of in value] if isinstance(value, list) else value


def _fitted(value: Any) -> Any:
    """A value as a text keeps it. Of an exception, which would hold the frames that it came through, only
    what `str` and `repr` make of it; a text stays what it is."""
    if isinstance(value, BaseException):
        said, written = str(value), fitted(repr(value))
        return said if isinstance(said, Text) else Shown(fitted(said), written)
    return value if isinstance(value, Text) else fitted(value)


def _like(text: Text, values: Mapping[str, Any], english: str) -> Text:
    return Text(
        text.template, values, plural=text.plural, number=text.number, english=english, width=text.width
    )


def _replaced_value(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return replaced(value, old, new)
    # A path, say.
    return value if isinstance(value, Real) or old not in str(value) else str(value).replace(old, new)


def _packed_value(value: Any) -> Any:
    if isinstance(value, Shown):
        return {"text": str(value), "written": value.written}
    if isinstance(value, str):
        return packed(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return {"text": str(value), "written": repr(value)}


def _unpacked_value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return Whole(value) if isinstance(value, str) else value
    return unpacked(value) if "template" in value else Shown(value["text"], value["written"])
