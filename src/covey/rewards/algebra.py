"""Questions to math-verify, asked of child processes: is this LaTeX read, do these two mean the same?

math-verify limits its time by an alarm signal, which only a main thread has, and which no power of a million
digits heeds. A child has a main thread of its own, and the kernel ends it when an answer takes too long; the
next question starts another. So a reward may run on any thread, and no text that a policy writes can stall
the trainer or use up its memory. As many threads as there are children ask side by side.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

from covey.texts import tr

LONGEST_FORMULA = 1000
_DEEPEST = 24
_LARGEST_POWER = 1_000_000
_MOST_REMEMBERED = 100_000
_MOST_CHILDREN = 8
_CHILD_BYTES = 8 << 30
# What math-verify may take for one step of its work, and the child's processor time for one question.
_PATIENCE_S = 2
_HARD_LIMIT_S = 6.0
# These ask for a calculation that is not done: not an answer, and without a bound on its time.
_UNDONE = r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf)(?![a-zA-Z])"
# Nor is a power of a power of a number worked out, or a factorial of a factorial.
_NEVER = re.compile(_UNDONE + r"|\^\s*\{?[\s\d]+\}?\s*\^|!\s*[)}\]]+\s*!")
_POWER = re.compile(r"[\d)}\]!]\s*\^\s*")
_FACTORIAL = re.compile(r"(\d*)\s*([)}\]]?)\s*!(\s*!)?")
_BINOMIAL = re.compile(r"\\[dt]?binom")


def is_bounded(latex: str) -> bool:
    """Whether a formula is short, shallow, and holds no power or factorial that fills a computer."""
    if len(latex) > LONGEST_FORMULA or _NEVER.search(latex):
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
    """Up to `num_children` children, and the answers that they have given so far."""

    def __init__(self, num_children: int = 1) -> None:
        self.num_children = num_children
        # A place for each child: None where it has not started or has ended.
        self._places: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        for _ in range(num_children):
            self._places.put(None)
        self._running: set[subprocess.Popen[str]] = set()
        self._said: dict[tuple[str, str | None], bool] = {}
        atexit.register(self.close)

    def parses(self, gold: str) -> bool:
        """Whether math-verify reads something in a gold."""
        return self._ask(gold, None)

    def equal(self, gold: str, answer: str) -> bool:
        """Whether math-verify finds the answer equal to the gold; what it does not read in time is not."""
        return self._ask(gold, answer)

    def close(self) -> None:
        """End the children that run; a question in progress is answered with no."""
        for child in list(self._running):
            self._end(child)

    def _ask(self, gold: str, answer: str | None) -> bool:
        known = self._said.get((gold, answer))
        if known is not None:
            return known
        is_asked = is_bounded(gold) and (answer is None or is_bounded(answer))
        reply = self._reply(gold, answer) if is_asked else "no"
        # A child that ended has said nothing of the gold, but an answer that ended it is never asked again.
        if reply or answer is not None:
            if len(self._said) >= _MOST_REMEMBERED:
                self._said.clear()
            self._said[gold, answer] = reply == "yes"
        return reply == "yes"

    def _reply(self, gold: str, answer: str | None) -> str:
        """A child's yes or no; nothing where it ended over the question."""
        child = self._places.get()
        try:
            if child is None or child.poll() is not None:
                if child is not None:
                    self._end(child)
                child = self._start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps([gold, answer]) + "\n")
                child.stdin.flush()
                reply = child.stdout.readline().strip()
            except (BrokenPipeError, ValueError):
                # It ended, or another thread has closed it.
                reply = ""
            if not reply:
                self._end(child)
                child = None
            return reply
        except BaseException:
            # A reply that was not read would be taken for that to the next question.
            if child is not None:
                self._end(child)
            child = None
            raise
        finally:
            self._places.put(child)

    def _start(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._running.add(child)
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            self._end(child)
            raise RuntimeError(
                tr("the process that compares formulas did not start: is math-verify installed?")
            )
        return child

    def _end(self, child: subprocess.Popen[str]) -> None:
        self._running.discard(child)
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            # What was not yet sent to a child that has ended goes nowhere.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


def _num_children() -> int:
    """This process's share of the cores, at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(_MOST_CHILDREN, cores // max(int(ranks) if ranks.isdecimal() else 1, 1)))


ALGEBRA = Algebra(_num_children())


def _serve(questions: IO[str], replies: IO[str]) -> None:
    """Answer yes or no, a line to a line, until the questions end."""
    import resource

    from covey.rewards.formulas import Formulas

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _CHILD_BYTES if most == resource.RLIM_INFINITY else min(_CHILD_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    formulas = Formulas(_PATIENCE_S)
    # The first formula takes the longest: its grammar is built then.
    formulas.equal("x+1", "1+x")
    replies.write("ready\n")
    replies.flush()
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, _HARD_LIMIT_S)
        gold, answer = json.loads(line)
        yes = formulas.read(gold) != [] if answer is None else formulas.equal(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write("yes\n" if yes else "no\n")
        replies.flush()


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
