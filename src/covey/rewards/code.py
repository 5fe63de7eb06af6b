"""The `code_reward` reward: the share of a row's tests that the program in a completion passes.

The program runs in a sandbox (`covey.rewards.sandbox`), one for each completion, and each test in a process
of its own. What a test expects stays outside and is compared there: no exit code, no printed word and nothing
that the program does to the sandbox counts but the right output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from covey.rewards.code_tests import CodeTest, UnreadableTests, read_tests
from covey.rewards.fenced import program_of
from covey.rewards.sandbox.host import endings
from covey.rewards.sandbox.layers import Isolation, isolate
from covey.texts import tr

# All tests of a program together, in seconds, and as a share of what one call of a reward may take.
_TOTAL_S, _TOTAL_SHARE = 30.0, 0.6


class RunOptions(Protocol):
    """The options of a run that the reward reads."""

    unsafe_exec: bool
    reward_timeout_s: float


class CodeReward:
    """Runs programs; made once in each worker, where it looks for the layers of the sandbox.

    A machine without them raises `covey.rewards.sandbox.layers.Unisolated`, unless `unsafe_exec` is on.
    """

    def __init__(self, args: RunOptions) -> None:
        self._isolation = isolate(unsafe=args.unsafe_exec)
        self._total_s = min(_TOTAL_S, _TOTAL_SHARE * args.reward_timeout_s)

    def __call__(
        self,
        *,
        completions: Sequence[str],
        verification_info: Sequence[Any] | None = None,
        test_cases: Sequence[Any] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
    ) -> list[float | None]:
        """Score each completion; a row whose tests cannot be read scores None.

        `log_extra("code_tests", …)` receives the result of each: `3 of 5; test 4: exit 1`.
        """
        nothing = [None] * len(completions)
        rows = zip(completions, verification_info or nothing, test_cases or nothing, strict=True)
        scored = [self._score(text, info, cases) for text, info, cases in rows]
        if log_extra is not None:
            log_extra("code_tests", [words for _, words in scored])
        return [score for score, _ in scored]

    def _score(self, text: str, info: Any, cases: Any) -> tuple[float | None, str]:
        try:
            tests = read_tests(info, cases)
        except UnreadableTests as error:
            return None, str(error)
        code = program_of(text)
        if code is None:
            return 0.0, tr("the completion contains no program")
        return grade(self._isolation, code, tests, self._total_s)


def grade(isolation: Isolation, code: str, tests: Sequence[CodeTest], total_s: float) -> tuple[float, str]:
    """The share of the tests that a program passes, and that in words with the first that it does not.

    A test is passed by a program that ends by itself with the expected output. After a test that takes too
    long the rest are not run and count as not passed.
    """
    passed, first = 0, ""
    ran = endings(isolation.way, code, [test.ask for test in tests], isolation.limits, total_s)
    for number, (test, ending) in enumerate(zip(tests, ran, strict=True), start=1):
        is_passed = ending.ended == "exit 0" and test.is_passed(ending.output)
        passed += is_passed
        if not is_passed and not first:
            how = tr("wrong output") if ending.ended == "exit 0" else ending.ended
            first = tr("; test {number}: {how}", number=number, how=how)
    return passed / len(tests), tr(
        "{passed} of {num_tests}{first}", passed=passed, num_tests=len(tests), first=first
    )
