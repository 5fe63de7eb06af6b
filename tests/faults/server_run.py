"""`python server_run.py PHASE LEFT RANK PIDS WORDS…`: `covey` in one rank of a run that samples on servers.

In the given phase after step 2 the last LEFT requests of this rank are held back until all others have come.
Then the processes with these ids (as in `12,13`) are killed, and the requests are sent.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence
from typing import Any

from covey.activity import Activity
from covey.cli.main import main
from covey.rollout.server import client
from covey.rollout.server.queue import Ask, Queue

STEP = 2


class Holding(Queue):
    """Holds requests back as long as `is_due` says that it is time for it, and kills the servers once."""

    phase, left, pids = "", 0, ()
    has_killed = False
    activity: Activity

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Ask] = []

    def __len__(self) -> int:
        return super().__len__() + len(self.held)

    def deal(self, servers: Sequence[Any], streams: Collection[Any]) -> dict[str, list[Ask]]:
        now = self.activity.moment.phase, self.activity.step
        if not Holding.has_killed and now == (self.phase, STEP):
            if not self.held:
                numbers = [number for group in self._groups.values() for number, _ in group]
                self.held = self.remove(sorted(numbers)[-self.left :])
            if not self._groups and not streams:
                for pid in self.pids:
                    os.kill(pid, signal.SIGKILL)
                Holding.has_killed = True
                self.add(self.held)
                self.held = []
        return super().deal(servers, streams)


def plant(phase: str, left: int, pids: tuple[int, ...]) -> None:
    """Plant the fault in this process."""
    Holding.phase, Holding.left, Holding.pids = phase, left, pids
    real = client.ServerEngine.__init__

    def begin(self: Any, servers: Any, activity: Activity, **more: Any) -> None:
        real(self, servers, activity, **more)
        Holding.activity = activity
        # Those of a single server, for the canary, hold nothing back.
        if len(servers) > 1:
            self._queue = Holding()

    client.ServerEngine.__init__ = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    phase, left, rank, pids = sys.argv[1:5]
    if os.environ.get("RANK", "0") == rank:
        plant(phase, int(left), tuple(map(int, pids.split(","))) if pids else ())
    sys.exit(main(sys.argv[5:]))
