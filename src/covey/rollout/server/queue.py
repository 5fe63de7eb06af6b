"""Requests that wait for a server, and which of the servers they are dealt to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        """Give what waits to the servers that have room, by their addresses: to the one that has the turn
        that a request extends, and else to the one with the least to do."""
        chosen: dict[str, list[Ask]] = {}
        tokens = {s.address: sum(o.num_tokens for o in streams if o.server is s) for s in servers}
        rows = {s.address: sum(len(o.asked) for o in streams if o.server is s) for s in servers}
        room = {s.address: s for s in servers if rows[s.address] <= _rows_of(s)}
        # Evaluations first, which are waited for, and then the earliest rollouts.
        order = deque(sorted(self._groups, key=lambda prefix: _urgency(self._groups[prefix][0])))
        while order and room:
            prefix = order[0]
            waiting = self._groups[prefix]
            address = self._place(waiting[0][1], room, tokens)
            group = [waiting.popleft() for _ in range(min(len(waiting), REQUESTS))]
            if not waiting:
                del self._groups[order.popleft()]
            chosen.setdefault(address, []).extend(group)
            tokens[address] += sum(len(r.prompt_token_ids) + r.sampling.max_new_tokens for _, r in group)
            rows[address] += len(group)
            # Twice as many as it decodes at once: a row that ends is followed at once by another.
            if rows[address] >= 2 * _rows_of(room[address]):
                del room[address]
        return chosen

    def _place(self, request: GenerationRequest, room: Collection[str], tokens: Mapping[str, int]) -> str:
        held = None if request.extends is None else self._server_of.pop(request.extends, None)
        return held if held in room and held is not None else min(room, key=tokens.__getitem__)


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
