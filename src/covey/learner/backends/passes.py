"""Passes that change nothing: annotations by a policy and its reference, and plain gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from covey.learner.backends.base import Advance, Annotation, Objective
from covey.learner.reference import MovingReference
from covey.learner.sampled import sampled_gradients
from covey.models.lora import adapter_off
from covey.models.policy import Policy, RowLayout
from covey.types import MicroBatch


class Passes:
    """Runs passes of the policy and of its reference: `moving`, or the frozen policy `reference`, or else the
    policy with its adapter off."""

    policy: Policy
    reference: Policy | None
    moving: MovingReference | None

    def _use_layout(self, layout: RowLayout) -> None:
        """Use the probed layout, but have each pass compute its own prompts: otherwise ranks would run their
        layers unequally often."""
        for policy in (self.policy, *([self.reference] if self.reference else [])):
            policy.use_layout(replace(layout, shares_prompts=False))

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Return logprobs of the trained tokens by the policy (`old`) or by the reference, or entropies."""
        values = []
        with self._model_of(which) as policy:
            for micro in micros:
                stats = policy(micro)
                values.append(stats.entropy_N if which == "entropy" else stats.logprob_N)
                advance()
        self.let_go()
        return torch.cat(values)

    def _model_of(self, which: Annotation) -> AbstractContextManager[Policy]:
        if which != "reference":
            return nullcontext(self.policy)
        if self.moving is not None:
            return self.moving.view()
        return adapter_off(self.policy) if self.reference is None else nullcontext(self.reference)

    def plain_gradient(
        self,
        micros: Sequence[MicroBatch],
        objective: Objective,
        sample: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Return `sample` of each gradient; no `.grad` is written, and no gradient is kept."""
        trained = {n: p for n, p in self.policy.named_parameters() if p.requires_grad}
        with sampled_gradients(trained, sample, self._shapes()) as sums:
            for micro in micros:
                with self.policy.recomputing_prompts():
                    stats = self.policy(micro)
                torch.autograd.grad(objective(stats, micro), list(trained.values()), allow_unused=True)
                self.let_go()
        return sums

    def _shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Return the shapes of the trained tensors, where they are whole within a pass alone."""
        return None

    def let_go(self) -> None:
        """Free gathered weights; a whole model has none."""
