"""One vLLM over several ranks: each computes a part of every layer, so all of them take every step together.

What a rank is asked for it keeps until `results`. Before each step the ranks tell each other, as bytes of one
tensor, what is new with them: requests, aborts, and whether a signal asked for the end. All of them then give
vLLM the same, in the order of the ranks, so that its scheduler decides the same in each of them. Nothing that
one of them alone sees, a clock or a signal, decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from covey.activity import Stopped, ranks_word
from covey.codes import CODES
from covey.comm import Comm
from covey.errors import GuardStop
from covey.rollout.engine import NO_MEMBERS, NamedWeights
from covey.rollout.vllm.engine import VllmEngine
from covey.texts import joined, tr
from covey.types import (
    Completion,
    Finding,
    Fix,
    GenerationRequest,
    Receipt,
    SamplingParams,
    TurnId,
)


class GroupEngine:
    """This rank's part of a vLLM that the ranks of `comm` are together; `own` is on the same ranks.

    All ranks call `results`, `publish`, `rest` and `close` equally often and in the same order; each submits
    requests of its own and is given their completions.
    """

    name = VllmEngine.name
    given_up = ""
    members = NO_MEMBERS

    def __init__(self, own: VllmEngine, comm: Comm) -> None:
        self.capabilities = own.capabilities
        self._own, self._comm = own, comm
        self._next_id = 0
        # What the other ranks have not been told yet.
        self._new: dict[int, GenerationRequest] = {}
        self._aborts: list[int] = []
        # vLLM's number of each running request, by the rank that it is of and its number there.
        self._running: dict[tuple[int, int], int] = {}

    def in_words(self) -> str:
        """What it is, in words."""
        return tr("{own}; {number} processes are one vLLM", own=self._own.in_words(), number=self._comm.world)

    # -- sampling

    def submit(self, request: GenerationRequest) -> int:
        """Take a request. Raises what `VllmEngine.check` does."""
        self._own.check(request)
        number = self._next_id
        self._next_id += 1
        self._new[number] = request
        return number

    def abort(self, ids: Sequence[int]) -> None:
        """End requests before the next step; they keep what has been sampled."""
        self._aborts += ids

    def results(self) -> Iterator[Completion]:
        """Step with the other ranks until none of them has anything left. Collective over the ranks.

        Raises Stopped on all of them where a signal asked one of them to end what may end between steps, and
        GuardStop (F302) where they did not sample the same.
        """
        while True:
            self._exchange()
            if not self._own.is_busy:
                return
            yield from self._of_this_rank(self._own.step())

    def _exchange(self) -> None:
        """Give vLLM what is new on all ranks, in their order."""
        every = self._comm.gather_json(
            {
                "requests": [(number, _told(request)) for number, request in self._new.items()],
                "aborts": self._aborts,
                "stops": self._comm.activity.has_to_stop,
                "sampled": [self._own.num_computed, self._own.digest],
            }
        )
        self._new, self._aborts = {}, []
        self._check_same([told["sampled"] for told in every])
        if any(told["stops"] for told in every):
            self._own.abort(list(self._running.values()))
            self._of_this_rank(self._own.step() if self._own.is_busy else [])
            raise Stopped
        for rank, told in enumerate(every):
            for number, request in told["requests"]:
                self._running[rank, number] = self._own.submit(_request_of(request))
            known = [owner for number in told["aborts"] if (owner := (rank, number)) in self._running]
            if known:
                self._own.abort([self._running[owner] for owner in known])

    def _of_this_rank(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions that this rank asked for, with its own request ids."""
        owners = {given: owner for owner, given in self._running.items()}
        found = []
        for completion in completions:
            rank, number = owner = owners[completion.request_id]
            del self._running[owner]
            if rank == self._comm.rank:
                found.append(replace(completion, request_id=number))
        return found

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
        "may_go_on": request.may_go_on,
    }


def _request_of(told: Mapping[str, Any]) -> GenerationRequest:
    """The request that `_told` told of."""
    sampling: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in told["sampling"].items()
    }
    return GenerationRequest(
        prompt_token_ids=tuple(told["prompt"]),
        sampling=SamplingParams(**sampling),
        turn=TurnId(**told["turn"]),
        extends=None if told["extends"] is None else TurnId(**told["extends"]),
        may_go_on=told["may_go_on"],
    )
