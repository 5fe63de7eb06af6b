"""The protocol of training backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from covey.algorithm.losses import LossOutput
from covey.checkpoint.manifest import FileEntry
from covey.checkpoint.shards import SavedShards, Shard
from covey.learner.reference import MovingReference
from covey.models.load import Attention
from covey.models.lora import AdapterAlone
from covey.models.policy import Policy
from covey.text_files import TextFiles
from covey.types import MicroBatch, StepStats, TokenStats

LossFunction = Callable[[TokenStats, MicroBatch], LossOutput]
# A number to differentiate.
Objective = Callable[[TokenStats, MicroBatch], Tensor]
# Writes into a directory, and returns the sums of what it has read already.
ModelWriter = Callable[[Path], dict[str, FileEntry]]
# Called after each forward pass.
Advance = Callable[[], None]
Annotation = Literal["old", "reference", "entropy"]


class Backend(Protocol):
    """Owns the parameters of the policy, their gradients and the optimizer: nothing else reads or writes
    them.

    `policy` is what trains, `sampler` what an engine of this process calls, with weights in it within
    `rollout_view` alone. `grad_scale` is what a micro-batch's loss is multiplied by: the number of ranks
    where gradients are averaged over ranks, 1 where they are summed. `moving` is the reference where it
    follows the policy. `dp_rank` of `dp_world` is the share of a step's rows that this rank trains.
    """

    policy: Policy
    sampler: Policy
    moving: MovingReference | None
    dp_rank: int
    dp_world: int
    grad_scale: float

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass is collective: every rank then makes as many of them as the others."""
        ...

    def choose_layout(self, attention: Attention) -> None:
        """Lay rows out from now on, those of the sampler too, as the probe proves that this model may.
        Collective."""
        ...

    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Return logprobs (N,) of the trained tokens by the current policy (`old`) or the reference, or the
        policy's entropies; without gradient, from the same forward passes as training uses."""
        ...

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Run forward, loss and backward of one micro-batch; gradients are exchanged in the `last` one of a
        step at the latest."""
        ...

    def gradient_probe(self) -> Tensor | None:
        """Return a fixed small part of the gradient that this rank has accumulated, to see that a backward
        pass adds to it; None where that is not known before the last one."""
        ...

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Return the accumulated gradient of every trained tensor, whole, under the policy's names, one at a
        time and not copied; zeros where there is none. After the last backward it is
        the gradient of the whole step on every rank. Collective."""
        ...

    def plain_gradient(
        self,
        micros: Sequence[MicroBatch],
        objective: Objective,
        sample: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Return `sample` of the gradient of this rank's rows by the name of every trained tensor, in
        float32. It comes from autograd alone: the accumulated gradient stays as it is. Collective."""
        ...

    def step(self, learning_rate: float) -> StepStats:
        """Check that the gradient is finite on every rank, clip it, step, and clear it."""
        ...

    def move_reference(self, step: int) -> bool:
        """Move the reference towards the masters where a sync is due after `step`; says whether it
        was."""
        ...

    def rollout_view(self) -> AbstractContextManager[Policy]:
        """Return a context with the sampler as an engine may call it: whole weights, no dropout.
        Collective."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Return whole weights under transformers' names, an adapter added, one at a time, in `dtype` (None:
        as they compute). Collective."""
        ...

    @property
    def adapter_alone(self) -> AdapterAlone | None:
        """Return the policy's adapter, where an engine can apply it itself."""
        ...

    def frozen(self) -> Mapping[str, Tensor]:
        """Return what this rank holds of the tensors that no step may change, the reference's among them."""
        ...

    def trained(self) -> Mapping[str, Tensor]:
        """Return what this rank holds of the tensors that steps change."""
        ...

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return sums of the bit patterns of the whole tensors of which these are held here. Collective."""
        ...

    def model_writer(self, text: TextFiles, base: str | None) -> ModelWriter:
        """Return what writes this rank's part of a directory that `from_pretrained` or peft loads, with its
        text files; an adapter names `base`, or else the origin of the texts, as its model. Collective; the
        writing is not."""
        ...

    def shards(self) -> Iterable[Shard]:
        """Return this rank's share of optimizer state and masters; those of all ranks are enough for an exact
        resume together with the saved model. Collective where shares of rows are not what a rank holds."""
        ...

    def load_shards(self, saved: SavedShards) -> None:
        """Restore what any number of ranks saved. No collective: each rank reads the rows that it holds."""
        ...

    def give_back(self, model: nn.Module) -> None:
        """Have the model that a program gave hold the trained weights, an adapter added. Collective."""
        ...

    def close(self) -> None:
        """Let go of what must end before the process group does."""
        ...
