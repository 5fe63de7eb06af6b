"""The stateful components of a run, each giving JSON and tensors to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from covey.checkpoint.registry import State
from covey.checkpoint.shards import SavedShards, Shard
from covey.comm import Comm
from covey.errors import CheckpointError
from covey.health.words import broken
from covey.learner.backends.base import Backend
from covey.learner.reference import MovingReference
from covey.texts import tr
from covey.training.buffer import RolloutBuffer
from covey.types import Fix


class Progress:
    """Counts the optimizer steps taken, the rollouts finished, and running totals.

    `upcoming` gives a rollout's prompts as row and checksum; a resumed run compares them with those that the
    stopped one would have taken next. None: nothing can be said of them beforehand. `may_differ` is where
    they, or their order, have been changed by the user's word.
    """

    name = "progress"

    def __init__(
        self, upcoming: Callable[[int], list[list[int]]] | None = None, *, may_differ: bool = False
    ) -> None:
        self._upcoming = upcoming
        self._may_differ = may_differ
        self.step = 0
        self.rollout = 0
        self.num_tokens = 0
        self.began: int | None = 0
        """Optimizer steps taken when the current rollout began; None where a checkpoint does not say."""

    def state(self) -> State:
        """Return the counters."""
        counts = {"step": self.step, "rollout": self.rollout, "num_tokens": self.num_tokens}
        counts |= {} if self.began is None else {"began": self.began}
        coming = None if self._upcoming is None else self._upcoming(self.rollout)
        return State(json={**counts, "upcoming": coming})

    def load_state(self, state: State) -> None:
        """Go on from these counters. GuardStop (F126) where other prompts come next."""
        values: Any = state.json
        self.step, self.rollout = values["step"], values["rollout"]
        self.num_tokens, self.began = values["num_tokens"], values.get("began")
        before = values.get("upcoming")
        if before is None or self._upcoming is None or self._may_differ:
            return
        now = self._upcoming(self.rollout)
        if now != before:
            rows, former = ([row + 1 for row, _ in prompts[:4]] for prompts in (now, before))
            seen = tr(
                "the next prompts are the rows {rows}, but in the stopped run they were {former}",
                rows=rows,
                former=former,
            )
            if rows == former:
                seen = tr(
                    "the next prompts (rows {rows}) have another text or image than in the stopped run",
                    rows=rows,
                )
            cause = tr("The dataset has other rows than before, or they are drawn in another order.")
            fix = Fix(text=tr("resume with the data of the stopped run, or start a new run"))
            raise broken("F126", self.step, seen, cause, fix)


def check_position(progress: Progress, buffer: RolloutBuffer) -> None:
    """Raise GuardStop (F126) where a resumed run would go on at another step of its rollout, and
    CheckpointError where it lacks the tokens of the rollout."""
    if buffer.saved_rows:
        raise CheckpointError(tr("the checkpoint has no tokens of the rollout that it was saved in"))
    if progress.began is None or progress.step - progress.began == buffer.done:
        return
    taken = progress.step - progress.began
    seen = tr(
        "{taken} steps of the rollout were taken, but the resumed run would continue after {done} of them",
        taken=taken,
        done=buffer.done,
    )
    cause = tr("Parts of the checkpoint were saved at different steps.")
    raise broken("F126", progress.step, seen, cause, Fix(text=tr("resume from another checkpoint")))


class OptimizerState:
    """Saves AdamW's moments and the masters, through the backend."""

    name = "optimizer"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def shards(self) -> Iterable[Shard]:
        """Return the tensors that the backend holds on this rank."""
        return self._backend.shards()

    def load_shards(self, saved: SavedShards) -> None:
        """Give the backend what all ranks have saved."""
        self._backend.load_shards(saved)


class ReferenceState:
    """Saves a reference that follows the policy."""

    name = "reference"

    def __init__(self, moving: MovingReference, comm: Comm) -> None:
        self._moving, self._comm = moving, comm

    def shards(self) -> Iterable[Shard]:
        """Return this rank's part of the reference: a share of its tensors where each rank holds all of
        them, else the rows that it holds."""
        return self._moving.shards(self._comm.rank, self._comm.world)

    def load_shards(self, saved: SavedShards) -> None:
        """Give them back."""
        self._moving.load_shards(saved)


class RandomState:
    """Saves torch's generators, one a rank. Sampling needs none of them; dropout, where it is on, does."""

    name = "rng"

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def state(self) -> State:
        """Return every rank's generator. Collective."""
        mine = [bytes(torch.get_rng_state().tolist()).hex()]
        if torch.cuda.is_available():
            mine.append(bytes(torch.cuda.get_rng_state().tolist()).hex())
        return State(json={"ranks": self._comm.gather_json(mine)})

    def load_state(self, state: State) -> None:
        """Restore this rank's generator, where the stopped run had as many ranks."""
        ranks: Any = state.json["ranks"]
        if len(ranks) != self._comm.world:
            return
        torch.set_rng_state(_bytes(ranks[self._comm.rank][0]))
        if torch.cuda.is_available() and len(ranks[self._comm.rank]) > 1:
            torch.cuda.set_rng_state(_bytes(ranks[self._comm.rank][1]))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
