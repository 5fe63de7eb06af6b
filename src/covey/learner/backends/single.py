"""One process: plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from covey.algorithm.losses import LossOutput
from covey.checkpoint.model_files import ModelFiles
from covey.checkpoint.pieces import Piece, SavedPieces, share_of
from covey.checksums import checksum
from covey.learner.backends.base import Advance, Annotation, LossFunction, ModelWriter, Objective
from covey.learner.backends.writers import adapter_writer, model_writer
from covey.learner.fingerprints import frozen_tensors
from covey.learner.offload import Parked, own_memory
from covey.learner.optimizer import Across, Masters, OptimizerConfig
from covey.learner.reference import MovingReference
from covey.learner.sampled import sampled_gradients
from covey.models.live import fold_adapter
from covey.models.lora import adapter_off, adapter_parameters, adapter_tensors, merged, plain_weights
from covey.models.policy import Policy
from covey.types import MicroBatch, StepStats, TokenStats


class SingleBackend:
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
        config: OptimizerConfig,
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
        self.masters = Masters.of(policy, config, compute_dtype, adapter_parameters(policy), across)
        self._offload = config.offload
        self._parked_reference = self._parkable_reference()

    def _parkable_reference(self) -> Parked:
        """The tensors of the reference, if there are any beside the policy's; away if they are to be."""
        reference, moving = self.reference, self.moving
        if not (self._offload.reference or self._offload.model):
            return Parked()
        own = [] if reference is None else list(reference.parameters())
        if moving is None:
            own_memory(own)
        parked = Parked(lambda: [*own, *([] if moving is None else moving.own_tensors())])
        if moving is not None:
            moving.parked = parked
        if self._offload.reference:
            parked.leave()
        return parked

    def use_layout(self, probed: Policy) -> None:
        """The policy was probed itself."""

    @torch.no_grad()
    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor:
        """Logprobs of the trained tokens by the current policy (`old`) or by the reference, or entropies."""
        values = []
        with self._model_of(which) as policy:
            for micro in micros:
                stats = policy(micro)
                values.append(stats.entropy_N if which == "entropy" else stats.logprob_N)
                advance()
        return torch.cat(values)

    @contextmanager
    def _model_of(self, which: Annotation) -> Iterator[Policy]:
        if which != "reference":
            self._let_reference_go()
            yield self.policy
            return
        if self._parked_reference.is_away:
            # It stays until something else is computed: a rollout is annotated in several calls.
            self._parked_reference.come()
        if self.moving is not None:
            with self.moving.view() as reference:
                yield reference
        elif self.policy.adapter is not None:
            with adapter_off(self.policy):
                yield self.policy
        else:
            assert self.reference is not None, "nothing asked for a reference when the run was built"
            yield self.reference

    def _let_reference_go(self) -> None:
        if self._offload.reference and not self._parked_reference.is_away:
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

    def plain_gradient(
        self,
        micros: Sequence[MicroBatch],
        objective: Objective,
        sample: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """No `.grad` is written, and of a gradient no more is kept than its sample."""
        trained = {n: p for n, p in self.policy.named_parameters() if p.requires_grad}
        with sampled_gradients(trained, sample) as sums:
            for micro in micros:
                with self.policy.recomputing_prompts():
                    stats = self.policy(micro)
                torch.autograd.grad(objective(stats, micro), list(trained.values()), allow_unused=True)
        return sums

    def step(self, learning_rate: float) -> StepStats:
        """One optimizer step."""
        return self.masters.step(learning_rate)

    def move_reference(self, step: int) -> bool:
        """Where the reference follows the policy, and a sync is due."""
        return self.moving is not None and self.moving.move(step, self.masters)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """The policy itself, in evaluation mode, its adapter merged where that is exact; what no rollout
        needs is in CPU memory where that was asked for."""
        training = self.policy.training
        self.policy.eval()
        try:
            with self._rest_away(), merged(self.policy):
                yield self.policy
        finally:
            self.policy.train(training)

    @contextmanager
    def _rest_away(self) -> Iterator[None]:
        self._let_reference_go()
        if not self._offload.model:
            yield
            return
        with self.masters.away(), self._parked_reference.away():
            if self.policy.device.type == "cuda":
                # The memory goes to the cache of a rollout, whose blocks have other sizes.
                torch.cuda.empty_cache()
            yield

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Weights under transformers' names, adapters merged, in `dtype` (None: as held)."""
        for name, weight in plain_weights(self.policy):
            yield name, weight if dtype is None else weight.to(dtype)

    def frozen(self) -> Mapping[str, Tensor]:
        """Frozen tensors of the policy, and a reference that does not move."""
        found = frozen_tensors(self.policy, None if self.moving is not None else self.reference)
        return {name: self._parked_reference.look(tensor) for name, tensor in found.items()}

    def trained(self) -> Mapping[str, Tensor]:
        """The trained parameters, as they compute."""
        return {n: p.detach() for n, p in self.policy.named_parameters() if p.requires_grad}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Those of the tensors themselves."""
        return [checksum(tensor) for tensor in tensors.values()]

    def model_writer(self, origin: Path, base: str | None) -> ModelWriter:
        """Tensors are dealt out to the processes; the first one writes an adapter."""
        adapter = self.policy.adapter
        if adapter is not None:
            return adapter_writer(adapter, adapter_tensors(adapter), origin, base, self.dp_rank)
        files = ModelFiles(self.policy.model, self.dp_rank, self.dp_world)
        return model_writer(files.add_all(self.policy.model.named_parameters()), origin, self.dp_rank)

    def pieces(self) -> Iterable[Piece]:
        """Its part of AdamW's moments and the masters, whole tensors."""
        return share_of(self.masters.state(), self.dp_rank, self.dp_world)

    def give_back(self, model: nn.Module) -> None:
        """The policy is that model; an adapter is added to it for good."""
        fold_adapter(self.policy)

    def close(self) -> None:
        """Nothing to let go of."""

    def load_pieces(self, saved: SavedPieces) -> None:
        """Restore moments and masters."""
        self.masters.load_state(saved)
