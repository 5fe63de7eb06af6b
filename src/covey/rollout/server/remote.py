"""One rollout server as a run sees it: whether it can be used, and the calls that a publish makes."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from covey.codes import CODES
from covey.rollout.server.bucket import Bucket
from covey.rollout.server.call import FAULTS, Answer, Caller, Refused, words_of
from covey.rollout.server.group import CLOSING_S
from covey.rollout.server.group_send import GroupSender
from covey.rollout.server.image_send import ImageSender, check_images
from covey.rollout.server.sampling_wire import kept_bytes
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import WHOLE, ServerStatus, fingerprints_of, names_of, request_body
from covey.texts import counted, tr
from covey.types import Finding, GenerationRequest, Receipt, Severity

# Seconds in which a server says how it is.
_STATUS_S = 30.0


class State(Enum):
    """Whether a server takes requests: it does, it is being asked whether it can, or it does not until the
    next publish."""

    IN_USE = "in use"
    ASKED = "asked"
    OUT = "out"


class Sampling(Protocol):
    """Requests that run on a server."""

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Completions as they end, each as `completion_body`; meanwhile `{"computed": N}`, the tokens that
        the server has computed, and `{"done": true}` at the end."""
        ...

    def hang_up(self) -> None:
        """End them while another thread reads `lines`."""
        ...

    def close(self) -> None: ...


class RolloutServer(Protocol):
    """A server; `said` is what it failed with last, `strikes` how often it has since the last publish. Its
    calls raise one of FAULTS, or ValueError."""

    state: State
    status: ServerStatus | None
    said: str
    strikes: int

    @property
    def address(self) -> str:
        """Where it listens."""
        ...

    def join(self) -> ServerStatus:
        """Ask how the server is, and use it from now on."""
        ...

    def leave(self) -> None:
        """Use it no longer."""
        ...

    def begin(self, version: int, form: str = WHOLE) -> str:
        """Open a publish of whole weights or of an adapter, and return its id; what still runs goes on by the
        new version where the server `swaps`, and is ended otherwise."""
        ...

    def give(self, transfer: str, bucket: Bucket) -> None:
        """Send tensors."""
        ...

    def end(self, transfer: str, num_tensors: int, version: int) -> Receipt:
        """Close a publish; the receipt says what the server holds."""
        ...

    def sample(self, version: int, requests: Mapping[str, GenerationRequest]) -> Sampling:
        """Sample requests, by their ids."""
        ...

    def abort(self, ids: list[str] | None) -> None:
        """End requests, or all that run for this run."""
        ...

    @property
    def group(self) -> GroupSender | None:
        """What sends through a process group, where that was asked for."""
        ...

    @property
    def image_sent_at(self) -> float:
        """When it has last taken an image, by time.monotonic."""
        ...


