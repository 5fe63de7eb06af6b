"""`python ahead_run.py FAULT ROLLOUT NUM RANK PIDS WORDS…`: `covey` in one rank of a run whose servers sample
ahead.

In the rank RANK, when NUM episodes of a rollout have ended and others have not, from rollout number ROLLOUT
on, the processes with these ids (as in `12,13`) are killed, and so is this one with `kill`; with `stop` they
are stopped. With `term` this one is sent SIGTERM when its main thread waits for rollout number ROLLOUT. With
`publish` the processes are killed when a server has taken all tensors of version ROLLOUT.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from covey.cli.main import main
from covey.rollout.ahead import Sampler
from covey.rollout.server.remote import Server
from covey.rollout.shares import Share


def send_in_rollout(rollout: int, num: int, pids: tuple[int, ...], signal_: int) -> None:
    """Send processes a signal in the middle of a rollout, when an episode is taken."""
    real, killed = Share.take, []

    def take(self: Share, number: int, episode: Any) -> None:
        real(self, number, episode)
        is_in_middle = num <= len(self._episodes) < len(self.slots)
        if not killed and is_in_middle and self.slots[0].episode_id.rollout >= rollout:
            killed.append(True)
            for pid in pids:
                os.kill(pid, signal_)

    Share.take = take  # type: ignore[method-assign]


def end_in_rollout(rollout: int) -> None:
    """Send this process SIGTERM a moment after its main thread has begun to wait for a rollout; the file
    `signalled` is made then."""
    real = Sampler.wait

    def end() -> None:
        Path("signalled").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    def wait(self: Any, share: Share, activity: Any) -> None:
        if share.slots[0].episode_id.rollout == rollout:
            threading.Timer(0.05, end).start()
        real(self, share, activity)

    Sampler.wait = wait  # type: ignore[method-assign]


def kill_in_publish(version: int, pids: tuple[int, ...]) -> None:
    """Kill processes before the first server is told that it has a whole version."""
    real, killed = Server.end, []

    def end(self: Any, transfer: str, num_tensors: int, version_: int) -> Any:
        if version_ == version and not killed:
            killed.append(True)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        return real(self, transfer, num_tensors, version_)

    Server.end = end  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, rollout, num, rank, named = sys.argv[1:6]
    pids = tuple(map(int, named.split(","))) if named else ()
    if os.environ.get("RANK", "0") == rank:
        match fault:
            case "servers":
                send_in_rollout(int(rollout), int(num), pids, signal.SIGKILL)
            case "stop":
                send_in_rollout(int(rollout), int(num), pids, signal.SIGSTOP)
            case "kill":
                send_in_rollout(int(rollout), int(num), (*pids, os.getpid()), signal.SIGKILL)
            case "publish":
                kill_in_publish(int(rollout), pids)
            case "term":
                end_in_rollout(int(rollout))
    sys.exit(main(sys.argv[6:]))
