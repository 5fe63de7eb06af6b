"""Memory for the whole weights of a model that is split over ranks, and reductions over these ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.models.policy import Policy


class ShardReduction:
    """Sums values over the ranks that hold the shards of one model; `all` asks every rank of the run."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all(self, own: bool) -> bool:
        """Return whether `own` is true on every rank. Collective."""
        flag = torch.tensor(float(own))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums over the shards. Collective."""
        out = values.clone()
        dist.all_reduce(out, group=self._group)
        return out


class WeightBuffer:
    """Holds the parameters of a policy, whose memory is allocated only while they are needed."""

    def __init__(self, policy: Policy, device: torch.device, dtypes: Mapping[str, torch.dtype]) -> None:
        self._policy, self.dtypes = policy.requires_grad_(False).eval(), dtypes
        self.is_filled = False
        made: dict[int, nn.Parameter] = {}
        for name, parameter in policy.named_parameters():
            empty = torch.empty(parameter.shape, dtype=dtypes[name], device=device)
            empty.untyped_storage().resize_(0)
            made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
        for module in policy.modules():
            for name, held in module._parameters.items():
                if held is not None:
                    module._parameters[name] = made[id(held)]
        policy.to(device)

    @contextmanager
    def filled(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Within it, the policy has a copy of these weights; afterwards their memory is freed."""
        assert not self.is_filled, "the sampler has weights"
        own = dict(self._policy.named_parameters())
        self.is_filled = True
        try:
            for name, weight in weights:
                storage = own[name].untyped_storage()
                storage.resize_(weight.numel() * own[name].element_size())
                own[name].data.copy_(weight)
            yield
        finally:
            self.is_filled = False
            for parameter in own.values():
                parameter.untyped_storage().resize_(0)

    @contextmanager
    def lent(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it, the policy's tensors of these names are `weights` themselves, not copies."""
        own = dict(self._policy.named_parameters())
        empty = {name: own[name].data for name in weights}
        try:
            for name, weight in weights.items():
                own[name].data = weight.detach()
            yield
        finally:
            for name, data in empty.items():
                own[name].data = data


def computing_dtypes(parameters: Mapping[str, Tensor], compute_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype that each parameter computes in: its own, but `compute_dtype` where it is trained and
    is no matrix of an adapter."""
    return {
        name: compute_dtype if p.requires_grad and ".lora_" not in name else p.dtype
        for name, p in parameters.items()
    }
