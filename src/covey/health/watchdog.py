"""A thread that sees when the main thread no longer gets on, says where every rank is, and ends the run.

Times are learned: a phase may take FACTOR times its slowest visit so far, the first visits excluded, as in
NVIDIA's resiliency extension (safety_factor 5).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from os.path import isdir, isfile
from pathlib import Path

from covey.activity import EXCLUDED, Activity, Moment
from covey.health.hang import Status, finding_of, next_hang, read_status, status_path, write_status
from covey.health.stacks import is_debugged, top_frame, write_stacks
from covey.types import Finding

FACTOR = 5.0
LIVE = "live"
"""The directory of a run in which `covey doctor` asks for stacks, in a file `ask` that holds a word."""

# A watchdog that has not looked for this long was stopped itself, or the whole process was.
_ASLEEP_S = 10.0
# A status that does not change for this long is of a process that is stopped or gone.
_STALE_S = 30.0
_LAST_RESORT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a phase may take: `first_s` until its times are known, then FACTOR times its slowest, at least
    `floor_s`."""

    first_s: float = 30 * 60.0
    floor_s: float = 60.0

    def seconds(self, visits: int, slowest: float) -> float:
        """The limit after so many visits, in seconds."""
        return self.first_s if visits <= EXCLUDED else max(self.floor_s, FACTOR * slowest)


# These come seldom, and what they take depends on the disk or on another amount of data each time.
SELDOM = Allowance(first_s=4 * 3600.0, floor_s=30 * 60.0)


