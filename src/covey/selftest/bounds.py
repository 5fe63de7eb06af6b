"""What each check may measure at most, with the reason, and where to look if it measures more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from covey.selftest.subject import LOSS_TYPES
from covey.texts import tr


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a check may measure: `cpu` for the built-in model on a CPU, `other` elsewhere.

    What is not a number is too much. A bound of 0 on a CPU holds there for every model. `reason` says why
    this number, `part` which part of covey is wrong where more is measured.
    """

    cpu: float
    other: float
    reason: str
    part: str

    def limit(self, *, is_cpu: bool, is_built_in: bool) -> float:
        """What holds for a device and a model."""
        return self.cpu if is_cpu and (is_built_in or self.cpu == 0.0) else self.other


_ORDER = tr(
    "In float32 only the order of sums differs, which changes a gradient by 1e-7 to 1e-6; a lost row or a "
    "wrong weight changes it by more than 1e-3. Deeper models and GPU kernels have larger rounding errors."
)
_SAMPLER = tr(
    "Engine and learner compute the same sums in a different order. In float32 the difference is near "
    "1e-6. In bfloat16 it is near 1e-2 on average, and up to 2e-1 for a token whose experts or attention "
    "change to another choice; a wrong temperature or cache gives more than 1e-1 on average."
)
_SAME = tr("The same sums in the same order: any difference is an error.")
# Sums that many threads of a GPU add to in no fixed order differ in their last bits.
_ATOMIC = tr("On a CPU these are the same sums in the same order; on a GPU some sums have no fixed order.")

BOUNDS: Mapping[str, Bound] = {
    "micro-batches: gradient": Bound(
        cpu=5e-6,
        other=2e-5,
        reason=_ORDER,
        part=tr("how a step is divided into forward passes, or its denominators"),
    ),
    "packing: gradient": Bound(
        cpu=5e-6, other=2e-5, reason=_ORDER, part=tr("the layout of packed rows, or their attention")
    ),
    "prompt sharing: gradient": Bound(
        cpu=5e-6,
        other=2e-5,
        reason=_ORDER,
        part=tr("the layout of rows that share a prompt, or their attention"),
    ),
    **{
        tr("loss {loss_type}: gradient", loss_type=loss_type): Bound(
            cpu=5e-6,
            other=2e-5,
            reason=_ORDER,
            part=tr("the loss {loss_type}, or its denominator", loss_type=loss_type),
        )
        for loss_type in LOSS_TYPES
    },
    "head in blocks: logprobs": Bound(
        cpu=5e-6, other=2e-5, reason=_ORDER, part=tr("the forward pass of the head in blocks")
    ),
    "head in blocks: gradient": Bound(
        cpu=5e-6, other=2e-5, reason=_ORDER, part=tr("the backward pass of the head in blocks")
    ),
    "sampler, float32: largest difference": Bound(
        cpu=1e-4,
        other=1e-4,
        reason=_SAMPLER,
        part=tr("the engine: its cache, its sampling, or its decoding step"),
    ),
    "sampler, float32: mean difference": Bound(
        cpu=1e-5,
        other=1e-5,
        reason=_SAMPLER,
        part=tr("the engine: its cache, its sampling, or its decoding step"),
    ),
    "on-policy: ratio - 1": Bound(
        cpu=0.0,
        other=0.0,
        reason=_SAME,
        part=tr(
            "the forward pass that computes old log-probabilities, which must be the same as in training"
        ),
    ),
    "unchanged reference: KL": Bound(
        cpu=0.0,
        other=0.0,
        reason=_SAME,
        part=tr("the reference model, or the forward pass that computes its log-probabilities"),
    ),
    "determinism: tokens that differ": Bound(
        cpu=0.0,
        other=0.0,
        reason=_SAME,
        part=tr("the random numbers of sampling, or a kernel without a fixed order of sums"),
    ),
    "determinism: gradient": Bound(
        cpu=0.0,
        other=2e-5,
        reason=_ATOMIC,
        part=tr("a random number, or a kernel without a fixed order of sums"),
    ),
    "sampler, bfloat16: largest difference": Bound(
        cpu=1.0,
        other=1.0,
        reason=_SAMPLER,
        part=tr("the engine: its cache, its sampling, or its decoding step"),
    ),
    "sampler, bfloat16: mean difference": Bound(
        cpu=0.05,
        other=0.05,
        reason=_SAMPLER,
        part=tr("the engine: its cache, its sampling, or its decoding step"),
    ),
    "LoRA, micro-batches: gradient": Bound(
        cpu=5e-6, other=2e-5, reason=_ORDER, part=tr("the backward pass through layers with an adapter")
    ),
    "LoRA, prompt sharing: gradient": Bound(
        cpu=5e-6, other=2e-5, reason=_ORDER, part=tr("layers with an adapter, on rows that share a prompt")
    ),
    "resume: weights": Bound(
        cpu=0.0,
        other=1e-3,
        reason=_ATOMIC
        + tr(
            " AdamW enlarges these differences where a gradient is small. The bound is relative to "
            "the size of the update."
        ),
        part=tr("what a checkpoint stores of the optimizer and of the rollout"),
    ),
}
"""Every check by its name, in the order in which they run."""
