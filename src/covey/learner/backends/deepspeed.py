"""DeepSpeed around a policy: ZeRO-2 and ZeRO-3. This is the one module that imports deepspeed.

covey owns the loop: it says which micro-batch is the last of a step, looks at the gradient, clips it and then
has DeepSpeed's optimizer step. What is looked at are the runs of numbers that this rank steps (`Fragments`),
in float32, where DeepSpeed keeps them: what is changed there is what is stepped.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.algorithm.losses import LossOutput
from covey.environment import silence_libraries
from covey.learner.backends.base import LossFunction
from covey.learner.optimizer import NonFiniteGradient
from covey.learner.rates import rate_factors
from covey.learner.sharding.fragments import Fragment, Fragments
from covey.learner.sharding.rows import ReadRows
from covey.learner.sharding.units import join_group
from covey.learner.sharding.weight_buffer import computing_dtypes
from covey.models.policy import Policy
from covey.options.training import OptimizerOptions
from covey.texts import tr
from covey.types import MicroBatch, TokenStats

Settings = Mapping[str, Any]


def _library(device: torch.device) -> Any:
    """Return DeepSpeed, set up on torch's process group: silent, and without compiling a kernel."""
    join_group(device)
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # Its first forward pass reads this, too; no launcher has set it where there is one process.
    os.environ.setdefault("LOCAL_RANK", "0")
    silence_libraries()
    with _without_mlflow():
        import deepspeed
    # It calls collectives of torch by names that are on their way out.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if getattr(deepspeed.comm.comm.cdb, "made_on", None) is not dist.group.WORLD:
        # Its groups belong to a process group that has ended.
        deepspeed.utils.groups._release_process_group_references(None)
        deepspeed.comm.comm.cdb = None
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    deepspeed.comm.comm.cdb.made_on = dist.group.WORLD
    return deepspeed


@contextmanager
def _without_mlflow() -> Iterator[None]:
    """Within it, DeepSpeed is imported without mlflow, which takes most of the import's time and serves an
    autotuner that covey does not use."""
    is_hidden = "mlflow" not in sys.modules
    if is_hidden:
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules["mlflow"]


def _settings(given: Settings, dtype: torch.dtype) -> dict[str, Any]:
    """Return DeepSpeed's settings: the dtype of what it trains, float32 for an adapter; torch's `linear`
    stays, which DeepSpeed would replace for every model of this process."""
    own = copy.deepcopy(dict(given))
    own["bf16"] = {"enabled": dtype == torch.bfloat16}
    own["zero_optimization"] = {**own["zero_optimization"], "memory_efficient_linear": False}
    return own


