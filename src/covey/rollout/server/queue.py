"""Requests that wait for a server, and which of the servers they are dealt to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.rollout.server.media_wire import IMAGES_OF_CALL
from covey.rollout.server.remote import RolloutServer, Stream
from covey.rollout.server.wire import REQUESTS
from covey.types import GenerationRequest, TurnId

Ask = tuple[int, GenerationRequest]


@dataclass(slots=True)
class Queue:
    """Requests by their prefixes, as siblings share a prefill; and which server has an earlier turn, by its
    address."""

    _groups: dict[tuple[tuple[int, ...], tuple[Any, ...]], deque[Ask]] = field(default_factory=dict)
    _server_of: dict[TurnId, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many prefixes wait."""
        return len(self._groups)

    def add(self, asks: Collection[Ask]) -> None:
        """Queue requests beside those of their prefix."""
        for number, request in asks:
            self._groups.setdefault(request.prefix, deque()).append((number, request))

    def remove(self, numbers: Collection[int]) -> list[Ask]:
        """Take requests out by their numbers; returns those that waited."""
        found = [ask for queue in self._groups.values() for ask in queue if ask[0] in numbers]
        self._groups = {
            prefix: left
            for prefix, queue in self._groups.items()
            if (left := deque(a for a in queue if a[0] not in numbers))
        }
        return found

    def clear(self) -> None:
        """Nothing waits any more."""
        self._groups.clear()

    def ended(self, request: GenerationRequest, server: RolloutServer) -> None:
        """A server has sampled a request, and keeps it where it may go on."""
        if request.may_go_on:
            self._server_of[request.turn] = server.address

    def forget_turns(self) -> None:
        """No server has an earlier turn any more."""
        self._server_of.clear()

    def deal(self, servers: Sequence[RolloutServer], streams: Collection[Stream]) -> dict[str, list[Ask]]:
        """Give what waits to the servers, by their addresses. A further turn waits for the server that has
        the turn that it extends; all else goes to the one with the least to do among those that have room."""
        chosen: dict[str, list[Ask]] = {}
        tokens = {s.address: sum(o.num_tokens for o in streams if o.server is s) for s in servers}
        rows = {s.address: sum(len(o.asked) for o in streams if o.server is s) for s in servers}
        # Twice as many as it decodes at once: a row that ends is followed at once by another.
        most = {s.address: 2 * _rows_of(s) for s in servers}
        room = {address for address in most if 2 * rows[address] <= most[address]}
        # Evaluations first, which are waited for, and then the earliest rollouts.
        for prefix in sorted(self._groups, key=lambda prefix: _urgency(self._groups[prefix][0])):
            waiting = self._groups[prefix]
            while waiting:
                held = self._server_that_has(waiting[0][1])
                if held not in most:
                    address = min(room, key=tokens.__getitem__, default=None)
                else:
                    address = held if rows[held] < most[held] else None
                if address is None:
                    break
                group = [waiting.popleft() for _ in range(min(len(waiting), REQUESTS))]
                # Where the server fails, what it had not finished may go to any other.
                self._forget([request for _, request in group])
                chosen.setdefault(address, []).extend(group)
                tokens[address] += sum(len(r.prompt_token_ids) + r.sampling.max_new_tokens for _, r in group)
                rows[address] += len(group)
                if rows[address] >= most[address]:
                    room.discard(address)
            if not waiting:
                del self._groups[prefix]
        return chosen

    def _server_that_has(self, request: GenerationRequest) -> str | None:
        return None if request.extends is None else self._server_of.get(request.extends)

    def _forget(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.extends is not None:
                self._server_of.pop(request.extends, None)


def parts_of(asks: Sequence[Ask]) -> Iterator[dict[str, Ask]]:
    """Yield the requests of each call by their ids: as many as a call may have, and as many images."""
    part: dict[str, Ask] = {}
    keys: set[str] = set()
    for ask in asks:
        more = {medium.key for medium in ask[1].media} - keys
        has_too_many = bool(more) and len(keys) + len(more) > IMAGES_OF_CALL
        if part and (len(part) == REQUESTS or has_too_many):
            yield part
            part, keys = {}, set()
        part[ask[1].turn.text] = ask
        keys |= {medium.key for medium in ask[1].media}
    if part:
        yield part


def _rows_of(server: RolloutServer) -> int:
    return 1 if server.status is None else max(1, server.status.rows)


def _urgency(ask: Ask) -> tuple[bool, int]:
    turn = ask[1].turn
    return turn.split == "train", turn.rollout
