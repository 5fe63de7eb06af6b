"""Formulas in LaTeX, read into sympy and compared by math-verify; runs in a child of `algebra` alone."""

from __future__ import annotations

import functools
import hashlib
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex

T = TypeVar("T")
# R and r are two names.
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_MOST_READ = 4096
# Numbers that differ by more are not equal, whatever is simplified; six digits of a decimal agree with it.
_TOLERANCE = 2e-6
_EXACT = 1e-45


class Formulas:
    """The formulas that were read, each once; a step of the work takes at most `patience_s` seconds."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.read = functools.lru_cache(_MOST_READ)(self._read)

    def equal(self, gold: str, answer: str) -> bool:
        """Whether both are read and mean the same."""
        golds, answers = self.read(gold), self.read(answer)
        if not golds or not answers or self._within(lambda: _are_different(golds[0], answers[0])):
            return False
        return bool(self._within(lambda: _are_same(golds, answers)))

    def _read(self, latex: str) -> list[Any]:
        """The formula in a list, or an empty list."""
        text = normalize_latex(latex.replace("°", r"^\circ "), config=_NORMALIZATION)
        is_percent = text.endswith(r"\%")
        parsed = self._within(
            lambda: latex2sympy(
                text.removesuffix(r"\%"),
                is_real=not should_treat_as_complex(text),
                convert_degrees=False,
                normalization_config=None,
                conversion_config=_CONVERSION,
            )
        )
        if parsed is None:
            return []
        if isinstance(parsed, sympy.Expr):
            # math-verify takes i for a name.
            names = [s for s in parsed.free_symbols if str(s) == "i"]
            parsed = parsed.subs(dict.fromkeys(names, sympy.I)) if len(names) else parsed
        return [parsed / 100 if is_percent and isinstance(parsed, sympy.Expr) else parsed]

    def _within(self, work: Callable[[], T]) -> T | None:
        """What the work gives; None where it raises or takes too long."""
        # Time of the processor: what else the machine does changes no score.
        signal.signal(signal.SIGVTALRM, _late)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._patience_s)
        try:
            return work()
        # A policy wrote the text: whatever sympy raises on it, the text counts as not read.
        except Exception:  # noqa: BLE001 - a fault in sympy is no fault of the trainer
            return None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _late(number: int, frame: object) -> None:
    raise TimeoutError


def _are_same(golds: list[Any], answers: list[Any]) -> bool:
    gold, answer = golds[0], answers[0]
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq):
        return _is_same_equation(gold, answer)
    if isinstance(gold, sympy.Set) and isinstance(answer, sympy.Set) and _is_same_set(gold, answer):
        return True
    return bool(verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None))


def _is_same_equation(gold: sympy.Eq, answer: sympy.Eq) -> bool:
    """Whether one equation is a multiple of the other: the quotient of what they say to be 0 has one value,
    wherever its symbols are."""
    sides = [e.lhs - e.rhs for e in (gold, answer)]
    symbols = sides[0].free_symbols | sides[1].free_symbols
    quotients = []
    for point in range(4):
        values = {s: _value_of(f"{s}{point}") for s in symbols}
        a, b = (complex(side.subs(values).evalf(20)) for side in sides)
        if 0 in (a, b):
            return a == b
        quotients.append(a / b)
    return all(abs(q - quotients[0]) <= _TOLERANCE * abs(quotients[0]) for q in quotients)


def _is_same_set(gold: sympy.Set, answer: sympy.Set) -> bool:
    return (gold - answer).is_empty is True and (answer - gold).is_empty is True


def _are_different(gold: Any, answer: Any) -> bool:
    """Whether two expressions have different values where their symbols have some fixed ones.

    It spares the search for a form in which they are equal, and tells numbers that are both nearly 0.
    """
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return gold.shape != answer.shape or any(map(_are_different, gold, answer))
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    symbols = gold.free_symbols | answer.free_symbols
    if isinstance(gold, sympy.Symbol) and isinstance(answer, sympy.Symbol):
        return str(gold) != str(answer)
    values = {s: _value_of(str(s)) for s in symbols}
    try:
        if not symbols and not (gold.has(sympy.Float) or answer.has(sympy.Float)):
            # Exact numbers, of whatever size.
            return bool(abs((gold - answer).evalf(20)) > _EXACT * abs(gold.evalf(20)))
        a, b = (complex(e.subs(values).evalf(20)) for e in (gold, answer))
    except (TypeError, ValueError, ArithmeticError, OverflowError):
        return False
    size = max(abs(a), abs(b))
    return 0 < size < float("inf") and abs(a - b) > _TOLERANCE * size


def _value_of(name: str) -> sympy.Rational:
    """A number between 1 and 2 that belongs to a name."""
    return sympy.Rational(int(hashlib.sha256(name.encode()).hexdigest()[:6], 16) | 1, 1 << 24) + 1