class ZeroEngine:
    """Holds DeepSpeed's engine around a policy, with the optimizer of what it trains.

    `masters` are this rank's fragments of the trained tensors in float32, by name. An engine without
    `options` only forwards.
    """

    def __init__(self, policy: Policy, given: Settings, options: OptimizerOptions | None) -> None:
        library = _library(policy.device)
        self.policy, self._gathered = policy, library.zero.GatheredParameters
        self._trained = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self.stage: int = given["zero_optimization"]["stage"]
        every = self._trained.values() if options is not None else policy.parameters()
        settings = _settings(given, next(iter(every)).dtype)
        self._adam = None if options is None else self._make_adam(options)
        self._engine: Any = library.initialize(model=policy, optimizer=self._adam, config=settings)[0]
        self._optimizer: Any = self._engine.optimizer
        self.masters: dict[str, nn.Parameter] = {}
        self._places: dict[int, tuple[Tensor, int, int]] = {}
        found = (
            {name: self._place(name, p) for name, p in self._trained.items()} if options is not None else {}
        )
        self.fragments = Fragments(found, policy.device)

    def _make_adam(self, options: OptimizerOptions) -> torch.optim.Optimizer:
        """AdamW of torch; weight decay spares biases and norms, and a part of the model may have a learning
        rate of its own."""
        own = rate_factors(self.policy, options)
        factors = {name: own.get(name, 1.0) for name in self._trained}
        kinds = ((True, options.weight_decay), (False, 0.0))
        groups = [
            {"params": params, "weight_decay": decay, "factor": factor}
            for factor in dict.fromkeys(factors.values())
            for is_matrix, decay in kinds
            if (
                params := [
                    p
                    for n, p in self._trained.items()
                    if (len(self.shape(n)) > 1) == is_matrix and factors[n] == factor
                ]
            )
        ]
        return torch.optim.AdamW(groups, lr=0.0, betas=options.betas, eps=options.adam_epsilon, fused=True)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole trained tensor."""
        parameter = self._trained[name]
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def _place(self, name: str, parameter: Any) -> Fragment:
        """Return the place of this rank's fragment, of which its master is made."""
        optimizer, shape = self._optimizer, self.shape(name)
        if self.stage == 3:
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first, count = _partition(parameter)
            flat = optimizer.fp32_partitioned_groups_flat[group]
        elif parameter._hp_mapping is None:
            flat, offset, first, count = optimizer.single_partition_of_fp32_groups[0], 0, 0, 0
        else:
            mapping = parameter._hp_mapping
            flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
            offset = mapping.hp_fragment_address.start
            first, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        master = nn.Parameter(flat.detach().narrow(0, offset, count))
        self.masters[name] = master
        self._places[id(master)] = flat, offset, count
        return Fragment(shape, first, count)

    # -- a step

    def backward(
        self, micro: MicroBatch, loss: LossFunction, scale: float, *, last: bool
    ) -> tuple[TokenStats, LossOutput]:
        """Run forward, loss and backward of a micro-batch; its gradients are reduced as it ends.
        Collective."""
        self._engine.set_gradient_accumulation_boundary(last)
        stats = self._engine(micro)
        output = loss(stats, micro)
        self._engine.backward(output.loss * scale, scale_wrt_gas=False)
        if last:
            for name, master in self.masters.items():
                master.grad = self._gradient(name)
        return stats, output

    def _gradient(self, name: str) -> Tensor:
        """Return this rank's fragment of the accumulated gradient, not copied."""
        parameter: Any = self._trained[name]
        count = self.fragments[name].count
        if self.stage == 3:
            part, _ = self._optimizer._get_fp32_grad_state_partition(parameter, True)
        elif count:
            part = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        else:
            return self.masters[name].new_empty(0)
        assert part.dtype == torch.float32, "DeepSpeed accumulates in another dtype"
        return part.detach().reshape(-1).narrow(0, 0, count)  # type: ignore[no-any-return]

    def step(self, learning_rate: float) -> None:
        """Have DeepSpeed's optimizer step, and every rank hold the new weights. Collective."""
        assert self._adam is not None
        for group in self._adam.param_groups:
            group["lr"] = learning_rate * group["factor"]
        for master in self.masters.values():
            master.grad = None
        self._engine.step()
        if self._optimizer.overflow:
            raise NonFiniteGradient(tr("DeepSpeed found a gradient that is not finite, and took no step"))
        self._forget()

    def discard(self) -> None:
        """Let go of the accumulated gradient: the next step is as if it had never been."""
        optimizer = self._optimizer
        for master in self.masters.values():
            master.grad = None
        optimizer.zero_grad(set_to_none=True)
        if self.stage == 3:
            optimizer.reset_cpu_buffers()
            self._forget()
            return
        optimizer._release_preflattened_grad_buffers()
        for group in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[group] = None
            optimizer.all_grad_tensors[group] = None
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
        optimizer.micro_step_id = -1

    def _forget(self) -> None:
        """Zero the gradients in stage 3: where the next step has none, DeepSpeed would take the old one."""
        for name in self.masters if self.stage == 3 else ():
            self._gradient(name).zero_()

    def moments(self) -> list[Tensor]:
        """Return the moments of all masters, with DeepSpeed's padding."""
        return [v for flat in self._flats() for v in self._state(flat).values() if v.dim()]

    def state(self, master: Tensor) -> Mapping[str, Tensor]:
        """Return moments and step count of a master; nothing before the first step."""
        flat, offset, count = self._places[id(master)]
        held = self._state(flat)
        return {k: v.narrow(0, offset, count) if v.dim() else v for k, v in held.items()}

    def _flats(self) -> Iterable[Tensor]:
        """Return the buffers that DeepSpeed steps, each once."""
        return {id(flat): flat for flat, _, _ in self._places.values()}.values()

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        assert self._adam is not None
        return self._adam.state.get(flat, {})

    @torch.no_grad()
    def load(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Go on with moments and steps."""
        assert self._adam is not None
        flat, offset, count = self._places[id(master)]
        for other in self._flats():
            if not self._state(other):
                zeros = {k: torch.zeros_like(other.detach()) for k, v in moments.items() if v.dim()}
                steps = {"step": torch.zeros((), dtype=torch.float32, device=other.device)}
                self._adam.state[other] = {**steps, **zeros}
        for key, value in moments.items():
            held = self._state(flat)[key]
            (held.narrow(0, offset, count) if value.dim() else held).copy_(value)

    # -- weights

    def held(self) -> dict[str, Tensor]:
        """Return this rank's part of each tensor as it computes, in stage 3."""
        own: dict[str, Any] = dict(self.policy.named_parameters())
        return {n: p.ds_tensor.detach().reshape(-1)[: _partition(p)[1]] for n, p in own.items()}

    def let_go(self) -> None:
        """Free the weights that passes have left gathered, in stage 3."""
        getattr(self._optimizer, "parameter_offload", self._optimizer).partition_all_parameters()

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Within it, these parameters are whole, in stage 3. Collective."""
        with self._gathered(list(parameters)):
            yield

    def close(self) -> None:
        """Take DeepSpeed's hooks off the policy."""
        self._engine.destroy()


def partition(policy: Policy, given: Settings, read: ReadRows, compute_dtype: torch.dtype) -> None:
    """Give a policy without weights its weights, tensor by tensor, each split over the ranks at once.

    The first rank alone reads them. Collective.
    """
    library = _library(policy.device)
    dtypes = computing_dtypes(dict(policy.named_parameters()), compute_dtype)
    made: dict[int, nn.Parameter] = {}
    first: Any = None
    for name, parameter in policy.named_parameters():
        own = torch.zeros(parameter.shape, dtype=dtypes[name], device=policy.device)
        found = None
        if dist.get_rank() == 0:
            found = read(name, 0, parameter.shape[0] if parameter.dim() else 1)
        if found is not None:
            own.copy_(found)
        new = made[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
        if first is None:
            settings = _settings(given, dtypes[name])
            library.zero.Init(module=nn.ParameterList([new]), config_dict_or_path=settings)
            first = new
        else:
            first.convert_to_zero_parameters(param_list=[new])
    for module in policy.modules():
        for key, held in module._parameters.items():
            if held is not None:
                module._parameters[key] = made[id(held)]


def _partition(parameter: Any) -> tuple[int, int]:
    """Return the first number of this rank's part of a tensor in stage 3, and how many there are without
    padding."""
    size: int = parameter.ds_tensor.ds_numel
    first: int = size * dist.get_rank(parameter.ds_process_group)
    return min(first, parameter.ds_numel), max(0, min(size, parameter.ds_numel - first))
