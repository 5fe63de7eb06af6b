"""Several processes with a whole model each: torch's DistributedDataParallel around the policy."""

# No postponed annotations in this file: DDP compares those of its hook with the classes themselves.
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from covey.algorithm.losses import LossOutput
from covey.checkpoint.model_files import ModelFiles
from covey.checkpoint.pieces import Piece, SavedPieces, share_of
from covey.learner.backends.base import Advance, Annotation, LossFunction
from covey.learner.backends.single import SingleBackend
from covey.learner.optimizer import Masters, OptimizerConfig
from covey.learner.reference import MovingReference
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats

# Rotary frequencies are the only buffers and are equal on every rank; torch 2.13 renames the option.
_NO_BUFFERS = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


class DDPBackend:
    """DDP averages gradients over ranks in the last micro-batch of a step, so losses are scaled by their
    number."""

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        reference: Policy | None = None,
        moving: MovingReference | None = None,
    ) -> None:
        self._local = SingleBackend(
            policy, config, compute_dtype=compute_dtype, reference=reference, moving=moving
        )
        self.policy, self.reference, self.moving = policy, reference, moving
        self.world = dist.get_world_size()
        self.grad_scale = float(self.world)
        self._wrapped = DistributedDataParallel(policy, **_NO_BUFFERS)  # type: ignore[arg-type]
        self._is_low = any(p.dtype != torch.float32 for p in self.masters.params)
        if self._is_low:
            self._wrapped.register_comm_hook(self.masters, _reduce_in_float32)

    @property
    def masters(self) -> Masters:
        """The optimizer's float32 parameters."""
        return self._local.masters

    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Logprobs without gradient; no communication."""
        return self._local.annotate(micros, which, advance)

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward; gradients are reduced over ranks while the `last` backward runs."""
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

    def gradient_sample(self) -> Tensor:
        """A part of this rank's accumulated gradient, of all ranks' after the last backward of a step."""
        return self._local.gradient_sample()

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's gradient, of all ranks' rows after the last backward of a step."""
        return self._local.each_gradient()

    def step(self, learning_rate: float) -> StepStats:
        """The same step on every rank; none takes it where one rank's gradient is not finite."""
        return self.masters.step(learning_rate, _is_everywhere)

    def move_reference(self, step: int) -> bool:
        """The same move on every rank."""
        return self._local.move_reference(step)

    def rollout_view(self) -> AbstractContextManager[Policy]:
        """Every rank's own whole copy."""
        return self._local.rollout_view()

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights of this rank's copy, equal on all."""
        return self._local.named_weights(dtype)

    def model_files(self) -> ModelFiles:
        """This rank's part of the model."""
        files = ModelFiles(self.policy.model, dist.get_rank(), self.world)
        return files.add_all(self.policy.model.named_parameters())

    def pieces(self) -> Iterable[Piece]:
        """This rank's part of the optimizer's tensors, which are whole and equal on all ranks."""
        return share_of(self.masters.state(), dist.get_rank(), self.world)

    def close(self) -> None:
        """Let go of DDP, whose reducer must not outlive the process group."""
        del self._wrapped

    def load_pieces(self, saved: SavedPieces) -> None:
        """Restore every tensor on every rank."""
        self._local.load_pieces(saved)


def _is_everywhere(own: bool) -> bool:
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
