"""What every training backend is to the learner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.checkpoint.model_files import ModelFiles
from covey.checkpoint.pieces import Piece, SavedPieces
from covey.learner.reference import MovingReference
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats

LossFunction = Callable[[TokenStats, MicroBatch], LossOutput]
# Called after each forward pass.
Advance = Callable[[], None]
Annotation = Literal["old", "reference", "entropy"]


class Backend(Protocol):
    """Holds the policy's weights, gradients and optimizer.

    `grad_scale` is what a micro-batch's loss is multiplied by: the number of ranks where gradients are
    averaged over ranks, 1 where they are summed. `moving` is the reference where it follows the policy.
    """

    policy: Policy
    reference: Policy | None
    moving: MovingReference | None
    world: int
    grad_scale: float

    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Logprobs (N,) of the trained tokens by the current policy (`old`) or the reference, or the policy's
        entropies; without gradient, from the same forward passes as training uses."""
        ...

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward of one micro-batch; gradients are exchanged in the `last` one of a
        step."""
        ...

    def gradient_sample(self) -> Tensor:
        """A fixed small part of the gradient that has been accumulated, to see that a backward pass adds to
        it."""
        ...

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """The accumulated gradient of every trained tensor, under the policy's names, one at a time and not
        copied; zeros where there is none. That of the whole step on every rank, after its last backward.
        Collective."""
        ...

    def step(self, learning_rate: float) -> StepStats:
        """Check that the gradient is finite, clip it, step, and clear it."""
        ...

    def move_reference(self, step: int) -> bool:
        """Move the reference towards the masters where a sync is due after `step`; says whether it
        was."""
        ...

    def rollout_view(self) -> AbstractContextManager[Policy]:
        """The policy as an engine may call it: whole weights, no dropout. Collective."""
        ...

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights under transformers' names, one at a time. Collective."""
        ...

    def model_files(self) -> ModelFiles:
        """The part of the model without adapter that this rank writes: its `write` has no collective.
        Collective."""
        ...

    def pieces(self) -> Iterable[Piece]:
        """This rank's share of optimizer state and masters; those of all ranks are enough for an exact resume
        together with the saved model. No collective."""
        ...

    def load_pieces(self, saved: SavedPieces) -> None:
        """Restore what any number of ranks saved. No collective: each rank reads the rows that it holds."""
        ...

    def close(self) -> None:
        """Let go of what must end before the process group does."""
        ...
