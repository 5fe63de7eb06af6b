"""What cannot be on a healthy run, checked on every optimizer step."""

from __future__ import annotations

from covey.comm import Comm
from covey.errors import GuardStop
from covey.types import Batch, Finding, Fix, StepResult


def check_step(batch: Batch, result: StepResult, step: int, comm: Comm) -> None:
    """Raise GuardStop where a step contradicts its own batch.

    F102: trained rows with advantages and an on-policy ratio, but a gradient of exactly 0. F103: a gradient
    and a learning rate, but no weight that moved.
    """
    stats = result.stats
    if stats is None:
        return
    # The norm is the same on every rank, so all of them ask each other or none does.
    if stats.grad_norm == 0.0 and any(comm.max([float(_has_signal(batch))])):
        raise GuardStop(
            Finding(
                code="F102",
                seen=f"step {step}: trained tokens have advantages and the gradient is exactly 0",
                why="Nothing is learned, and nothing else would say so: loss and reward look as usual.",
                cause="The loss is cut off from the weights: frozen parameters, or a layer that detaches.",
                fixes=(Fix(text="name the model's directory in a report; this is a fault of covey"),),
                step=step,
            )
        )
    if stats.grad_norm > 0.0 and stats.learning_rate > 0.0 and stats.frac_params_changed == 0.0:
        raise GuardStop(
            Finding(
                code="F103",
                seen=f"step {step}: gradient norm {stats.grad_norm:.3g}, learning rate "
                f"{stats.learning_rate:.3g}, and not one weight moved",
                why="The update is smaller than the weights can hold, so the model stays what it was.",
                cause="A learning rate far below the spacing of float32, or masters that are not stepped.",
                fixes=(Fix(text="a larger learning rate", edits={"learning_rate": 1e-6}),),
                step=step,
            )
        )


def _has_signal(batch: Batch) -> bool:
    """Whether this rank's share holds an advantage that an on-policy gradient cannot be 0 for."""
    return any(
        micro.old_logprob_N is None and bool((micro.advantage_N != 0).any()) for micro in batch.micro_batches
    )
