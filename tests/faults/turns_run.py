"""`python turns_run.py FAULT RANK PIDS WORDS…`: `covey` in one rank of a run of episodes of several turns.

After step 2 of the run, in the rank RANK: with `servers` the processes with these ids (as in `12,13`) are
killed when the first second turn has been sampled; with `kill` and `stop` the rank kills or stops itself
while nothing is sampled and answers of the environment are awaited.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from covey.cli.main import main
from covey.rollout.turns import TurnLoop
from covey.training import together

STEP = 2


def kill_in_second_turn(pids: tuple[int, ...]) -> None:
    """Kill servers when an episode is given its second turn."""
    real, killed = TurnLoop._take_turn, []

    def take(self: Any, number: int, completion: Any) -> None:
        real(self, number, completion)
        one = self._running.get(number)
        if not killed and self._activity.step == STEP and one is not None and len(one.turns) == 2:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed.append(True)

    TurnLoop._take_turn = take  # type: ignore[method-assign]


def end_while_waiting(number: signal.Signals) -> None:
    """Send this process a signal while answers are awaited, and nothing else is to do."""
    real = TurnLoop._between_steps

    def between(self: Any) -> None:
        if self._activity.step == STEP and not self._asked and self._num_awaited:
            os.kill(os.getpid(), number)
        real(self)

    TurnLoop._between_steps = between  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, rank, pids = sys.argv[1:4]
    together.STOPPED_S = 2.0
    if os.environ.get("RANK", "0") == rank:
        match fault:
            case "servers":
                kill_in_second_turn(tuple(map(int, pids.split(","))))
            case "kill":
                end_while_waiting(signal.SIGKILL)
            case "stop":
                end_while_waiting(signal.SIGSTOP)
    sys.exit(main(sys.argv[4:]))
