"""One process: plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.checkpoint.shards import SavedShards, Shard, share_of
from covey.learner.backends.base import Annotation, LossFunction
from covey.learner.backends.whole import WholeModel
from covey.learner.offload import Offloaded, own_memory
from covey.learner.optimizer import Masters, Reduction
from covey.learner.rates import rate_factors
from covey.learner.reference import MovingReference
from covey.models.lora import adapter_parameters
from covey.models.policy import Policy, RowLayout
from covey.options.schema import LearnerOptions
from covey.types import MicroBatch, StepStats, TokenStats


class SingleBackend(WholeModel):
    """The policy in one process; `reference` is a frozen policy where the loss has a KL term.

    A policy with an adapter needs none: its reference is the policy with the adapter off, or with that of
    `moving`.
    """

    dp_rank, dp_world = 0, 1
    grad_scale = 1.0
    is_sharded = False

    def __init__(
        self,
        policy: Policy,
        options: LearnerOptions,
        *,
        compute_dtype: torch.dtype = torch.float32,
        reference: Policy | None = None,
        moving: MovingReference | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        assert policy.adapter is None or reference is None, "an adapter's reference is its own base"
        self.policy = self.sampler = policy
        # A step without images is the same on every backend, DDP waits for the gradient of every parameter,
        # and where no text is trained the loss of text alone has none.
        policy.without_images = "zeros"
        self.reference = reference
        self.moving = moving
        self.masters = Masters.of(
            policy,
            options,
            compute_dtype,
            adapter_parameters(policy),
            reduction,
            factors=rate_factors(policy, options),
        )
        self._trains_text = "llm" in policy.trained_parts
        self._options = options
        self._offloaded_reference = self._offloadable_reference()

    def _offloadable_reference(self) -> Offloaded:
        """Return the tensors of the reference that are not the policy's, in CPU memory if they wait there."""
        reference, moving = self.reference, self.moving
        if not (self._options.offload_reference or self._options.offload_model):
            return Offloaded()
        own = [] if reference is None else list(reference.parameters())
        if moving is None:
            own_memory(own)
        offloaded = Offloaded(lambda: [*own, *([] if moving is None else moving.own_tensors())])
        if moving is not None:
            moving.offloaded = offloaded
        if self._options.offload_reference:
            offloaded.to_cpu()
        return offloaded

    def _use_layout(self, layout: RowLayout) -> None:
        """Do nothing: the policy was probed itself."""

    def _model_of(self, which: Annotation) -> AbstractContextManager[Policy]:
        if which != "reference":
            self._let_reference_go()
        elif self._offloaded_reference.is_on_cpu:
            # It stays until something else is computed: a rollout is annotated in several calls.
            self._offloaded_reference.to_device()
        return super()._model_of(which)

    def _let_reference_go(self) -> None:
        if self._options.offload_reference and not self._offloaded_reference.is_on_cpu:
            self._offloaded_reference.to_cpu(is_changed=False)

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Run forward, loss and backward of a micro-batch; gradients add up in float32."""
        self._let_reference_go()
        stats = self.policy(micro)
        output = loss(stats, micro)
        with self.masters.absorbing():
            output.loss.backward()
        return stats, output

    def gradient_probe(self) -> Tensor | None:
        """Return a part of the accumulated gradient; None where passes without images have none."""
        return self.masters.gradient_sample() if self._trains_text else None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Return every tensor's accumulated gradient."""
        return self.masters.each_gradient()

    def step(self, learning_rate: float) -> StepStats:
        """Take one optimizer step."""
        return self.masters.step(learning_rate)

    def move_reference(self, step: int) -> bool:
        """Move a reference that follows the policy where a sync is due; return whether it was."""
        return self.moving is not None and self.moving.move(step, self.masters.each())

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """Within it, the policy samples, and with `offload_model` idle tensors are in CPU memory."""
        with self._idle_tensors_on_cpu(), super().rollout_view() as sampler:
            yield sampler

    @contextmanager
    def _idle_tensors_on_cpu(self) -> Iterator[None]:
        self._let_reference_go()
        if not self._options.offload_model:
            yield
            return
        with self.masters.on_cpu(), self._offloaded_reference.on_cpu():
            if self.policy.device.type == "cuda":
                # The memory goes to the cache of a rollout, whose blocks have other sizes.
                torch.cuda.empty_cache()
            yield

    def frozen(self) -> Mapping[str, Tensor]:
        """Return the tensors that no step changes, also those that are in CPU memory."""
        return {name: self._offloaded_reference.read(tensor) for name, tensor in super().frozen().items()}

    def shards(self) -> Iterable[Shard]:
        """Return this rank's share of AdamW's moments and the masters, whole tensors."""
        return share_of(self.masters.state(), self.dp_rank, self.dp_world)

    def load_shards(self, saved: SavedShards) -> None:
        """Restore moments and masters."""
        self.masters.load_state(saved)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
