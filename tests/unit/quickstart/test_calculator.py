"""The calculator of the built-in task: exact values, and nothing but arithmetic."""

from __future__ import annotations

import inspect

import pytest

from covey.quickstart.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*46", "1702"),
        ("10*99", "990"),
        ("37+46", "83"),
        ("37-46", "-9"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-(2 - 5)", "3"),
        ("10/4", "2.5"),
        ("10/5", "2"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        (" 7 ", "7"),
        ("9" * 50 + "*2", "1" + "9" * 49 + "8"),
    ],
)
def test_values_worked_by_hand(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("x", "abs(1)", "1(2)", "(1).real", "a=1", "__import__('os')", "'1'", "1j", "True"),
        *("9**9**9", "7//2", "7%2", "1<2", "~1", "(1,2)", "[1]", "1e9", "1_0", "0x1"),
        *("", " ", "1+", "(1", "1.2.3", "07", "1 2", "1\n2", "٣"),
        *("1/0", "1/(2-2)", "1+" * 50 + "1", "(" * 50 + "1" + ")" * 50),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        calculate(expression)


def test_it_says_what_it_takes_as_a_tool_does() -> None:
    signature = inspect.signature(calculate, eval_str=True)
    assert [p.annotation for p in signature.parameters.values()] == [str]
    assert signature.return_annotation is str
    documentation = inspect.getdoc(calculate) or ""
    assert "Args:\n    expression: " in documentation
    assert "Returns:\n" in documentation
