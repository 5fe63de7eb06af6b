"""One process: plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.checkpoint.model_files import ModelFiles
from covey.checkpoint.pieces import Piece, SavedPieces, share_of
from covey.learner.backends.base import Advance, Annotation, LossFunction
from covey.learner.optimizer import Masters, OptimizerConfig
from covey.learner.reference import MovingReference
from covey.models.lora import adapter_off, adapter_parameters, merged, plain_weights
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats


class SingleBackend:
    """The policy in one process; `reference` is a frozen policy where the loss has a KL term.

    A policy with an adapter needs none: its reference is the policy with the adapter off, or with that of
    `moving`.
    """

    world = 1
    grad_scale = 1.0

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        reference: Policy | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        assert policy.adapter is None or reference is None, "an adapter's reference is its own base"
        self.policy = policy
        self.reference = reference
        self.moving = moving
        self.masters = Masters(policy, config, compute_dtype, float32=adapter_parameters(policy))

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Logprobs of the trained tokens by the current policy (`old`) or by the reference, or entropies."""
        values = []
        with self._model_of(which) as policy:
            for micro in micros:
                stats = policy(micro)
                values.append(stats.entropy_N if which == "entropy" else stats.logprob_N)
                advance()
        return torch.cat(values)

    @contextmanager
    def _model_of(self, which: Annotation) -> Iterator[Policy]:
        if which != "reference":
            yield self.policy
        elif self.moving is not None:
            with self.moving.view() as reference:
                yield reference
        elif self.policy.adapter is not None:
            with adapter_off(self.policy):
                yield self.policy
        else:
            assert self.reference is not None, "nothing asked for a reference when the run was built"
            yield self.reference

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward; gradients add up in float32."""
        stats = self.policy(micro)
        output = loss(stats, micro)
        with self.masters.absorbing():
            output.loss.backward()
        return stats, output

    def gradient_sample(self) -> Tensor:
        """A part of the accumulated gradient."""
        return self.masters.gradient_sample()

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's accumulated gradient."""
        return self.masters.each_gradient()

    def step(self, learning_rate: float) -> StepStats:
        """One optimizer step."""
        return self.masters.step(learning_rate)

    def move_reference(self, step: int) -> bool:
        """Where the reference follows the policy, and a sync is due."""
        return self.moving is not None and self.moving.move(step, self.masters)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The policy itself, in evaluation mode, its adapter merged where that is exact."""
        training = self.policy.training
        self.policy.eval()
        try:
            with merged(self.policy):
                yield self.policy
        finally:
            self.policy.train(training)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights under transformers' names, adapters merged, in `dtype` (None: as held)."""
        for name, weight in plain_weights(self.policy):
            yield name, weight if dtype is None else weight.to(dtype)

    def model_files(self) -> ModelFiles:
        """The whole model."""
        return ModelFiles(self.policy.model).add_all(self.policy.model.named_parameters())

    def pieces(self) -> Iterable[Piece]:
        """AdamW's moments and the masters, whole."""
        return share_of(self.masters.state())

    def close(self) -> None:
        """Nothing to let go of."""

    def load_pieces(self, saved: SavedPieces) -> None:
        """Restore moments and masters."""
        self.masters.load_state(saved)
