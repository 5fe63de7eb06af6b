"""The calculator of `covey quickstart --task tools`: a function that a model calls as a tool."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

_MAX_CHARACTERS = 100
_ALLOWED = re.compile(r"[0-9+\-*/(). ]+")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: Mapping[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, the operators + - * / and parentheses, such as 12*(3+4).

    Returns:
        The value: whole numbers exactly, others with 12 digits.

    Raises:
        ValueError: The expression is too long, is none, or divides by zero.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} work")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("an expression has numbers, + - * / and parentheses, and nothing else")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("the expression cannot be read") from error
    except ZeroDivisionError as error:
        raise ValueError("the expression divides by zero") from error
    return str(value) if value.denominator == 1 else format(float(value), ".12g")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand))
    raise ValueError("an expression has numbers, + - * / and parentheses, and nothing else")