def allowances(
    reward_timeout_s: float, server_timeout_s: float = 0.0, *, by_function: bool = False
) -> dict[str, Allowance]:
    """The phases that differ from the rest; a late reward has a time limit and a message of its own, and so
    has a rollout server (0: there is none), which is given up when it has been silent for so long. Where
    rollouts are made `by_function`, what it waits for may take another time each time."""
    reward = Allowance(
        first_s=30 * 60.0 + 2 * reward_timeout_s,
        floor_s=60.0 + 2 * reward_timeout_s,
    )
    found = {"start": SELDOM, "reward": reward, "evaluate": SELDOM, "save": SELDOM}
    if server_timeout_s:
        floor_s = 60.0 + 3 * server_timeout_s
        sampling = Allowance(first_s=30 * 60.0 + floor_s, floor_s=floor_s)
        found |= {"rollout": sampling, "publish": sampling}
    if by_function:
        found["rollout"] = SELDOM
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What a watchdog knows of its process.

    `report` records and prints a finding; `leave(leads, all_leave)` ends the process, or returns once it has
    interrupted the main thread of a program that has to go on; without `ends_hangs` it only says how it is;
    `memory` says what it
    holds on its device, and `collectives` gives what the device's library remembers of them, as JSON.
    """

    activity: Activity
    output_dir: Path
    rank: int
    world: int
    allowances: Mapping[str, Allowance]
    report: Callable[[Finding], None]
    leave: Callable[[bool, bool], None]
    ends_hangs: bool = True
    memory: Callable[[], Mapping[str, float]] = dict
    collectives: Callable[[], bytes] = bytes
    poll_s: float = 1.0
    patience_s: float = 15.0
    sleep: Callable[[float], None] = time.sleep


@dataclass(slots=True)
class _Peer:
    """The last sign of another rank, and when it came."""

    beat: int
    since: float


@dataclass(slots=True)
class Watchdog:
    """Polls one process every `poll_s` seconds, from a thread of its own."""

    watched: Watched
    _hang: Path = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _beat: int = 0
    _polled_at: float = 0.0
    _moment: Moment | None = None
    _given_up: Moment | None = None
    _slept: float = 0.0
    _answered: str = ""
    _peers: dict[int, _Peer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Every rank names the same directory: it is chosen before any of them can make one.
        self._hang = next_hang(self.watched.output_dir)
        self._polled_at = self.watched.activity.clock()

    def start(self) -> None:
        """Start the thread that polls."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a run that has ended has no status."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            status_path(self.watched.output_dir, self.watched.rank).unlink(missing_ok=True)

    def _run(self) -> None:
        directory = -1
        with contextlib.suppress(OSError):
            # `covey doctor` finds the run of a process by the directory that it holds open.
            directory = os.open(self.watched.output_dir, os.O_RDONLY)
        while not self._stop.wait(self.watched.poll_s):
            self.poll()
        if directory >= 0:
            os.close(directory)

    def poll(self) -> None:
        """Write the status of the main thread, answer who asks, and end the process where it is stuck."""
        self._count_sleep()
        status = self._status()
        # A disk that is full or gone takes the status and not the run.
        with contextlib.suppress(OSError):
            write_status(status_path(self.watched.output_dir, self.watched.rank), status)
            self._answer(status)
        if isdir(self._hang) or self._is_stuck(status):
            self._end(status)

    def _count_sleep(self) -> None:
        """Seconds in which the process was stopped are not held against the main thread."""
        now, moment = self.watched.activity.clock(), self.watched.activity.moment
        gap, self._polled_at = now - self._polled_at, now
        if moment is not self._moment:
            self._moment, self._slept = moment, 0.0
        elif gap > _ASLEEP_S + self.watched.poll_s:
            self._slept += gap

    def _status(self) -> Status:
        activity = self.watched.activity
        moment = self._moment
        assert moment is not None
        self._beat += 1
        allowance = self.watched.allowances.get(moment.phase, Allowance())
        return Status(
            rank=self.watched.rank,
            world=self.watched.world,
            pid=os.getpid(),
            host=socket.gethostname(),
            phase=moment.phase,
            step=activity.step,
            micro=moment.micro,
            num_micro=moment.num_micro,
            seconds=round(max(0.0, self._polled_at - moment.progress - self._slept), 3),
            allowed_s=allowance.seconds(*activity.spans.get(moment.phase, (0, 0.0))),
            collective=moment.collective,
            num_collectives=activity.num_collectives,
            frame=top_frame(activity.thread),
            memory=self.watched.memory(),
            beat=self._beat,
            service=moment.service,
        )

    def _is_stuck(self, status: Status) -> bool:
        if not self.watched.ends_hangs or self._moment is self._given_up:
            return False
        if status.seconds <= status.allowed_s or is_debugged(self.watched.activity.thread):
            return False
        # A rank that only waits leaves the judgement to those that work, as long as they can judge.
        return not (status.collective and self._another_rank_works(status))

    def _another_rank_works(self, own: Status) -> bool:
        return any(self._rank_works(rank, own) for rank in range(own.world) if rank != own.rank)

    def _rank_works(self, rank: int, own: Status) -> bool:
        peer = read_status(status_path(self.watched.output_dir, rank))
        if peer is None:
            # On a disk that is not shared others cannot be seen; they get the time of a first visit.
            return own.seconds <= max(own.allowed_s, Allowance().first_s)
        known = self._peers.get(rank)
        if known is None or known.beat != peer.beat:
            known = self._peers[rank] = _Peer(peer.beat, self._polled_at)
        return not peer.collective and self._polled_at - known.since < _STALE_S

    def _answer(self, status: Status) -> None:
        """Write the stacks for who asks for them; the main thread does not notice."""
        ask = self.watched.output_dir / LIVE / "ask"
        word = ask.read_text(encoding="utf-8").strip() if isfile(ask) else ""
        if word and word != self._answered:
            self._answered = word
            self._write_stacks(ask.with_name(f"{word}-rank-{status.rank}.txt"), status)

    def _write_stacks(self, path: Path, status: Status) -> None:
        part = path.with_suffix(".part")
        write_stacks(part, status.line(), self.watched.activity.thread)
        os.replace(part, path)

    def _end(self, status: Status) -> None:
        """Write this rank's files, wait for those of the others, have the first of them speak, and leave."""
        last_resort = threading.Timer(_LAST_RESORT_S, self.watched.leave, (False, False))
        last_resort.daemon = True
        last_resort.start()
        leads, all_leave = True, False
        try:
            self._hang.mkdir(exist_ok=True)
            self._write_stacks(self._hang / f"rank-{status.rank}.txt", status)
            write_status(self._hang / f"rank-{status.rank}.json", status)
            statuses = self._gather()
            leads, all_leave = statuses[0].rank == status.rank, len(statuses) == status.world
            conclusion = self._hang / "finding.json"
            if leads:
                finding = finding_of(statuses, self._hang)
                self.watched.report(finding)
                conclusion.write_text(json.dumps(asdict(finding), indent=2) + "\n", encoding="utf-8")
            else:
                self._wait_for(conclusion.is_file)
            # Last, for it asks a library that may be what is stuck.
            if trace := self.watched.collectives():
                (self._hang / f"nccl-rank-{status.rank}.json").write_bytes(trace)
        except OSError as error:
            os.write(2, f"covey: rank {status.rank} is stuck, {status.line()}, {error}\n".encode())
        finally:
            self.watched.leave(leads, all_leave)
            last_resort.cancel()
            self._given_up, self._hang = self._moment, next_hang(self.watched.output_dir)

    def _gather(self) -> list[Status]:
        """The statuses of the ranks that answer in time, in rank order."""
        found: dict[int, Status] = {}

        def all_have_answered() -> bool:
            for rank in set(range(self.watched.world)) - found.keys():
                status = read_status(self._hang / f"rank-{rank}.json")
                if status is not None:
                    found[rank] = status
            return len(found) == self.watched.world

        self._wait_for(all_have_answered)
        return [found[rank] for rank in sorted(found)]

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + self.watched.patience_s
        while not is_there() and time.monotonic() < until:
            self.watched.sleep(min(0.1, self.watched.poll_s))


def flush_output() -> None:
    """Write out what is printed, unless the main thread holds it: it is stuck in there, maybe."""
    thread = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    thread.start()
    thread.join(1.0)
