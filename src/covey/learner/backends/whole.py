"""Models that each rank holds whole: how they sample, how they are checked, saved and given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from covey.checkpoint.model_files import ModelFiles
from covey.checksums import checksum
from covey.learner.backends.base import ModelWriter
from covey.learner.backends.passes import Passes
from covey.learner.backends.writers import adapter_writer, model_writer
from covey.learner.fingerprints import frozen_tensors
from covey.models.live import fold_adapter
from covey.models.load import Attention, choose_stream
from covey.models.lora import (
    AdapterAlone,
    adapter_alone,
    adapter_tensors,
    in_dtype,
    merged,
    plain_weights,
)
from covey.models.policy import Policy
from covey.text_files import TextFiles


class WholeModel(Passes):
    """Holds a whole policy, which samples too."""

    dp_rank: int
    dp_world: int

    def choose_layout(self, attention: Attention) -> None:
        """Use the layout that the policy passes the probe with."""
        choose_stream(self.policy, attention)
        self._use_layout(self.policy.layout)

    @contextmanager
    def rollout_view(self) -> Iterator[Policy]:
        """Within it, the policy is in evaluation mode, with its adapter merged where that is exact."""
        training = self.policy.training
        self.policy.eval()
        try:
            with merged(self.policy):
                yield self.policy
        finally:
            self.policy.train(training)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield weights under transformers' names, adapters merged, in `dtype` (None: as held)."""
        return in_dtype(plain_weights(self.policy), dtype)

    @property
    def adapter_alone(self) -> AdapterAlone | None:
        """Return the adapter of the policy, if there is one."""
        return adapter_alone(self.policy)

    def frozen(self) -> Mapping[str, Tensor]:
        """Return the frozen tensors of the policy and of a reference that does not move."""
        return frozen_tensors(self.policy, None if self.moving is not None else self.reference)

    def trained(self) -> Mapping[str, Tensor]:
        """Return the trained parameters, as they compute."""
        return {n: p.detach() for n, p in self.policy.named_parameters() if p.requires_grad}

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> list[int]:
        """Return the checksums of the tensors themselves."""
        return [checksum(tensor) for tensor in tensors.values()]

    def model_writer(self, text: TextFiles, base: str | None) -> ModelWriter:
        """Return what writes this rank's share of the tensors; the first rank writes an adapter."""
        adapter = self.policy.adapter
        if adapter is not None:
            return adapter_writer(adapter, adapter_tensors(adapter), text, base, self.dp_rank)
        files = ModelFiles(self.policy.model, self.dp_rank, self.dp_world)
        return model_writer(files.add_all(self.policy.model.named_parameters()), text, self.dp_rank)

    def give_back(self, model: nn.Module) -> None:
        """Merge the adapter into the model, which is the policy's own."""
        fold_adapter(self.policy)
