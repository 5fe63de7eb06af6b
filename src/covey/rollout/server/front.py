"""The state of a rollout server: who uses it, what runs, and one thread that calls the engine.

HTTP's threads call the methods of a `Front`; the engine is called by the thread within `serve` alone. Between
two of its steps the engine calls `on_turn`, which takes what has come meanwhile.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from covey.models.adapter_shapes import is_of_adapter
from covey.rollout.engine import ServedEngine
from covey.rollout.server.images import HeldImages
from covey.rollout.server.metrics import Counts, metrics_text
from covey.rollout.server.transfer import Transfer, TransferEnded
from covey.rollout.server.wire import ADAPTER, NO_VERSION, ServerStatus
from covey.types import Completion, GenerationRequest, Receipt

if TYPE_CHECKING:
    from covey.rollout.server.group import GroupPlace

# Seconds in which an engine takes a bucket of tensors, and in which it ends what was aborted.
_TAKE_S, _ABORT_S = 600.0, 10.0


class Refusal(Exception):
    """Raised where a call is refused, with HTTP's status and what is said beside `error`."""

    def __init__(self, status: int, error: str, **more: Any) -> None:
        self.status, self.body = status, {"error": error, **more}
        super().__init__(error)


@dataclass(slots=True)
class Call:
    """Holds the completions of one call of generate, in the order in which they ended."""

    requests: Mapping[str, GenerationRequest]
    version: int
    ended: SimpleQueue[tuple[str, Completion]] = field(default_factory=SimpleQueue)
    num_computed: int = -1

    def next(self, timeout_s: float) -> tuple[str, Completion] | None:
        """Return the next completion with its id; None where none ended in time."""
        try:
            return self.ended.get(timeout=timeout_s)
        except Empty:
            return None


class GroupWorkers(Protocol):
    """The protocol of an engine's workers that are separate processes and ranks of a group; the engine's
    thread calls it."""

    def join(self, place: GroupPlace) -> None:
        """Join a process group as its ranks from 1 on; ValueError where one of them fails."""
        ...

    def leave(self) -> None:
        """Leave the process group, if the engine is in one."""
        ...


@dataclass(slots=True)
class _User:
    """Holds the run that uses the server, and how many of its processes do."""

    run: str
    name: str
    processes: int = 0


