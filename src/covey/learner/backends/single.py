"""One process: plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from covey.algorithm.losses import LossOutput
from covey.checkpoint.pieces import Piece, SavedPieces, share_of
from covey.learner.backends.base import Annotation, LossFunction
from covey.learner.backends.whole import WholeModel
from covey.learner.offload import Parked, own_memory
from covey.learner.optimizer import Across, Masters
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
        across: Across | None = None,
    ) -> None:
        assert policy.adapter is None or reference is None, "an adapter's reference is its own base"
        self.policy = self.sampler = policy
        self.reference = reference
        self.moving = moving
        self.masters = Masters.of(policy, options, compute_dtype, adapter_parameters(policy), across)
        self._options = options
        self._parked_reference = self._parkable_reference()

    def _parkable_reference(self) -> Parked:
        """The tensors of the reference, if there are any beside the policy's; away if they are to be."""
        reference, moving = self.reference, self.moving
        if not (self._options.offload_reference or self._options.offload_model):
            return Parked()
        own = [] if reference is None else list(reference.parameters())
        if moving is None:
            own_memory(own)
        parked = Parked(lambda: [*own, *([] if moving is None else moving.own_tensors())])
        if moving is not None:
            moving.parked = parked
        if self._options.offload_reference:
            parked.leave()
        return parked

    def _use_layout(self, layout: RowLayout) -> None:
        """The policy was probed itself."""

    def _model_of(self, which: Annotation) -> AbstractContextManager[Policy]:
        if which != "reference":
            self._let_reference_go()
        elif self._parked_reference.is_away:
            # It stays until something else is computed: a rollout is annotated in several calls.
            self._parked_reference.come()
        return super()._model_of(which)

    def _let_reference_go(self) -> None:
        if self._options.offload_reference and not self._parked_reference.is_away:
            self._parked_reference.leave(is_changed=False)

    def backward(self, micro: MicroBatch, loss: LossFunction, *, last: bool) -> tuple[TokenStats, LossOutput]:
        """Forward, loss and backward; gradients add up in float32."""
        self._let_reference_go()
        stats = self.policy(micro)
        output = loss(stats, micro)
        with self.masters.absorbing():
            output.loss.backward()
        return stats, output

    def gradient_probe(self) -> Tensor:
        """A part of the accumulated gradient."""
        return self.masters.gradient_sample()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's accumulated gradient."""
        return self.masters.each_gradient()

    def step(self, learning_rate: float) -> StepStats:
        """One optimizer step."""
        return self.masters.step(learning_rate)

    def move_reference(self, step: int) -> bool:
        """Where the reference follows the policy, and a sync is due."""
        return self.moving is not None and self.moving.move(step, self.masters.each())

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """What no rollout needs is in CPU memory where that was asked for."""
        with self._rest_away(), super().rollout_view() as sampler:
            yield sampler

    @contextmanager
    def _rest_away(self) -> Iterator[None]:
        self._let_reference_go()
        if not self._options.offload_model:
            yield
            return
        with self.masters.away(), self._parked_reference.away():
            if self.policy.device.type == "cuda":
                # The memory goes to the cache of a rollout, whose blocks have other sizes.
                torch.cuda.empty_cache()
            yield

    def frozen(self) -> Mapping[str, Tensor]:
        """Also those that are in CPU memory."""
        return {name: self._parked_reference.look(tensor) for name, tensor in super().frozen().items()}

    def pieces(self) -> Iterable[Piece]:
        """Its part of AdamW's moments and the masters, whole tensors."""
        return share_of(self.masters.state(), self.dp_rank, self.dp_world)

    def load_pieces(self, saved: SavedPieces) -> None:
        """Restore moments and masters."""
        self.masters.load_state(saved)

    def close(self) -> None:
        """Nothing to let go of."""
