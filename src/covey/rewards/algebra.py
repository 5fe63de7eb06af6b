"""Questions to math-verify, asked of a child process: is this LaTeX read, do these two mean the same?

math-verify limits its time by an alarm signal, which only a main thread has, and which no power of a million
digits heeds. A child has a main thread of its own, and the kernel ends it when an answer takes too long; the
next question starts another. So a reward may run on any thread, and no text that a policy writes can hold up
or fill the trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO

LONGEST_FORMULA = 1000
_DEEPEST = 24
_LARGEST_POWER = 1_000_000
_MOST_REMEMBERED = 100_000
_CHILD_BYTES = 8 << 30
# What math-verify may take for one step of its work, and the child's processor time for one question.
_PATIENCE_S = 2
_HARD_LIMIT_S = 6.0
# These ask for a calculation that is not done: not an answer, and without a bound on its time.
_UNDONE = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf)(?![a-zA-Z])")
_POWER = re.compile(r"[\d)}\]!]\s*\^\s*")
_TOWER = re.compile(r"\^\s*\{?[\s\d]+\}?\s*\^")
_FACTORIAL = re.compile(r"(\d*)\s*([)}\]]?)\s*!(\s*!)?")
_BINOMIAL = re.compile(r"\\[dt]?binom")


def is_bounded(latex: str) -> bool:
    """Whether a formula is short, shallow, and holds no power or factorial that fills a computer."""
    if len(latex) > LONGEST_FORMULA or _UNDONE.search(latex) or _TOWER.search(latex):
        return False
    depth = deepest = 0
    for character in latex:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > _DEEPEST:
        return False
    product = 1
    for exponent in _exponents(latex):
        digits = re.findall(r"\d+", exponent)
        # A power in the exponent of a number is a tower: 9^{9^{9}} has 369 million digits.
        if _POWER.search(exponent) or any(len(d) > 5 for d in digits):
            return False
        product *= math.prod(max(int(d), 1) for d in digits)
    if product > _LARGEST_POWER or (_BINOMIAL.search(latex) and re.search(r"\d{4}", latex)):
        return False
    return not any(
        twice or len(digits) > 3 or (bracket and re.search(r"\d\d|\^", latex))
        for digits, bracket, twice in _FACTORIAL.findall(latex)
    )


def _exponents(latex: str) -> Iterator[str]:
    """What stands above each number or bracket that is raised to a power."""
    for power in _POWER.finditer(latex):
        depth = 0
        for i in range(power.end(), len(latex)):
            depth += (latex[i] == "{") - (latex[i] == "}")
            if depth <= 0 and not latex[i : i + 2].isdigit():
                yield latex[power.end() : i + 1]
                break


class Algebra:
    """The child and what it said of golds before."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._parses: dict[str, bool] = {}

    def parses(self, gold: str) -> bool:
        """Whether math-verify reads something in a gold."""
        known = self._parses.get(gold)
        if known is not None:
            return known
        reply = self._ask(gold, None) if is_bounded(gold) else "no"
        # A child that ended has said nothing of the gold.
        if reply:
            if len(self._parses) >= _MOST_REMEMBERED:
                self._parses.clear()
            self._parses[gold] = reply == "yes"
        return reply == "yes"

    def equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds the answer equal to the gold; what it does not read in time is not."""
        return is_bounded(gold) and is_bounded(answer) and self._ask(gold, answer) == "yes"

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                # What was not yet sent to a child that has ended goes nowhere.
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()

    def _ask(self, gold: str, answer: str | None) -> str:
        """The child's yes or no; nothing where it ended over the question."""
        with self._lock:
            child = self._child if self._child is not None and self._child.poll() is None else self._start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps([gold, answer]) + "\n")
                child.stdin.flush()
                reply = child.stdout.readline()
            except BrokenPipeError:
                reply = ""
            except BaseException:
                # A reply that nobody has read would be taken for the next question's.
                self.close()
                raise
            if not reply:
                self.close()
            return reply.strip()

    def _start(self) -> subprocess.Popen[str]:
        self.close()
        atexit.unregister(self.close)
        atexit.register(self.close)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._child.stdout is not None
        if self._child.stdout.readline().strip() != "ready":
            self.close()
            raise RuntimeError("the process that compares formulas did not start: is math-verify installed?")
        return self._child


ALGEBRA = Algebra()


def _serve(questions: IO[str], replies: IO[str]) -> None:
    """Answer yes or no, a line to a line, until the questions end."""
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _CHILD_BYTES if most == resource.RLIM_INFINITY else min(_CHILD_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    # Only its LaTeX reader: the reader of plain expressions evaluates Python.
    reader = [LatexExtractionConfig()]

    def read(text: str) -> list[object]:
        latex = text.replace("°", r"^\circ ")
        return list(parse(f"${latex}$", reader, fallback_mode="no_fallback", parsing_timeout=_PATIENCE_S))

    # The first formula takes the longest: its grammar is built then.
    verify(read("x+1"), read("1+x"), timeout_seconds=None)
    replies.write("ready\n")
    replies.flush()
    gold_text, gold = "", list[object]()
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, _HARD_LIMIT_S)
        wanted, answer = json.loads(line)
        try:
            if wanted != gold_text:
                gold_text, gold = wanted, read(wanted)
            found = read(answer) if gold and answer is not None else []
            yes = bool(gold) and (
                answer is None or (bool(found) and verify(gold, found, timeout_seconds=_PATIENCE_S))
            )
        # Whatever the reader of LaTeX does with a text that nobody chose, the text is then not read.
        except Exception:  # noqa: BLE001 - a fault in sympy is no fault of the trainer
            gold_text, yes = "", False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write("yes\n" if yes else "no\n")
        replies.flush()


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
