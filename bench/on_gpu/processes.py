"""A process with a time limit, killed with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def run_limited(
    command: Sequence[str], *, limit_s: float, log: IO[str], environment: Mapping[str, str]
) -> int | None:
    """Run a command with its output into `log`; its exit status, or None where it was killed at the limit."""
    with subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
    ) as process:
        try:
            return process.wait(timeout=max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                kill_tree(process.pid)


def kill_tree(pid: int) -> None:
    """Kill the leader of a group and all that descend from it, sessions of their own included."""
    found = _descendants(pid)
    with contextlib.suppress(ProcessLookupError):
        # Those of its group whose own parent has ended are no descendants any more.
        os.killpg(pid, signal.SIGKILL)
    for number in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            # The name in parentheses may hold spaces; the parent is the second word behind it.
            words = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(words[1]), []).append(int(directory.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found
