"""Several processes with a whole model each: torch's DistributedDataParallel around the policy."""

# No postponed annotations in this file: DDP compares those of its hook with the classes themselves.
import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from covey.algorithm.losses import LossOutput
from covey.learner.backends.base import LossFunction
from covey.learner.backends.single import SingleBackend
from covey.learner.optimizer import LocalReduction, Masters
from covey.learner.reference import MovingReference
from covey.models.policy import Policy
from covey.options.schema import LearnerOptions
from covey.types import MicroBatch, TokenStats

# Rotary frequencies are the only buffers and are equal on every rank; torch 2.13 renames the option.
_NO_BUFFERS = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class DDPBackend(SingleBackend):
    """Holds one whole model in each process. All are stepped by the same gradient, so they stay equal. DDP
    averages gradients over ranks in the last micro-batch of a step, so losses are scaled by the number of
    ranks."""

    def __init__(
        self,
        policy: Policy,
        options: LearnerOptions,
        *,
        compute_dtype: torch.dtype = torch.float32,
        reference: Policy | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        self.dp_rank, self.dp_world = dist.get_rank(), dist.get_world_size()
        self.grad_scale = float(self.dp_world)
        super().__init__(
            policy,
            options,
            compute_dtype=compute_dtype,
            reference=reference,
            moving=moving,
            reduction=_CopyReduction(),
        )
        self._wrapped = DistributedDataParallel(policy, **_NO_BUFFERS)  # type: ignore[arg-type]
        self._is_low = any(p.dtype != torch.float32 for p in self.masters.params)
        if self._is_low:
            self._wrapped.register_comm_hook(self.masters, _reduce_in_float32)

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Run forward, loss and backward; gradients are reduced over ranks while the `last` backward runs."""
        self._let_reference_go()
        quiet: AbstractContextManager[None] = nullcontext() if last else self._wrapped.no_sync()
        with quiet:
            stats = self._wrapped(micro)
            output = loss(stats, micro)
            (output.loss * self.grad_scale).backward()
        if last and self._is_low:
            # The hook has added this backward's gradients to the masters already.
            self.masters.drop_low_gradients()
        else:
            self.masters.absorb()
        return stats, output

    def close(self) -> None:
        """Let go of DDP, whose reducer must not outlive the process group."""
        del self._wrapped


class _CopyReduction(LocalReduction):
    """Reduces over ranks that hold equal tensors: only whether a gradient is finite may differ."""

    def all(self, own: bool) -> bool:
        """Whether it holds on every rank."""
        flag = torch.tensor(float(own))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


def _reduce_in_float32(masters: Masters, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of low-precision gradients through the masters' float32 accumulators.

    Earlier micro-batches are in the accumulators already; the last one's gradient joins them and the sum is
    averaged over ranks in float32. What DDP writes back into `.grad` is not used. A bucket holds one dtype:
    one of float32 has whole sums in it, and what DDP writes back is the average.
    """
    if bucket.buffer().dtype == torch.float32:
        total = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(total, async_op=True).get_future().then(lambda done: done.value()[0])
    owners = [masters.master_of(p) for p in bucket.parameters()]
    flat = torch.cat([masters.add(m, g).reshape(-1) for m, g in zip(owners, bucket.gradients(), strict=True)])
    flat /= dist.get_world_size()
    future = dist.all_reduce(flat, async_op=True).get_future()

    def write(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        sizes = [m.numel() for m in owners]
        for master, part in zip(owners, done.value()[0].split(sizes), strict=True):
            master.grad = part.view_as(master).clone()
        return bucket.buffer()

    return future.then(write)  # type: ignore[no-any-return]
