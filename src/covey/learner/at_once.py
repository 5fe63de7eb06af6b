"""All passes of an optimizer step in one call: the loss is taken of the whole step, and passes are told its
slopes.

Axes: N trained tokens of the step, S sequences, M micro-batches, X numbers of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.algorithm.contrast import Contrast
from covey.algorithm.losses import LossConfig, LossInputs, LossOutput, has_known_slopes, policy_loss
from covey.models.passes_native import Passes
from covey.place import Place
from covey.types import Batch, MicroBatch, TokenStats

# Tokens of a pass up to which another forward pass costs less than taking it alone.
_FEW = 96


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a step's passes; `gradient_MX` is a piece of the gradient before the first and behind
    each. `is_stale_S` is as in a micro-batch."""

    inputs: LossInputs
    is_stale_S: Tensor | None
    output: LossOutput
    gradient_MX: Tensor


def at_once(
    batch: Batch, passes: Passes, config: LossConfig, of_groups: Sequence[Contrast | None], place: Place
) -> Taken | None:
    """Take them: the gradient of the step is then where the weights' is kept. None where they cost less one
    by one.

    Where the slopes of the loss depend on what the policy says now, it is asked before.
    """
    inputs = _inputs(batch, of_groups)
    is_known = has_known_slopes(inputs, config)
    if not is_known and passes.tokens_of_one > _FEW:
        return None

    def advance(done: int) -> None:
        place.advance(done, len(batch.micro_batches))

    told = inputs if is_known else _with(inputs, passes.look(advance))
    with torch.enable_grad():
        slopes, output = _slopes(told, config)
    stats, gradient_MX = passes.go(*slopes, advance)
    if is_known:
        told = _with(inputs, stats)
        output = policy_loss(told, config)
    return Taken(told, _stale(batch), output, gradient_MX)


def _slopes(inputs: LossInputs, config: LossConfig) -> tuple[tuple[Tensor | None, Tensor | None], LossOutput]:
    """The derivatives of the loss by logprobs and entropies (N,), None where there is none, and the loss."""
    assert inputs.entropy_N is not None
    logprob_N, entropy_N = inputs.logprob_N.clone(), inputs.entropy_N.clone()
    leaves = logprob_N.requires_grad_(), entropy_N.requires_grad_()
    output = policy_loss(replace(inputs, logprob_N=logprob_N, entropy_N=entropy_N), config)
    by_logprob_N, by_entropy_N = torch.autograd.grad(output.loss, leaves, allow_unused=True)
    return (by_logprob_N, by_entropy_N), LossOutput(loss=output.loss.detach(), sums=output.sums)


def _with(inputs: LossInputs, stats: TokenStats) -> LossInputs:
    return replace(inputs, logprob_N=stats.logprob_N, entropy_N=stats.entropy_N)


def _inputs(batch: Batch, of_groups: Sequence[Contrast | None]) -> LossInputs:
    """Those of the whole step, but for what the policy says, which is 0."""
    micros = batch.micro_batches
    sequences = [micro.trained_count_S.shape[0] for micro in micros]
    ahead = torch.tensor([0, *sequences]).cumsum(0).tolist()
    contrasts = [c for c in of_groups if c is not None]
    advantage_N = torch.cat([micro.advantage_N for micro in micros])
    return LossInputs(
        logprob_N=torch.zeros_like(advantage_N),
        entropy_N=torch.zeros_like(advantage_N),
        old_logprob_N=_joined(batch, lambda micro: micro.old_logprob_N),
        ref_logprob_N=_joined(batch, lambda micro: micro.ref_logprob_N),
        advantage_N=advantage_N,
        sequence_N=torch.cat([m.sequence_N + before for m, before in zip(micros, ahead, strict=False)]),
        trained_count_S=torch.cat([micro.trained_count_S for micro in micros]),
        denominators=batch.denominators,
        sampler_logprob_N=torch.cat([micro.sampler_logprob_N for micro in micros]),
        keep_N=_joined(batch, lambda micro: micro.keep_N),
        contrast=None
        if not contrasts
        else Contrast(
            coefficient_S=torch.cat([c.coefficient_S for c in contrasts]),
            value_S=torch.cat([c.value_S for c in contrasts]),
        ),
    )


def _stale(batch: Batch) -> Tensor | None:
    micros = batch.micro_batches
    if all(micro.is_stale_S is None for micro in micros):
        return None
    nobody = [torch.zeros_like(m.trained_count_S, dtype=torch.bool) for m in micros]
    parts = zip(micros, nobody, strict=True)
    return torch.cat([none_S if m.is_stale_S is None else m.is_stale_S for m, none_S in parts])


def _joined(batch: Batch, part_of: Callable[[MicroBatch], Tensor | None]) -> Tensor | None:
    """A part of every micro-batch, one behind the other; None where there is none."""
    parts = [part_of(micro) for micro in batch.micro_batches]
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), "all micro-batches of a step have the same parts"
    return torch.cat(present) if present else None
