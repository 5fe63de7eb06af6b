"""The tests of a program as data sets hold them, and whether what the program gave is what they expect."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import CoveyError
from covey.rewards.golds import GoldReport
from covey.texts import tr

_PYTHON = ("python", "python3", "py")
_TOLERANCE = 1e-6


class UnreadableTests(CoveyError):
    """Tests that cannot be run, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test: what the sandbox receives, and the expected output, which it never receives.

    `ask` is `{"input": "3\\n"}` or `{"call": "double", "arguments": [3]}`.
    """

    ask: Mapping[str, Any]
    expected: Any

    def is_passed(self, output: bytes) -> bool:
        """Whether this output is the expected one.

        Lines are compared without the white space around them, and without empty lines at either end. What a
        function returned is compared as JSON, numbers within one millionth.
        """
        text = output.decode("utf-8", "replace")
        if "input" in self.ask:
            return _lines(text) == _lines(self.expected)
        try:
            actual = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return any(_is_same(actual, expected) for expected in _readings(self.expected))


def read_tests(verification_info: Any = None, test_cases: Any = None) -> tuple[CodeTest, ...]:
    """The tests of a row, from `verification_info` (`{"language": "python", "test_cases": …}`) or else from
    `test_cases`; UnreadableTests says what is wrong.

    Cases are a list of `{"input": …, "output": …}` with `fn_name` where a function is called, or lists
    `inputs` and `outputs` of one length; anything may be JSON text.
    """
    info = _parsed(verification_info)
    if info is not None and not isinstance(info, Mapping):
        raise UnreadableTests(tr("verification_info is a {name}, not an object", name=type(info).__name__))
    info = info or {"test_cases": test_cases}
    language = str(info.get("language") or "python").strip().lower()
    if language not in _PYTHON:
        raise UnreadableTests(tr("the language is {language}, but only Python can be run", language=language))
    cases = _parsed(info.get("test_cases"))
    if isinstance(cases, Mapping):
        cases = _paired(cases)
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise UnreadableTests(tr("there are no test_cases"))
    return tuple(_test(number, case, info.get("fn_name")) for number, case in enumerate(cases, start=1))


def check_tests(rows: Iterable[tuple[Any, Any]]) -> GoldReport:
    """Check `(verification_info, test_cases)` of every row; rows are counted from 0."""
    bad = []
    count = 0
    for row, (info, cases) in enumerate(rows):
        count += 1
        try:
            read_tests(info, cases)
        except UnreadableTests as error:
            bad.append((row, "", str(error)))
    return GoldReport(num_golds=count, num_checked=count, bad=bad)


def _paired(cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnreadableTests(tr("test_cases needs inputs and outputs of the same length"))
    name = cases.get("fn_name")
    return [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)]


def _test(number: int, case: Any, name: Any) -> CodeTest:
    if not isinstance(case, Mapping) or case.get("input") is None or case.get("output") is None:
        raise UnreadableTests(tr("test {number} has no input and output", number=number))
    name = case.get("fn_name") or name
    kind = case.get("type") or ("function_call" if name else "stdin_stdout")
    stdin, expected = case["input"], case["output"]
    if kind == "stdin_stdout":
        return CodeTest(ask={"input": _text(number, stdin)}, expected=_text(number, expected))
    if kind != "function_call":
        raise UnreadableTests(
            tr(
                "test {number} has the unknown type {kind}; known types are stdin_stdout and function_call",
                number=number,
                kind=kind,
            )
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise UnreadableTests(tr("test {number} calls a function but has no fn_name", number=number))
    return CodeTest(ask={"call": name, "arguments": _arguments(number, stdin)}, expected=expected)


def _text(number: int, value: Any) -> str:
    text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise UnreadableTests(
            tr("test {number} contains half of a surrogate pair, which is not valid Unicode", number=number)
        )
    return text


def _arguments(number: int, value: Any) -> list[Any]:
    """A list is the arguments; a text has one of them a line, as JSON."""
    if isinstance(value, list):
        return value
    try:
        return [json.loads(line) for line in str(value).splitlines() if line.strip()]
    except ValueError:
        raise UnreadableTests(
            tr("test {number} calls a function, but its input is not valid JSON", number=number)
        ) from None


def _readings(expected: Any) -> list[Any]:
    """What an expected value may mean: itself, its JSON, and of a list of one its only member."""
    readings = [expected]
    if isinstance(expected, str):
        parsed = _parsed(expected)
        readings += [] if parsed is expected else [parsed]
    return [*readings, *(value[0] for value in readings if isinstance(value, list) and len(value) == 1)]


def _parsed(value: Any) -> Any:
    """JSON text as what it says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _is_same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list)
            and len(actual) == len(expected)
            and all(_is_same(a, b) for a, b in zip(actual, expected, strict=True))
        )
    if isinstance(expected, Mapping):
        return (
            isinstance(actual, dict)
            and actual.keys() == {str(key) for key in expected}
            and all(_is_same(actual[str(key)], value) for key, value in expected.items())
        )
    if actual == expected:
        return True
    if not isinstance(actual, int | float) or not isinstance(expected, int | float):
        return False
    # Whole numbers are exact; where one has a fraction it may be off by what arithmetic loses.
    is_exact = isinstance(actual, int) and isinstance(expected, int)
    try:
        return not is_exact and math.isclose(actual, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:
        return False
