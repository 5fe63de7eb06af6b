"""FSDP2 around a policy: which modules are sharded, how their shards are filled, and how whole tensors are
gathered, a layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from covey.checkpoint.shards import SavedShards, Shard, whole
from covey.errors import ConfigError
from covey.learner.sharding.layers import decoder_layers
from covey.learner.sharding.rows import OwnParts, ReadRows, parameter_of
from covey.models.policy import Policy
from covey.plan.layout import Layout
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Holds how a policy is sharded: over the last dimension of `mesh`, and equal along the others. `offload`
    keeps shards in the machine's memory; `keeps_weights` a layer's whole weights from forward to backward."""

    mesh: DeviceMesh
    device: torch.device
    offload: bool = False
    keeps_weights: bool = False

    @property
    def shard(self) -> int:
        """Return which shard this rank holds."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank's shards are the first of those that are equal."""
        return self.mesh.ndim == 1 or self.mesh.get_local_rank(0) == 0


def join_group(device: torch.device) -> None:
    """Make sure that there is a process group: one process has a group of one, which nobody else can join."""
    if not dist.is_initialized():
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)


def sharding_over(layout: Layout, device: torch.device) -> Sharding:
    """Return how a layout splits a model over the processes of this run. Collective."""
    join_group(device)
    world = dist.get_world_size()
    shards = layout.shard_gpus or world
    sides, names = (
        ((world,), ("shard",)) if shards == world else ((world // shards, shards), ("copy", "shard"))
    )
    mesh = init_device_mesh(device.type, sides, mesh_dim_names=names)
    return Sharding(
        mesh=mesh,
        device=device,
        offload=layout.offload == "params",
        keeps_weights=layout.zero_stage == 2,
    )


class Sharded:
    """Implements `Split` for a policy whose parameters are FSDP's shards; on the meta device until `fill`."""

    def __init__(self, policy: Policy, sharding: Sharding, compute_dtype: torch.dtype) -> None:
        self.policy, self.sharding = policy, sharding
        offload = CPUOffloadPolicy(pin_memory=sharding.device.type == "cuda")
        how: dict[str, Any] = {
            "mesh": sharding.mesh,
            "offload_policy": offload if sharding.offload else OffloadPolicy(),
            "reshard_after_forward": False if sharding.keeps_weights else None,
        }
        layers = decoder_layers(policy)
        for module in (*layers.values(), policy):
            _refuse_mixed(module, compute_dtype)
            fully_shard(module, mp_policy=_precision(module, compute_dtype), **how)
        policy.runs_on = sharding.device
        self.units: dict[str, Any] = {**layers, "": policy}

    @property
    def parameters(self) -> dict[str, DTensor]:
        """Return the shards by name."""
        return dict(self.policy.named_parameters())  # type: ignore[arg-type]

    def held(self) -> dict[str, Tensor]:
        """Return the float32 shards as plain tensors, not copied."""
        return {name: local(parameter) for name, parameter in self.parameters.items()}

    def masters(self) -> dict[str, Tensor]:
        """Return the float32 shards of the trained tensors."""
        return {name: local(p) for name, p in self.parameters.items() if p.requires_grad}

    @torch.no_grad()
    def fill(self, read: ReadRows) -> None:
        """Give every shard its weights; zeros where there are none yet."""
        shared: dict[int, nn.Parameter] = {}
        held = {}
        for name, parameter in self.policy.named_parameters(remove_duplicate=False):
            assert isinstance(parameter, DTensor)
            if id(parameter) not in shared:
                shared[id(parameter)] = self._filled(name, parameter, read)
            held[name] = shared[id(parameter)]
        self.policy.load_state_dict(held, strict=False, assign=True)
        for unit in self.units.values():
            # The shards are where they stay once FSDP has seen them; optimizers may hold on to them then.
            unit.unshard()
            unit.reshard()

    @torch.no_grad()
    def refill(self, values: Mapping[str, Tensor]) -> None:
        """Write the rows of whole tensors over those of the same name."""
        for name, value in values.items():
            parameter = self.parameters[name]
            first, last = self.rows_of(parameter)
            local(parameter).copy_(value[first:last])

    def _filled(self, name: str, parameter: DTensor, read: ReadRows) -> nn.Parameter:
        shape, device = parameter.to_local().shape, self.sharding.device
        own = torch.zeros(shape, dtype=parameter.dtype, device="cpu" if self.sharding.offload else device)
        rows = read(name, *self.rows_of(parameter)) if own.numel() else None
        if rows is not None:
            own.copy_(rows)
        made = DTensor.from_local(
            own,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        # It goes to the mesh's device, and offloaded shards would all be there until the last is filled.
        made._local_tensor = own
        return nn.Parameter(made, requires_grad=parameter.requires_grad)

    def rows_of(self, parameter: DTensor) -> tuple[int, int]:
        """Return which rows of a tensor this rank holds: `torch.chunk`'s."""
        mesh = self.sharding.mesh
        shards, own = mesh.size(mesh.ndim - 1), self.sharding.shard
        length = parameter.shape[0]
        each = -(-length // shards)
        first, last = min(length, own * each), min(length, (own + 1) * each)
        assert last - first == parameter.to_local().shape[0], "FSDP shards in another way than torch.chunk"
        return first, last

    def shards(self, tensors: Mapping[str, Tensor]) -> Iterator[Shard]:
        """Yield this rank's rows of tensors sharded as the parameters that they are named after, `KIND/NAME`
        or the name alone; of equal shards those of the first."""
        if not self.sharding.is_first_copy:
            return
        parameters = self.parameters
        for key, tensor in tensors.items():
            parameter = parameters[parameter_of(key)]
            if tensor.dim():
                yield Shard(key, tensor, self.rows_of(parameter)[0], tuple(parameter.shape))
            elif self.sharding.shard == 0:
                yield whole(key, tensor)

    def own_shards(self, saved: SavedShards) -> Mapping[str, Tensor]:
        """Return this rank's rows of what `shards` gave on any number of ranks."""
        parameters = self.parameters
        return OwnParts(saved, lambda key: saved.read(key, *self.rows_of(parameters[parameter_of(key)])))

    def let_go(self) -> None:
        """Free the weights that a pass without a backward pass leaves gathered."""
        for unit in self.units.values():
            unit.reshard()

    @contextmanager
    def unit(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Within it, the parameters of a unit are whole, by name, in the dtype that they compute in.
        Collective."""
        unit = self.units[name]
        unit.unshard()
        try:
            own = {n: p for n, p in unit.named_parameters() if not isinstance(p, DTensor)}
            yield {(f"{name}.{n}" if name else n): p for n, p in own.items()}
        finally:
            unit.reshard()

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter whole and as it computes, by name, a unit at a time. Collective."""
        for name in self.units:
            with self.unit(name) as tensors:
                yield from tensors.items()

    def each_whole(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these parameters whole and in float32, one at a time. Collective."""
        self.let_go()
        parameters = self.parameters
        for name in names:
            # Offloaded shards are gathered over the GPUs.
            yield name, parameters[name].detach().to(self.sharding.device).full_tensor()  # type: ignore[attr-defined]


def _refuse_mixed(unit: nn.Module, compute_dtype: torch.dtype) -> None:
    """Raise ConfigError (E115) if a unit would have to hold some trained tensors in float32 and cast the
    rest."""
    own = [n for n, p in unit.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    copies = [n for n in own if ".lora_" not in n]
    if compute_dtype == torch.float32 or not copies or len(copies) == len(own):
        return
    name = copies[0].replace(".modules_to_save.default", "")
    seen = tr("modules_to_save trains {name}, which is in the same layer as LoRA matrices.", name=name)
    cause = tr(
        "FSDP trains a layer in one dtype, but LoRA matrices need float32 and this module a lower one."
    )
    raise ConfigError(
        [
            problem(
                "E115",
                "modules_to_save",
                seen,
                cause,
                Fix(text=tr("compute in float32"), edits={"torch_dtype": "float32"}),
                Fix(text=tr("train the LoRA matrices only: leave out --modules_to_save")),
            )
        ]
    )


def _precision(unit: nn.Module, compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return FSDP's policy of dtypes: float32 shards compute in `compute_dtype`, those of a unit with an
    adapter in their own dtype. Gradients are reduced in float32. Inputs of a layer keep their dtype, rotary
    angles too."""
    own = {n: p for n, p in unit.named_parameters() if not isinstance(p, DTensor)}
    has_adapter = any(".lora_" in name for name in own)
    is_cast = (
        compute_dtype != torch.float32 and not has_adapter and any(p.requires_grad for p in own.values())
    )
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype if is_cast else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, not copied."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
