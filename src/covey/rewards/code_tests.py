"""The tests of a program as data sets hold them, and whether what the program gave is what they expect."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import CoveyError
from covey.rewards.golds import GoldReport

_PYTHON = ("python", "python3", "py")
_TOLERANCE = 1e-6


class UnreadableTests(CoveyError):
    """Tests that cannot be run, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test: what the sandbox is told, and what it is not told.

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
            given = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return any(_is_same(given, meant) for meant in _readings(self.expected))


def read_tests(verification_info: Any = None, test_cases: Any = None) -> tuple[CodeTest, ...]:
    """The tests of a row, from `verification_info` (`{"language": "python", "test_cases": …}`) or else from
    `test_cases`; UnreadableTests says what is wrong.

    Cases are a list of `{"input": …, "output": …}` with `fn_name` where a function is called, or lists
    `inputs` and `outputs` of one length; anything may be JSON text.
    """
    info = _parsed(verification_info)
    if info is not None and not isinstance(info, Mapping):
        raise UnreadableTests(f"verification_info is a {type(info).__name__}, not an object")
    info = info or {"test_cases": test_cases}
    language = str(info.get("language") or "python").strip().lower()
    if language not in _PYTHON:
        raise UnreadableTests(f"the language is {language}, and only Python is run")
    cases = _parsed(info.get("test_cases"))
    if isinstance(cases, Mapping):
        cases = _paired(cases)
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise UnreadableTests("there are no test_cases")
    return tuple(_test(number, case, info.get("fn_name")) for number, case in enumerate(cases, start=1))


def check_tests(rows: Iterable[tuple[Any, Any]]) -> GoldReport:
    """What a look at `(verification_info, test_cases)` of every row found; rows are counted from 0."""
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
        raise UnreadableTests("test_cases has no inputs and outputs of one length")
    name = cases.get("fn_name")
    return [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)]


def _test(number: int, case: Any, name: Any) -> CodeTest:
    if not isinstance(case, Mapping) or case.get("input") is None or case.get("output") is None:
        raise UnreadableTests(f"test {number} has no input and output")
    name = case.get("fn_name") or name
    kind = case.get("type") or ("function_call" if name else "stdin_stdout")
    given, expected = case["input"], case["output"]
    if kind == "stdin_stdout":
        return CodeTest(ask={"input": _text(number, given)}, expected=_text(number, expected))
    if kind != "function_call":
        raise UnreadableTests(
            f"test {number} is of the type {kind}; there are stdin_stdout and function_call"
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise UnreadableTests(f"test {number} calls a function and has no fn_name")
    return CodeTest(ask={"call": name, "arguments": _arguments(number, given)}, expected=expected)


def _text(number: int, value: Any) -> str:
    text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise UnreadableTests(f"test {number} holds half a character")
    return text


def _arguments(number: int, given: Any) -> list[Any]:
    """A list is the arguments; a text has one of them a line, as JSON."""
    if isinstance(given, list):
        return given
    try:
        return [json.loads(line) for line in str(given).splitlines() if line.strip()]
    except ValueError:
        raise UnreadableTests(f"test {number} calls a function, and its input is no JSON") from None


def _readings(expected: Any) -> list[Any]:
    """What an expected value may mean: itself, its JSON, and of a list of one its only member."""
    found = [expected]
    if isinstance(expected, str):
        parsed = _parsed(expected)
        found += [] if parsed is expected else [parsed]
    return [*found, *(value[0] for value in found if isinstance(value, list) and len(value) == 1)]


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


def _is_same(given: Any, meant: Any) -> bool:
    if isinstance(meant, list | tuple):
        return (
            isinstance(given, list)
            and len(given) == len(meant)
            and all(_is_same(a, b) for a, b in zip(given, meant, strict=True))
        )
    if isinstance(meant, Mapping):
        return (
            isinstance(given, dict)
            and given.keys() == {str(key) for key in meant}
            and all(_is_same(given[str(key)], value) for key, value in meant.items())
        )
    if given == meant:
        return True
    if not isinstance(given, int | float) or not isinstance(meant, int | float):
        return False
    # Whole numbers are exact; where one has a fraction it may be off by what arithmetic loses.
    is_exact = isinstance(given, int) and isinstance(meant, int)
    try:
        return not is_exact and math.isclose(given, meant, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except OverflowError:
        return False