class Front:
    """Serves an engine to one run at a time. `about` describes the engine; its version is kept here.

    `ends_with_run`: `serve` returns once the run that used the server has ended. `workers` take the place of
    this process in a group, and `images` are those of requests, where the model takes any.
    """

    def __init__(
        self,
        engine: ServedEngine,
        about: ServerStatus,
        *,
        ends_with_run: bool = False,
        workers: GroupWorkers | None = None,
        images: HeldImages | None = None,
    ) -> None:
        self._workers, self.images = workers, images
        self._engine, self._about = engine, replace(about, version=NO_VERSION)
        self._ends_with_run = ends_with_run
        engine.on_turn = self._turn
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._user: _User | None = None
        self._transfer: Transfer | None = None
        self._waiting: Transfer | None = None
        # The call of each id that is queued or runs, and engine's numbers both ways.
        self._running: dict[str, Call] = {}
        self._number_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._counts = Counts()
        self._is_closed = False

    # -- by the threads of HTTP

    def status(self) -> ServerStatus:
        """Return what the server is, which version it has, and which run uses it."""
        with self._changed:
            name = self._user.name if self._user is not None else ""
            is_receiving = self._transfer is not None and not self._transfer.has_failed
            return replace(self._about, run=name, is_receiving=is_receiving)

    def metrics(self) -> str:
        """Return counters and gauges of the server, as Prometheus reads them."""
        with self._changed:
            return metrics_text(
                self._counts,
                unfinished=len(self._running),
                rows=self._about.rows,
                computed=self._engine.num_computed,
                version=self._about.version,
                processes=0 if self._user is None else self._user.processes,
            )

    def attend(self, run: str, name: str) -> None:
        """Count a process of a run, which has the server to itself from then on; Refusal (409) for another
        run."""
        with self._changed:
            if self._user is None:
                self._user = _User(run, name)
            if self._user.run != run:
                raise Refusal(409, f"the run {self._user.name} uses this server", run=self._user.name)
            self._user.processes += 1

    def leave(self, run: str) -> None:
        """Count a process of this run as gone; after the last one, end the requests of the run."""
        with self._changed:
            if self._user is None or self._user.run != run:
                return
            self._user.processes -= 1
            if self._user.processes:
                return
            self._user = None
            self._abort(list(self._running))
            self._end_transfer()
            if self._workers is not None:
                self._post(self._workers.leave)
            if self.images is not None:
                self.images.clear()
            if self._ends_with_run:
                self._is_closed = True
            self._changed.notify_all()

    def check_user(self, run: str) -> None:
        """Refuse a run that does not use the server."""
        with self._changed:
            self._check_user(run)

    def check_open(self, run: str, transfer: str) -> None:
        """Refuse what belongs to no open publish."""
        self._open(run, transfer)

    def uses(self, run: str) -> bool:
        """Whether a run uses the server."""
        with self._changed:
            return self._user is not None and self._user.run == run

    def _check_user(self, run: str) -> None:
        if self._user is None or self._user.run != run:
            name = self._user.name if self._user is not None else ""
            said = f"the run {name} uses this server" if name else "no run attends; call /v1/attend first"
            raise Refusal(409, said, run=name)

    def generate(self, run: str, version: int, requests: Mapping[str, GenerationRequest]) -> Call:
        """Queue requests; the completions come in the call's `next`."""
        with self._changed:
            self._check_user(run)
            if version != self._about.version or version == NO_VERSION:
                raise Refusal(
                    409,
                    f"version {version} is asked for, and this server has {self._version_words()}",
                    version=self._about.version,
                )
            if twice := [rid for rid in requests if rid in self._running]:
                raise Refusal(409, f"{twice[0]} is running already", ids=twice)
            call = Call(requests, version)
            self._running.update(dict.fromkeys(requests, call))
            self._counts.requests += len(requests)
            self._post(lambda: self._submit(call))
            return call

    def _version_words(self) -> str:
        held = self._about.version
        return f"version {held}" if held != NO_VERSION else "no whole version"

    def progress(self, call: Call) -> int | None:
        """Return tokens that the engine has computed since it started; None where there are no more of them
        than when this was last asked for the call."""
        before, call.num_computed = call.num_computed, self._engine.num_computed
        return call.num_computed if before != call.num_computed else None

    def drop(self, call: Call) -> None:
        """End what is left of a call that nobody reads any more."""
        with self._changed:
            self._abort([rid for rid in call.requests if self._running.get(rid) is call])

    def abort(self, run: str, ids: Sequence[str] | None) -> int:
        """End requests by their ids, or all of them; returns how many ran."""
        with self._changed:
            self._check_user(run)
            return self._abort([r for r in (self._running if ids is None else ids) if r in self._running])

    def _abort(self, ids: Sequence[str]) -> int:
        own = list(ids)
        if own:
            self._post(lambda: self._stop(own))
        return len(own)

    def begin(self, run: str, version: int, form: str) -> Transfer:
        """Open the publish of a version. The former version is gone from here on, as its weights are
        overwritten. Requests that run continue by the new one where the engine can swap weights; else they
        must have ended."""
        with self._changed:
            self._check_user(run)
            if form == ADAPTER and not self._about.adapter_rank:
                raise Refusal(400, "this server takes whole weights; an adapter is added before it is sent")
            if form == ADAPTER and not self._about.base:
                raise Refusal(400, "this server has no base that an adapter belongs to")
            may_run = self._about.swaps and form != ADAPTER
            if not may_run and not self._changed.wait_for(lambda: not self._running, timeout=_ABORT_S):
                raise Refusal(409, f"{len(self._running)} completions of {self._version_words()} run")
            self._end_transfer()
            self._about = replace(self._about, version=NO_VERSION)
            self._transfer = self._waiting = Transfer(run, version, form)
            self._changed.notify_all()
            return self._transfer

    def join_group(self, run: str, transfer: str, place: GroupPlace) -> None:
        """Have the engine's workers, where they are processes of their own, be in a group; the publish fails
        where one of them cannot. The run that waits there sees whether they come."""
        opened, workers = self._open(run, transfer), self._workers
        if workers is not None:
            opened.ask(lambda: workers.join(place))

    def give(self, run: str, transfer: str, bucket: Mapping[str, Tensor]) -> None:
        """Hand over tensors of a publish."""
        opened = self._open(run, transfer)
        if opened.form == ADAPTER and (odd := [name for name in bucket if not is_of_adapter(name)]):
            raise Refusal(400, f"{odd[0]} is no matrix of an adapter, which this publish is of")
        self._told(opened, lambda t: t.give(bucket, _TAKE_S))

    def end(self, run: str, transfer: str, num_tensors: int) -> Receipt:
        """End a publish: the server has its version from here on."""
        receipt: Receipt = self._told(self._open(run, transfer), lambda t: t.finish(num_tensors, _TAKE_S))
        return receipt

    def _open(self, run: str, transfer: str) -> Transfer:
        with self._changed:
            self._check_user(run)
            if self._transfer is None or self._transfer.id != transfer:
                raise Refusal(409, "this publish is not open: another one has taken its place, or it failed")
            return self._transfer

    def _told(self, transfer: Transfer, do: Callable[[Transfer], Any]) -> Any:
        try:
            return do(transfer)
        except ValueError as error:
            raise Refusal(400, str(error)) from error
        except TimeoutError as error:
            raise Refusal(503, str(error)) from error

    def _end_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.end()
            self._transfer = self._waiting = None

    def close(self) -> None:
        """Have `serve` return."""
        with self._changed:
            self._is_closed = True
            self._end_transfer()
            self._changed.notify_all()

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._changed.notify_all()

    # -- by the engine's thread

    def serve(self) -> None:
        """Call the engine for who asks, until the server closes; errors of the engine are raised."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._waiting or self._is_closed)
                if self._is_closed:
                    return
            self._turn()
            if self._id_of:
                for completion in self._engine.results():
                    self._deliver(completion)

    def _turn(self) -> None:
        """Take what has come: called between two steps of the engine."""
        self._empty_inbox()
        with self._changed:
            transfer, self._waiting = self._waiting, None
        if transfer is not None:
            self._take(transfer)
            # Where it failed, what runs ends before another step.
            self._empty_inbox()

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _submit(self, call: Call) -> None:
        for rid, request in call.requests.items():
            number = self._engine.submit(request)
            self._number_of[rid], self._id_of[number] = number, rid

    def _stop(self, ids: Sequence[str]) -> None:
        self._engine.abort([self._number_of[rid] for rid in ids if rid in self._number_of])

    def _deliver(self, completion: Completion) -> None:
        with self._changed:
            rid = self._id_of.pop(completion.request_id)
            del self._number_of[rid]
            self._counts.count_completion(completion)
            self._running.pop(rid).ended.put((rid, completion))
            self._changed.notify_all()

    def _take(self, transfer: Transfer) -> None:
        """Have the engine take the weights of a publish."""
        try:
            receipt = self._engine.publish(transfer.tensors(), transfer.version)
        except TransferEnded:
            self._close_transfer(transfer, NO_VERSION)
        except ValueError as error:
            self._close_transfer(transfer, NO_VERSION)
            transfer.fail(str(error))
        except BaseException as error:
            transfer.fail(f"the engine failed: {type(error).__name__}: {error}")
            raise
        else:
            self._close_transfer(transfer, transfer.version)
            transfer.succeed(receipt)

    def _close_transfer(self, transfer: Transfer, version: int) -> None:
        with self._changed:
            self._counts.count_publish(time.monotonic() - transfer.begun, is_whole=version != NO_VERSION)
            self._about = replace(self._about, base=self._engine.held_base())
            if self._transfer is transfer:
                self._about = replace(self._about, version=version)
                # A publish that failed stays open, so that the next call hears why.
                self._transfer = None if version != NO_VERSION else self._transfer
            if version == NO_VERSION:
                # They would go on by a mixture of two versions.
                self._abort(list(self._running))


def new_instance() -> str:
    """Return the id of a server's process."""
    return secrets.token_hex(8)
