"""One vLLM over several ranks: each computes a part of every layer, so all of them take every step together.

The first rank alone is asked for completions. Before each step it tells the others, as bytes of one tensor,
what is new: requests and aborts. Every rank tells whether a signal asked for the end. All of them then give
vLLM the same in the same order, so that its scheduler decides the same in each of them. Nothing that one of
them alone sees, a clock or a signal, decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from covey.activity import Stopped, ranks_word
from covey.codes import CODES
from covey.comm import Comm, raise_on_all_ranks
from covey.data.image_records import Record, media_of, media_records
from covey.data.images import PlacedImage, RowImage
from covey.errors import GuardStop
from covey.media.errors import MediaError
from covey.rollout.engine import NO_MEMBERS, NamedWeights, nothing
from covey.rollout.vllm.engine import VllmEngine
from covey.texts import joined, tr
from covey.types import (
    Completion,
    Finding,
    Fix,
    GenerationRequest,
    Medium,
    Receipt,
    SamplingParams,
    TurnId,
)


class GroupEngine:
    """This rank's part of a vLLM that the ranks of `comm` are together; `own` is on the same ranks.

    All ranks call `results`, `publish`, `rest` and `close` equally often and in the same order. The first one
    submits requests and is given their completions; the others only step with it.
    """

    name = VllmEngine.name
    given_up = ""
    members = NO_MEMBERS

    def __init__(self, own: VllmEngine, comm: Comm) -> None:
        self.capabilities = own.capabilities
        self._own, self._comm = own, comm
        self.on_turn: Callable[[], None] = nothing
        # What the other ranks have not been told yet.
        self._new: list[GenerationRequest] = []
        self._aborts: list[int] = []

    def in_words(self) -> str:
        """What it is, in words."""
        return tr("{own}; {number} processes are one vLLM", own=self._own.in_words(), number=self._comm.world)

    # -- sampling

    def submit(self, request: GenerationRequest) -> int:
        """Take a request on the first rank. What `VllmEngine.check` refuses is raised by `results`, on all
        ranks."""
        assert self._comm.rank == 0, "the first rank asks for all completions"
        self._new.append(request)
        return self._own.next_id + len(self._new) - 1

    def abort(self, ids: Sequence[int]) -> None:
        """End requests before the next step; they keep what has been sampled."""
        self._aborts += ids

    def results(self) -> Iterator[Completion]:
        """Step with the other ranks until nothing is left, giving what ends to the first one. Collective over
        the ranks.

        Raises on all of them: Stopped where a signal asked one of them to end what may end between steps,
        GuardStop (F302) where they did not sample the same, what `VllmEngine.check` raises, and what one of
        them raises of an image that it cannot read.
        """
        while True:
            self.on_turn()
            self._exchange()
            if not self._own.is_busy:
                return
            ended = self._own.step()
            if self._comm.rank == 0:
                yield from ended

    def _exchange(self) -> None:
        """Give vLLM what is new on the first rank, or end all requests where a signal reached a rank."""
        every = self._comm.gather_json(
            {
                "requests": [_told(request) for request in self._new],
                "media": _records(self._new),
                "aborts": self._aborts,
                "stops": self._comm.activity.has_to_stop,
                "sampled": [self._own.num_computed, self._own.digest],
            }
        )
        self._new, self._aborts = [], []
        self._check_same([told["sampled"] for told in every])
        if any(told["stops"] for told in every):
            self._own.abort(range(self._own.next_id))
            if self._own.is_busy:
                self._own.step()
            raise Stopped
        media = {medium.key: medium for medium in media_of(every[0]["media"])}
        failure: MediaError | None = None
        try:
            for request in every[0]["requests"]:
                self._own.submit(_request_of(request, media))
        except MediaError as error:
            failure = error
        if media:
            # Each rank reads the images itself.
            raise_on_all_ranks(self._comm, failure)
        self._own.abort(every[0]["aborts"])

    def _check_same(self, sampled: Sequence[Sequence[int]]) -> None:
        """Raise GuardStop where ranks have sampled other tokens: their steps have nothing in common then."""
        if all(own == sampled[0] for own in sampled):
            return
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, own in enumerate(sampled, start=self._comm.first_rank):
            alike.setdefault(tuple(own), []).append(rank)
        parts = [
            tr("{ranks}: {tokens} tokens, digest {digest:08x}", ranks=ranks_word(r), tokens=t, digest=d)
            for (t, d), r in alike.items()
        ]
        raise GuardStop(
            Finding(
                code="F302",
                seen=tr(
                    "ranks that are one vLLM sampled different tokens from the same requests: {parts}",
                    parts=joined("; ", parts),
                ),
                why=CODES["F302"].why,
                cause=tr("Their weights, their packages or their GPUs differ, or vLLM has a bug."),
                fixes=(Fix(text=tr("run one vLLM in each process"), edits={"vllm_tensor_parallel_size": 1}),),
                step=self._comm.activity.step,
            )
        )

    # -- weights and memory

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Serve these weights; every rank is given all of them. The receipt is of whole tensors, added up
        over the ranks. Collective over the ranks."""
        return self._own.publish(named_weights, version)

    def held_base(self) -> str:
        """The digest of the weights that were sent last, without an adapter."""
        return self._own.held_base()

    def rest(self) -> None:
        """Sleep where it is set to."""
        self._own.rest()

    def take_notices(self) -> list[Finding]:
        """Nothing happens to it that it goes on after."""
        return []

    def close(self) -> None:
        """End this rank's part."""
        self._own.close()


def _told(request: GenerationRequest) -> dict[str, Any]:
    """A request as JSON."""
    return {
        "prompt": request.prompt_token_ids,
        "sampling": asdict(request.sampling),
        "turn": asdict(request.turn),
        "extends": None if request.extends is None else asdict(request.extends),
        "media": [medium.key for medium in request.media],
        "may_go_on": request.may_go_on,
    }


def _records(requests: Sequence[GenerationRequest]) -> list[Record]:
    """The images of requests as JSON, each once: where each rank reads it, or the bytes of one in a row."""
    media = {medium.key: medium for request in requests for medium in request.media}
    return media_records(_with_bytes(medium) for medium in media.values())


def _with_bytes(medium: Medium) -> Medium:
    if medium.source is None or not isinstance(medium.source.place, RowImage):
        return medium
    return replace(medium, source=replace(medium.source, place=PlacedImage(medium.source.place.image())))


def _request_of(told: Mapping[str, Any], media: Mapping[str, Medium]) -> GenerationRequest:
    """The request that `_told` told of; `media` has images by their keys."""
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told["sampling"].items()
    }
    return GenerationRequest(
        prompt_token_ids=tuple(told["prompt"]),
        sampling=SamplingParams(**sampling),
        turn=TurnId(**told["turn"]),
        extends=None if told["extends"] is None else TurnId(**told["extends"]),
        media=tuple(media[key] for key in told["media"]),
        may_go_on=told["may_go_on"],
    )