@dataclass(slots=True)
class Server:
    """A server that `covey rollout` started."""

    caller: Caller
    name: str
    state: State = State.ASKED
    status: ServerStatus | None = None
    said: str = ""
    strikes: int = 0
    group: GroupSender | None = None
    _attending: Answer | None = None
    _images: ImageSender = field(init=False)

    def __post_init__(self) -> None:
        self._images = ImageSender(self.caller)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.caller.address

    @property
    def image_sent_at(self) -> float:
        """When it has last taken an image, by time.monotonic."""
        return self._images.sent_at

    def join(self) -> ServerStatus:
        """Ask how the server is, and be one of the processes of the run that uses it.

        Raises one of FAULTS where it does not answer, or another run uses it.
        """
        status = self.caller.status(min(self.caller.timeout_s, _STATUS_S))
        if self._attending is None or self._attending.is_over():
            self.leave()
            body = {"run": self.caller.run, "name": self.name}
            answer = self.caller.open("POST", "/v1/attend", body)
            answer.json()
            self._attending = answer
        self.status = status
        return status

    def leave(self) -> None:
        """Use it no longer: what runs there for this run ends with its last process."""
        if self._attending is not None:
            self._attending.close()
            self._attending = None
        if self.group is not None:
            self.group.close(CLOSING_S)

    def begin(self, version: int, form: str = WHOLE) -> str:
        """Open a publish, and return its id; what still runs goes on by the new version, or is ended where
        the server does not take weights meanwhile."""
        if not self.join().swaps:
            self.abort(None)
        body = self.caller.post("/v1/publish/begin", {"version": version, "form": form})
        return str(_of(body, "transfer", str))

    def give(self, transfer: str, bucket: Bucket) -> None:
        """Send tensors: through a process group, or a directory that both sides see, if there is one."""
        assert self.status is not None
        if self.group is not None and self.group.is_open(self.status, transfer, bucket):
            self.group.give(transfer, bucket)
            return
        directory = self.status.directory_here()
        if directory is None:
            self.caller.post(f"/v1/publish/tensors?transfer={transfer}", bucket.data)
            return
        file = directory / f"{transfer}.safetensors"
        try:
            _save(bucket.on_cpu, file)
            self.caller.post("/v1/publish/files", {"transfer": transfer, "file": file.name})
        finally:
            file.unlink(missing_ok=True)

    def end(self, transfer: str, num_tensors: int, version: int) -> Receipt:
        """Close a publish; the receipt says what the server holds."""
        try:
            body = self.caller.post("/v1/publish/end", {"transfer": transfer, "tensors": num_tensors})
        except (*FAULTS, ValueError):
            # The server's workers leave the group where they could not take what came through it.
            if self.group is not None:
                self.group.close()
            raise
        if _of(body, "version", int) != version:
            raise WireError(
                tr(
                    "it serves version {version} after version {sent} was sent",
                    version=body["version"],
                    sent=version,
                )
            )
        return Receipt(
            version=version,
            fingerprints=fingerprints_of(body.get("fingerprints")),
            unread=names_of(body.get("unread", [])),
        )

    def sample(self, version: int, requests: Mapping[str, GenerationRequest]) -> Sampling:
        """Sample requests, by their ids, behind the images that they need."""
        body = {"version": version, "requests": [request_body(request) for request in requests.values()]}
        answer = self._images.open(requests, lambda: self.caller.open("POST", "/v1/generate", body))
        vocab = 0 if self.status is None else self.status.vocab
        answer.line_bytes += kept_bytes(requests.values(), vocab)
        return answer

    def abort(self, ids: list[str] | None) -> None:
        """End requests, or all that run for this run."""
        self.caller.post("/v1/abort", {"ids": ids})


