"""torchrun as `covey train` starts it: after a signal it waits for ranks that save, and lets the agents of
other machines go. It gives no report.

The ranks say themselves how they end. torchrun would add a warning for each of them and a traceback.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from typing import Any

from covey.cli.ending import code_after_signal
from covey.cli.ranks import left_code
from covey.cli.signals import CODES
from covey.meeting import EXIT_FILE

_OF_SIGNALS = ("death signal", "closing signal", "termination signal", "failed (exitcode")
# Whoever started this process ends the ranks where they do not end by themselves.
_WAIT_S = 10 * 365 * 24 * 3600
# Ranks save together and end together; an agent whose ranks failed does not come.
_MEET_S = 60


def main() -> int:
    """Run torchrun on the words of this process and return its exit code."""
    from torch.distributed.elastic.agent.server.api import SignalException, logger
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent, PContext
    from torch.distributed.launcher.api import ChildFailedError, LaunchConfig
    from torch.distributed.run import main as torchrun

    # What stops and what signals the ranks have loggers of their own.
    for each in (logger, logging.getLogger(SignalException.__module__)):
        each.addFilter(_is_report)
    option = _option(LaunchConfig)
    codes = _wait_after_signals(PContext, SignalException, waits=not option)
    _meet_after_signals(LocalElasticAgent, SignalException)
    try:
        torchrun([*option, *sys.argv[1:]])
    except SignalException as ended:
        return code_after_signal(int(ended.sigval), codes)
    except ChildFailedError as failed:
        # torchrun itself sends SIGTERM to those that had not failed.
        by_signal = {-each.exitcode for each in failed.failures.values() if each.exitcode < 0} - {*CODES}
        if left_code(os.environ.get(EXIT_FILE, "")) is None and not by_signal:
            raise
        return 128 + max(by_signal) if by_signal else 1
    return 0


def _option(config: Any) -> list[str]:
    """What has torchrun itself wait after a signal; torch has had it since 2.13."""
    names = {field.name for field in dataclasses.fields(config)}
    return ["--shutdown_timeout", str(_WAIT_S)] if "shutdown_timeout" in names else []


def _wait_after_signals(context: Any, of_signal: type[BaseException], *, waits: bool) -> list[int]:
    """Let torchrun end its ranks for a signal once, however often signals come, and return the list in which
    their exit codes stand then; `waits`: for as long as they take. Where one has failed nothing changes.

    torchrun ends them within the handling of the exception that the signal raises.
    """
    codes: list[int] = []
    close = context.close

    def close_for(self: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        if not isinstance(sys.exc_info()[1], of_signal):
            close(self, death_sig, timeout)
            return
        # A second exception would leave the ranks alone, and the system ends them with their parent.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        close(self, death_sig, _WAIT_S if waits else timeout)
        codes.extend(handler.proc.returncode or 0 for handler in self.subprocess_handlers.values())

    context.close = close_for
    return codes


def _meet_after_signals(agent: Any, of_signal: type[BaseException]) -> None:
    """Have an agent that a signal ended meet the others, as one whose ranks have ended does: where the signal
    reached one machine alone, they wait for it for five minutes. Its ranks have ended with theirs by then."""
    shutdown, meet = agent._shutdown, agent._exit_barrier
    met: set[int] = set()

    def meet_once(self: Any) -> None:
        if id(self) not in met:
            met.add(id(self))
            meet(self)

    def shutdown_and_meet(self: Any, *given: Any, **more: Any) -> None:
        shutdown(self, *given, **more)
        has_begun = self._worker_group.group_world_size is not None
        if isinstance(sys.exc_info()[1], of_signal) and has_begun:
            self._exit_barrier_timeout = _MEET_S
            meet_once(self)

    agent._exit_barrier, agent._shutdown = meet_once, shutdown_and_meet


def _is_report(record: logging.LogRecord) -> bool:
    return not any(words in str(record.msg) for words in _OF_SIGNALS)


if __name__ == "__main__":
    sys.exit(main())
