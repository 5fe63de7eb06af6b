"""Forward passes without gradient, of a policy and of its reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from covey.learner.backends.base import Advance, Annotation
from covey.learner.reference import MovingReference
from covey.models.lora import adapter_off
from covey.models.policy import Policy
from covey.types import MicroBatch


class Passes:
    """The reference is `moving`, or the frozen policy `reference`; without either it is the policy with its
    adapter off."""

    policy: Policy
    reference: Policy | None
    moving: MovingReference | None

    def use_layout(self, probed: Policy) -> None:
        """As probed; but each pass computes its own prompts: one that did not would run its layers less often
        than another rank's."""
        for policy in (self.policy, *([self.reference] if self.reference else [])):
            policy.use_layout_of(probed)
            policy.shares_prompts = False

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Logprobs of the trained tokens by the policy (`old`) or by the reference, or entropies."""
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

    def let_go(self) -> None:
        """Free the weights that a pass without a backward pass leaves gathered; here there are none."""