def _save(bucket: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors to a file; OSError where that fails, as on a full disk."""
    try:
        save_file(dict(bucket), str(file))
    except SafetensorError as error:
        raise OSError(
            errno.EIO, tr("{parent} takes no file of weights: {error}", parent=file.parent, error=error)
        ) from error


def _of(body: Any, name: str, kind: type) -> Any:
    value = body.get(name) if isinstance(body, dict) else None
    if type(value) is not kind:
        raise WireError(tr("its answer has {name} {value!r:.60}", name=name, value=value))
    return value


def base_of(server: RolloutServer) -> str | None:
    """The digest of the base that a server holds; None where it does not answer."""
    try:
        return server.join().base
    except (*FAULTS, ValueError):
        return None


Told = TypeVar("Told")


def tell(server: RolloutServer, call: Callable[[RolloutServer], Told]) -> Told | None:
    """Call a server; None where it fails, which takes it out until the next publish."""
    try:
        return call(server)
    except (*FAULTS, ValueError) as error:
        server.said, server.state = words_of(error), State.OUT
        return None


def ending(ids: Collection[str]) -> Callable[[RolloutServer], None]:
    """Return a function that tells a server to abort the requests with these ids."""
    own = list(ids)
    return lambda server: server.abort(own)


@dataclass(eq=False, slots=True)
class Stream:
    """A call of generate that is being read; `asked` are its requests that have not ended, by their ids, and
    `ids` those of all. `sign_at` is when the server last made progress, by time.monotonic."""

    server: RolloutServer
    version: int
    asked: dict[str, tuple[int, GenerationRequest]]
    events: SimpleQueue[Event]
    ids: frozenset[str] = frozenset()
    is_closed: bool = False
    sign_at: float = math.inf
    _sampling: Sampling | None = None
    _computed: int = -1

    def start(self) -> None:
        """Read in a thread of its own."""
        self.ids, self.sign_at = frozenset(self.asked), time.monotonic()
        requests = {rid: request for rid, (_, request) in self.asked.items()}
        name = tr("rollout {address}", address=self.server.address)
        threading.Thread(target=self._read, args=(requests,), name=name, daemon=True).start()

    def _read(self, requests: Mapping[str, GenerationRequest]) -> None:
        error: Exception | None = None
        try:
            for request in requests.values():
                check_images(request, [self.server])
            with closing(self.server.sample(self.version, requests)) as sampling:
                self._sampling = sampling
                if not self.is_closed:
                    for line in sampling.lines():
                        self._see(line)
                        self.events.put(Event(stream=self, server=self.server, line=line))
        except (*FAULTS, ValueError) as found:
            error = found
        # Nothing more is waited for.
        self.sign_at = math.inf
        self.events.put(Event(stream=self, server=self.server, error=error))

    def _see(self, line: Mapping[str, Any]) -> None:
        """A completion is a sign of progress, and a number of computed tokens where it has risen: the time is
        that of the arrival, since lines may wait to be taken."""
        if line.keys() == {"computed"}:
            computed = line["computed"]
            if type(computed) is not int or computed <= self._computed:
                return
            self._computed = computed
        self.sign_at = time.monotonic()

    @property
    def last_sign_at(self) -> float:
        """When the server last made progress, or took an image of a request that is still to be sent."""
        return max(self.sign_at, self.server.image_sent_at)

    def go_on(self) -> None:
        """Wait for progress anew: a publish has held the server up."""
        if self.sign_at != math.inf:
            self.sign_at = time.monotonic()

    def close(self) -> None:
        """Read no more of it; the server ends what is left."""
        self.is_closed = True
        if self._sampling is not None:
            self._sampling.hang_up()

    @property
    def num_tokens(self) -> int:
        """The most tokens that its requests have still to come."""
        return sum(
            len(request.prompt_token_ids) + request.sampling.max_new_tokens
            for _, request in self.asked.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What came of a call: a line of a stream, or its end, or (without a stream) the status of a server that
    was asked."""

    server: RolloutServer
    stream: Stream | None = None
    line: Mapping[str, Any] | None = None
    error: Exception | None = None
    status: ServerStatus | None = None


def ask_later(server: RolloutServer, ids: list[str], events: SimpleQueue[Event], delay_s: float) -> None:
    """Ask a server whether it can be used, after `delay_s`, and end there what it may still run."""

    def ask() -> None:
        try:
            status = server.join()
            if ids:
                server.abort(ids)
            events.put(Event(server=server, status=status))
        except (*FAULTS, ValueError) as error:
            events.put(Event(server=server, error=error))

    server.state = State.ASKED
    timer = threading.Timer(delay_s, ask)
    timer.daemon = True
    timer.start()


def is_behind(error: BaseException | None) -> bool:
    """Whether a server refused because it has another version than was asked for."""
    return isinstance(error, Refused) and error.status == 409 and "version" in error.body


def said(error: BaseException | None) -> str:
    """What a stream ended with, in words."""
    return tr("its answer ended early") if error is None else words_of(error)


def gave_up(server: RolloutServer, num_unfinished: int, step: int) -> Finding:
    """Return what is said of a server that is not used again before the next publish."""
    count = counted(num_unfinished, "completion")
    unfinished = tr("; it had not finished {count}", count=count) if num_unfinished else ""
    seen = tr(
        "{address} is not used again before the next publish: {said}{unfinished}",
        address=server.address,
        said=server.said,
        unfinished=unfinished,
    )
    why = CODES["W180"].why
    return Finding(code="W180", seen=seen, why=why, cause="", severity=Severity.WARNING, step=step)
