"""One process: plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.learner.backends.base import Annotation, LossFunction
from covey.learner.optimizer import Masters, OptimizerConfig
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats


class SingleBackend:
    """The policy in one process; `reference` is a frozen policy where the loss has a KL term."""

    world = 1
    grad_scale = 1.0

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        reference: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.masters = Masters(policy, config, compute_dtype)

    @torch.no_grad()
    def annotate(self, micro: MicroBatch, which: Annotation) -> Tensor:
        """Logprobs of the trained tokens by the current policy (`old`) or by the reference."""
        if which == "old":
            return self.policy(micro).logprob_N  # type: ignore[no-any-return]
        assert self.reference is not None, "nothing asked for a reference when the run was built"
        return self.reference(micro).logprob_N  # type: ignore[no-any-return]

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward; gradients add up in float32."""
        stats = self.policy(micro)
        output = loss(stats, micro)
        output.loss.backward()
        self.masters.absorb()
        return stats, output

    def step(self, learning_rate: float) -> StepStats:
        """One optimizer step."""
        return self.masters.step(learning_rate)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The policy itself, in evaluation mode: nothing is copied."""
        training = self.policy.training
        self.policy.eval()
        try:
            yield self.policy
        finally:
            self.policy.train(training)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights under transformers' names, in `dtype` (None: as held)."""
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach() if dtype is None else parameter.detach().to(dtype)

    def state(self) -> Mapping[str, Tensor]:
        """AdamW's moments and the masters."""
        return self.masters.state()

    def close(self) -> None:
        """Nothing to let go of."""

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore moments and masters."""
        self.masters.load_state(tensors)
