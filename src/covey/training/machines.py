"""What the machines of a run tell each other while it goes on: that they are there, that one of their ranks
has raised an error or failed, that a signal came.

The ranks of one machine leave files for each other (`covey.meeting`). The lowest rank of each machine tells
the other machines what its files say, and writes what they say to files here; it does so through the store in
which the ranks have met. A thread of its own does it, so that nothing else waits for the network.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import exists
from typing import TYPE_CHECKING, NamedTuple

from covey.meeting import RAISED, Meeting

if TYPE_CHECKING:
    from covey.training.link import Met

MEET_S = 60 * 60.0
"""How long the ranks of a run may take to come."""

_EVERY_S = 1.0
# A thread that was not there for so long was stopped itself.
_ASLEEP_S = 5.0
_ANSWER_S = 5.0
# A rank that raises an error before the others have come waits so long for them, to tell them; when rank 0
# ends, so may the store.
_FIRST_WORD_S = 45.0


class Failed(NamedTuple):
    """What ended the run on another machine."""

    rank: int
    host: str
    code: int
    name: str
    seen: str


class Silent(NamedTuple):
    """A machine that gives no sign, its ranks, and for how long."""

    host: str
    ranks: Sequence[int]
    seconds: float


def over_machines(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has spread the run over several machines."""
    here, world = (environment.get(name, "").strip() for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here.isdigit() and world.isdigit() and 0 < int(here) < int(world)


@dataclass(slots=True)
class Machines:
    """The other machines, as one rank sees them; `met` is set once all ranks have found each other, and
    `error` where they have not."""

    place: Meeting
    host: str = field(default_factory=socket.gethostname)
    met: Met | None = None
    error: Exception | None = None
    failed: Failed | None = None
    raised: dict[int, int] = field(default_factory=dict)
    signal: int = 0
    ready: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Event = field(default_factory=threading.Event)
    _words: queue.SimpleQueue[_Word] = field(default_factory=queue.SimpleQueue)
    _has_left: bool = False
    _is_cut_off: bool = False
    _beat: int = 0
    _signs: dict[int, tuple[int, float]] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)
    _contact_at: float = 0.0
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Find the other ranks, and listen to them from then on, in a thread."""
        self._thread = threading.Thread(target=self._run, name="machines", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its machine."""
        return self.met is not None and self._leader(self.place.rank) == self.place.rank

    @property
    def elsewhere(self) -> list[int]:
        """The ranks of other machines; none before they have come."""
        if self.met is None:
            return []
        own = self.met.machines[self.place.rank]
        return [rank for rank, machine in enumerate(self.met.machines) if machine != own]

    def fail_first(self, name: str, seen: str, code: int) -> bool:
        """Whether this rank is the first of all machines to fail; the others hear of it then."""
        word = _Word(json.dumps([self.place.rank, self.host, code, name, seen]))
        self._words.put(word)
        self._wait_until_said(word)
        if self.met is not None and not self._is_cut_off and self._leader(self.place.rank) == self._leader(0):
            # The store may end with this process, and the others look into it every second.
            time.sleep(2 * _EVERY_S)
        return not word.is_late

    def raise_together(self) -> None:
        """Tell that this rank has raised an error, and hear which others have; a rank that has raised alone
        waits for a few seconds."""
        if not self.ready.wait(_FIRST_WORD_S) or self.met is None:
            return
        self._wake.set()
        until = time.monotonic() + _ANSWER_S
        while not self._all_have_raised() and time.monotonic() < until:
            time.sleep(0.05)
        self.mirror()

    def has_refused(self) -> bool:
        """Whether a rank of another machine has raised an error."""
        return bool(self.raised) or any(self.place.has(rank, RAISED) for rank in self.elsewhere)

    def mirror(self) -> None:
        """Leave on this machine what the others have said."""
        for rank, code in [*self.raised.items()]:
            if not self.place.has(rank, RAISED):
                self.place.put_for(rank, RAISED, str(code))
        if self.signal and not exists(self.place.signal):
            self.place.signal.write_text(str(self.signal), encoding="ascii")

    def silent(self) -> list[Silent]:
        """The machines that have given no sign for a second or longer, and have not said that they end."""
        if not self.ready.is_set() or not self.leads:
            return []
        now, found = time.monotonic(), []
        lost_s = now - self._contact_at
        first = self._leader(0)
        for leader in self._leaders():
            if lost_s > 2 * _EVERY_S:
                # Without the store nothing is known of any machine but the one that keeps it.
                seconds = lost_s if leader == first else 0.0
            else:
                seconds = now - self._signs[leader][1]
            if seconds >= _EVERY_S and leader not in self._left:
                found.append(Silent(self.host_of(leader), self._ranks_with(leader), seconds))
        return found

    def host_of(self, rank: int) -> str:
        """The host of a rank; empty before it has come."""
        return "" if self.met is None else self.met.hosts[rank]

    def leave(self) -> None:
        """Let the other machines know that this one ends by itself."""
        if self.leads:
            self._has_left = True
            word = _Word("")
            self._words.put(word)
            self._wait_until_said(word)
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            # It may wait for a store that is gone.
            self._thread.join(_EVERY_S)

    def _wait_until_said(self, word: _Word) -> None:
        self._wake.set()
        until = time.monotonic() + _ANSWER_S
        while not word.is_said.wait(0.05) and not self._is_cut_off and time.monotonic() < until:
            pass

    def _run(self) -> None:
        try:
            # torch, which takes seconds: the main thread checks the command meanwhile.
            from covey.training.link import meet

            machine = f"{self.host}:{self.place.directory}"
            self.met = meet(
                os.environ, MEET_S, host=self.host, machine=machine, goes_on=lambda: not self._stop.is_set()
            )
        except Exception as error:  # noqa: BLE001  the main thread raises it, where it waits for the others
            self.error = error
            return
        finally:
            now = self._contact_at = time.monotonic()
            if self.met is not None:
                self._signs = dict.fromkeys(self._leaders(), (-1, now))
            self.ready.set()
        awake_at = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now - awake_at > _ASLEEP_S:
                self._contact_at = now
                self._signs = {leader: (beat, now) for leader, (beat, _) in self._signs.items()}
            awake_at = now
            try:
                self._exchange(self.met)
            except (RuntimeError, OSError):
                # The store is gone, with the machine that kept it, whose silence is noticed.
                self._is_cut_off = True
                return
            self._wake.wait(_EVERY_S)
            self._wake.clear()

    def _exchange(self, met: Met) -> None:
        words = [self._words.get() for _ in range(self._words.qsize())]
        for word in words:
            if word.text:
                first = met.store.compare_set("failed", "", word.text).decode()
                word.is_late = first != word.text
                if word.is_late:
                    self.failed = Failed(*json.loads(first))
        if self.leads:
            self._tell(met)
        for word in words:
            word.is_said.set()
        if self.leads:
            self._hear(met)

    def _tell(self, met: Met) -> None:
        self._beat += 1
        raised = [rank for rank in self._ranks_with(self.place.rank) if self.place.has(rank, RAISED)]
        own = {
            "beat": self._beat,
            "left": self._has_left,
            "raised": {rank: self.place.word(rank, RAISED) or "1" for rank in raised},
            "signal": self.place.read_signal(),
        }
        met.store.set(f"machine/{self.place.rank}", json.dumps(own))

    def _hear(self, met: Met) -> None:
        if met.store.check(["failed"]):
            failed = Failed(*json.loads(met.store.get("failed")))
            self.failed = failed if failed.rank in self.elsewhere else None
        now = time.monotonic()
        for leader in self._leaders():
            if not met.store.check([f"machine/{leader}"]):
                continue
            said = json.loads(met.store.get(f"machine/{leader}"))
            if self._signs[leader][0] != said["beat"]:
                self._signs[leader] = (said["beat"], now)
            if said["left"]:
                self._left.add(leader)
            self.raised |= {int(rank): int(code) for rank, code in said["raised"].items()}
            self.signal = self.signal or said["signal"]
        self._contact_at = time.monotonic()

    def _all_have_raised(self) -> bool:
        return all(any(rank in self.raised for rank in self._ranks_with(of)) for of in self._leaders())

    def _leaders(self) -> list[int]:
        """The leader of each other machine."""
        return [rank for rank in self.elsewhere if self._leader(rank) == rank]

    def _leader(self, rank: int) -> int:
        """The rank that speaks for the machine of a rank: its lowest."""
        assert self.met is not None
        return self.met.machines.index(self.met.machines[rank])

    def _ranks_with(self, rank: int) -> list[int]:
        """The ranks on the machine of a rank."""
        assert self.met is not None
        return [r for r, machine in enumerate(self.met.machines) if machine == self.met.machines[rank]]


@dataclass(slots=True)
class _Word:
    """What the thread is to tell the other machines: that this rank has failed, and whether another one had
    before it; without a text, that this machine leaves."""

    text: str
    is_late: bool = False
    is_said: threading.Event = field(default_factory=threading.Event)
