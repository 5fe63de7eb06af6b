"""The engine that samples on rollout servers.

Requests go to the server with the least to do, siblings of a prompt together. A server that fails loses what
it had not finished to the others; as a completion is determined by its noise key, it is the same wherever it
is sampled, and what a server says of a request that is no longer its own is not heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from queue import Empty, SimpleQueue

from tokenizers import Tokenizer

from covey.activity import Activity
from covey.codes import CODES
from covey.errors import CoveyError, EngineLost, RunFailed
from covey.rollout.engine import Capabilities, Engine, NamedWeights, nothing
from covey.rollout.server.image_send import check_images
from covey.rollout.server.queue import Ask, Queue, parts_of
from covey.rollout.server.remote import (
    Event,
    RolloutServer,
    State,
    Stream,
    ask_later,
    base_of,
    ending,
    gave_up,
    is_behind,
    said,
    tell,
)
from covey.rollout.server.send import send_weights
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import completion_of
from covey.texts import joined, tr
from covey.types import Completion, Finding, Fix, GenerationRequest, Receipt

# A server that failed so often since the last publish is asked no more.
_STRIKES = 3
_ASK_AGAIN_S, _BEHIND_S = 0.5, 0.2
_LOOK_S = 1.0
# How often others are asked for more.
_TURN_S = 0.02


class ServerEngine:
    """Samples on `servers`. `publishes` says whether this process sends the weights; the others then find
    them there. `timeout_s` is how long a server may give no sign, `start` the line that starts one, and
    `adapter_rank` the highest rank of an adapter that every server applies itself. `tokenizer` says where
    completions end at stop strings, whatever tokenizer a server has."""

    given_up = ""

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        activity: Activity,
        *,
        timeout_s: float,
        publishes: bool,
        noise_keys: bool,
        start: str = "covey rollout --model DIR --port PORT",
        adapter_rank: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.on_turn: Callable[[], None] = nothing
        self._servers, self.activity = tuple(servers), activity
        self._timeout_s, self._publishes, self._start = timeout_s, publishes, start
        self._capabilities = Capabilities(
            logprobs=True,
            noise_keys=noise_keys,
            holds_weights=True,
            is_shared=True,
            adapter_rank=adapter_rank,
            swaps=True,
        )
        self._version = 0
        self._next_id = 0
        self._queue = Queue()
        self._is_reading = False
        self._streams: list[Stream] = []
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._aborted: list[Completion] = []
        self._behind_until = 0.0
        self._notices: list[Finding] = []

    @property
    def capabilities(self) -> Capabilities:
        """Return what its servers can do, as far as they have said it."""
        said = [s.status.max_len for s in self._servers if s.status is not None and s.status.max_len]
        return replace(self._capabilities, context=min(said, default=None))

    @property
    def members(self) -> Mapping[str, Engine]:
        """An engine for each server that has the last publish."""
        return {s.address: self._alone(s) for s in self._servers if s.state is State.IN_USE}

    def use_members(self, names: Collection[str]) -> None:
        """Leave out the servers that the publishing process could not confirm: this one, which has only heard
        of the publish, must not find them with a version that nobody has checked. What they run is sampled
        again by the others."""
        for server in self._servers:
            if server.address not in names:
                server.state, server.said = State.OUT, tr("the first rank did not confirm its weights")
        self._requeue([stream for stream in self._streams if stream.server.address not in names])

    def _alone(self, server: RolloutServer) -> ServerEngine:
        engine = ServerEngine(
            (server,),
            self.activity,
            timeout_s=self._timeout_s,
            publishes=self._publishes,
            noise_keys=self.capabilities.noise_keys,
            start=self._start,
            adapter_rank=self.capabilities.adapter_rank,
            tokenizer=self._tokenizer,
        )
        engine._version, engine._notices = self._version, self._notices
        return engine

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where its servers listen."""
        return tuple(server.address for server in self._servers)

    def take_notices(self) -> list[Finding]:
        """What happened to servers since the last call."""
        # Another thread may add to them.
        return [self._notices.pop(0) for _ in range(len(self._notices))]

    # -- sampling

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request beside those of its prefix. ValueError for images where a server takes none."""
        check_images(request, self._servers)
        number = self._next_id
        self._next_id += 1
        self._queue.add([(number, request)])
        return number

    def abort(self, ids: Sequence[int]) -> None:
        """End requests now; what a server had sampled of them is not kept."""
        wanted = set(ids)
        found = self._queue.remove(wanted)
        for stream in self._streams:
            own = {rid: ask for rid, ask in stream.asked.items() if ask[0] in wanted}
            for rid in own:
                del stream.asked[rid]
            found += own.values()
            if own:
                tell(stream.server, ending(own))
        self._aborted += [Completion.aborted(number) for number, _ in found]

    def results(self) -> Iterator[Completion]:
        """Sample until nothing is left; EngineLost (F140) where no server is left that could."""
        self._ask()
        self._is_reading = True
        try:
            while True:
                self.on_turn()
                if not (self._queue or self._streams or self._aborted):
                    return
                yield from self._aborted
                self._aborted.clear()
                self._route()
                self._wait_for()
                self._give_up()
                try:
                    event = self._events.get(timeout=_LOOK_S if self.on_turn is nothing else _TURN_S)
                except Empty:
                    continue
                completion = self._take(event)
                if completion is not None:
                    yield completion
        finally:
            self._is_reading = False
            self.activity.leave_service()
            self._hang_up()

    def _ask(self) -> None:
        """Ask servers of which it is not known whether they have the version."""
        self._behind_until = time.monotonic() + self._timeout_s
        for server in self._servers:
            if server.state is State.ASKED:
                ask_later(server, [], self._events, 0.0)

    def _hang_up(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._queue.clear()

    def _wait_for(self) -> None:
        """Say which servers are waited for."""
        asked = [s.address for s in self._servers if s.state is State.ASKED]
        busy = list(dict.fromkeys(stream.server.address for stream in self._streams))
        self.activity.wait_for_service(", ".join(busy or asked))

    def _route(self) -> None:
        """Send what waits to the servers that have room for it."""
        in_use = [server for server in self._servers if server.state is State.IN_USE]
        if not in_use and not self._streams and not self._is_asked() and self._queue:
            raise EngineLost(self._finding("F140", tr("no rollout server is left")))
        chosen = self._queue.deal(in_use, self._streams)
        for server in in_use:
            self._send(server, chosen.get(server.address, []))

    def _give_up(self) -> None:
        """Move what waits for a server that answers and makes no progress."""
        now = time.monotonic()
        for stream in [s for s in self._streams if now - s.last_sign_at > self._timeout_s]:
            if not stream.is_closed:
                words = tr("it answered, but computed nothing for {timeout_s:g} s", timeout_s=self._timeout_s)
                self._lose(stream, TimeoutError(words))

    def _send(self, server: RolloutServer, asks: Sequence[Ask]) -> None:
        for part in parts_of(asks):
            stream = Stream(server, self._version, part, self._events)
            self._streams.append(stream)
            stream.start()

    def _is_asked(self) -> bool:
        return any(server.state is State.ASKED for server in self._servers)

    def _take(self, event: Event) -> Completion | None:
        """What an event gives: mostly a completion, or something about a server."""
        stream = event.stream
        if stream is None:
            self._take_status(event)
            return None
        if stream.is_closed:
            return None
        if event.line is None:
            self._streams.remove(stream)
            if stream.asked:
                self._lose(stream, event.error)
            return None
        try:
            return self._completion(stream, event.line)
        except WireError as error:
            self._lose(stream, error)
            return None

    def _completion(self, stream: Stream, line: Mapping[str, object]) -> Completion | None:
        if line.keys() == {"done"} and stream.asked:
            raise WireError(tr("it said that it was done, but {num} had not come", num=len(stream.asked)))
        if line.keys() in ({"computed"}, {"done"}):
            return None
        rid = line.get("id")
        if not isinstance(rid, str) or rid not in stream.ids:
            raise WireError(tr("it sent something that it was not asked for: {line}", line=str(line)[:80]))
        if rid not in stream.asked:
            # It was aborted here, or has come already.
            return None
        number, request = stream.asked[rid]
        status = stream.server.status
        assert status is not None
        found = completion_of(
            line, number, request, vocab=status.vocab, newest=self._version, tokenizer=self._tokenizer
        )
        del stream.asked[rid]
        self._queue.ended(request, stream.server)
        return found

    # -- servers that fail, and come back

    def _lose(self, stream: Stream, error: Exception | None) -> None:
        """Move the work of a server that failed to the others, and ask it again unless that is of no use. An
        image that cannot be read here is raised."""
        if isinstance(error, CoveyError):
            raise error
        server = stream.server
        lost = list(dict.fromkeys([stream, *(s for s in self._streams if s.server is server)]))
        ids = list(chain.from_iterable(s.asked for s in lost))
        self._requeue(lost)
        if is_behind(error):
            ask_later(server, [], self._events, _BEHIND_S)
            return
        self._strike(server, said(error), ids, is_final=isinstance(error, WireError))

    def _requeue(self, streams: Collection[Stream]) -> None:
        """Read streams no more, and have others sample what is left of them."""
        for stream in streams:
            stream.close()
            self._queue.add(stream.asked.values())
        self._streams = [stream for stream in self._streams if stream not in streams]

    def _strike(self, server: RolloutServer, words: str, ids: list[str], *, is_final: bool) -> None:
        server.said, server.strikes = words, server.strikes + 1
        if is_final or server.strikes >= _STRIKES:
            server.state = State.OUT
            self._note(server, len(ids))
        else:
            ask_later(server, ids, self._events, _ASK_AGAIN_S * server.strikes)

    def _take_status(self, event: Event) -> None:
        """What a server said when it was asked whether it can be used."""
        server, status = event.server, event.status
        if server.state is not State.ASKED:
            # A publish has come in between.
            return
        if status is None:
            self._strike(server, said(event.error), [], is_final=False)
            return
        if status.version == self._version:
            server.state = State.IN_USE
            return
        if status.is_receiving:
            self._behind_until = time.monotonic() + self._timeout_s
        server.said = f"it has version {status.version}, and version {self._version} is asked for"
        if time.monotonic() < self._behind_until and not server.strikes:
            ask_later(server, [], self._events, _BEHIND_S)
        else:
            server.state = State.OUT
            self._note(server, 0)

    def _note(self, server: RolloutServer, num_unfinished: int) -> None:
        self._notices.append(gave_up(server, num_unfinished, self.activity.step))

    def _finding(self, code: str, what: str) -> Finding:
        said = {server.address: server.said or "nothing" for server in self._servers}
        said_last = joined("; ", [tr("{address}: {said}", address=a, said=s) for a, s in said.items()])
        again = tr(
            "start the servers again with `{start}`, then resume from the last checkpoint", start=self._start
        )
        return Finding(
            code=code,
            seen=tr("{what} ({said_last})", what=what, said_last=said_last),
            why=CODES[code].why,
            cause="",
            fixes=(Fix(text=again),),
            step=self.activity.step,
        )

    # -- publishing

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Send the weights to every server that answers; RunFailed where none takes them (F141), or none was
        left before (F140).

        Servers that were out are asked again. A process that sends nothing takes the version alone.

        What runs goes on by the new weights where a server takes them meanwhile (`ServerStatus.swaps`); else
        it is sampled again, by servers that have them.
        """
        self._version = version
        self._queue.forget_turns()
        if not self._is_reading:
            self._hang_up()
        self._requeue([s for s in self._streams if s.server.status is None or not s.server.status.swaps])
        was_out = {s.address for s in self._servers if s.state is State.OUT}
        for server in self._servers:
            server.state, server.strikes = State.ASKED, 0
        if not self._publishes:
            for stream in self._streams:
                stream.go_on()
            if self._is_reading:
                self._ask()
            return Receipt(version=version)
        receipts = send_weights(self._servers, named_weights, version, self.activity.wait_for_service)
        self._requeue([s for s in self._streams if s.server.address not in receipts])
        for stream in self._streams:
            stream.go_on()
        for server in self._servers:
            if server.address in receipts:
                server.state = State.IN_USE
            elif server.address not in was_out:
                self._note(server, 0)
            if server.group is not None:
                self._notices += server.group.take_notices(self.activity.step)
        self.activity.leave_service()
        if not receipts:
            if len(was_out) == len(self._servers):
                raise RunFailed(self._finding("F140", tr("no rollout server is left")))
            said = tr("no rollout server took version {version} of the weights", version=version)
            raise RunFailed(self._finding("F141", said))
        return Receipt(version=version, members=receipts)

    def held_base(self) -> str:
        """What all servers that answer hold; they are asked at each call."""
        with ThreadPoolExecutor(len(self._servers)) as threads:
            held = {base for base in threads.map(base_of, self._servers) if base is not None}
        return held.pop() if len(held) == 1 else ""

    def rest(self) -> None:
        """Nothing of a server is kept here."""

    def close(self) -> None:
        """Use the servers no longer."""
        self._hang_up()
        for server in self._servers:
            server.leave()
