"""All passes of an optimizer step in one call, which is told the slopes of the loss.

Axes: N trained tokens of the step, S sequences, M micro-batches, X numbers of a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.algorithm.contrast import Contrast
from covey.algorithm.losses import LossConfig, LossInputs, LossOutput, policy_loss
from covey.learner.inputs import micro_inputs, step_inputs
from covey.models.passes_native import Passes, Slopes
from covey.place import Place
from covey.types import Batch, TokenStats


@dataclass(frozen=True, slots=True)
class Part:
    """A loss and what it is of: of the whole step, or of one micro-batch."""

    inputs: LossInputs
    output: LossOutput
    is_stale_S: Tensor | None = None


def at_once(
    batch: Batch, passes: Passes, config: LossConfig, of_groups: Sequence[Contrast | None], place: Place
) -> tuple[list[Part], Tensor]:
    """Take them: the gradient of the step is then where the weights' is kept. Gives the losses, and a piece
    of the gradient before the first pass and behind each, (M + 1, X).

    Where the slopes of the loss depend on what the policy says now, the loss of each pass is taken between
    its forward and its backward pass; else that of the whole step before them all.
    """
    micros, parts = batch.micro_batches, []

    def advance(done: int) -> None:
        place.advance(done, len(micros))

    if has_known_slopes(batch, config):
        inputs = step_inputs(batch, of_groups)
        slopes, _ = _slopes(inputs, config)
        stats, gradient_MX = passes.go(slopes, advance)
        inputs = replace(inputs, logprob_N=stats.logprob_N, entropy_N=stats.entropy_N)
        return [Part(inputs, policy_loss(inputs, config))], gradient_MX

    def measure(number: int, stats: TokenStats) -> Slopes:
        inputs = micro_inputs(stats, micros[number], batch, of_groups[number])
        slopes, output = _slopes(inputs, config)
        parts.append(Part(inputs, output, micros[number].is_stale_S))
        return slopes

    _, gradient_MX = passes.go(measure, advance)
    return parts, gradient_MX


def has_known_slopes(batch: Batch, config: LossConfig) -> bool:
    """Whether the derivative of the loss by logprobs and entropies depends on neither: every ratio is 1, and
    nothing else is measured by what the policy says now."""
    is_measured = config.correction is not None or config.off_policy_delta is not None
    is_on_policy = all(micro.old_logprob_N is None for micro in batch.micro_batches)
    return is_on_policy and config.beta == 0.0 and not is_measured


@torch.enable_grad()
def _slopes(inputs: LossInputs, config: LossConfig) -> tuple[Slopes, LossOutput]:
    """The derivatives of the loss by logprobs and entropies (N,), None where there is none, and the loss."""
    assert inputs.entropy_N is not None
    logprob_N, entropy_N = inputs.logprob_N.clone(), inputs.entropy_N.clone()
    leaves = logprob_N.requires_grad_(), entropy_N.requires_grad_()
    output = policy_loss(replace(inputs, logprob_N=logprob_N, entropy_N=entropy_N), config)
    by_logprob_N, by_entropy_N = torch.autograd.grad(output.loss, leaves, allow_unused=True)
    return (by_logprob_N, by_entropy_N), LossOutput(loss=output.loss.detach(), sums=output.sums)
