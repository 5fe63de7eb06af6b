"""AdamW on float32 masters, with float32 gradient accumulation whatever the compute dtype.

Thirty-two bfloat16 accumulations into `.grad` add about 1 % of error, and at GRPO's learning rates a bfloat16
weight cannot hold its update at all. So a parameter in a lower dtype has a float32 master with a float32
gradient; a float32 parameter is its own master, an adapter's always. Frozen weights have neither.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from covey.errors import CheckpointError
from covey.models.quantized import cast_unpacked
from covey.types import StepStats

# Elements compared before and after a step, for update_ratio and frac_params_changed.
_WATCHED = 1 << 16
# Steps at whose gradient every tensor is looked at.
_INSPECTED = 8
# Elements of one tensor's gradient compared before and after a backward pass.
_SAMPLED = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW's settings; weight decay spares biases and norms."""

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    max_grad_norm: float


class NonFiniteGradient(ArithmeticError):
    """The gradient holds NaN or infinity; nothing has been applied."""


class Across(Protocol):
    """What several ranks make of a step together."""

    def all(self, own: bool) -> bool:
        """Whether it holds on every rank."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sums over the ranks that hold the shards of one model; the values where each holds all."""
        ...


class Alone:
    """Across one process."""

    def all(self, own: bool) -> bool:
        """Its own answer."""
        return own

    def sum(self, values: Tensor) -> Tensor:
        """Its own values."""
        return values


class Steps(Protocol):
    """What steps masters in the place of an AdamW of their own."""

    def step(self, learning_rate: float) -> None:
        """Step the masters by their gradients."""
        ...

    def state(self, master: Tensor) -> Mapping[str, Tensor]:
        """Moments and the step count of a master; nothing before the first step."""
        ...

    def load(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave."""
        ...


class Masters:
    """Float32 masters of trainable parameters, and the optimizer that steps them.

    `params` compute; a master that is not its parameter is copied to it after each step. What is held may be
    the shards of tensors: `across` adds up what is asked of all of them. `steps` is what steps them where
    that is another library.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        masters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        across: Across | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._steps = steps
        self.names, self.params, self.masters = list(names), list(params), list(masters)
        self._master_of = dict(zip(self.params, self.masters, strict=True))
        self._config, self._across = config, across or Alone()
        self._low = [p is not m for p, m in zip(self.params, self.masters, strict=True)]
        decayed = [m for m in self.masters if m.dim() > 1]
        plain = [m for m in self.masters if m.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )
        vectors = [m for m in self.masters if m.dim() == 1]
        ups = [m for n, m in zip(self.names, self.masters, strict=True) if "lora_B" in n]
        self._sampled = [*self.masters, *vectors, *ups][-1]
        total = self._across.sum(
            torch.tensor(float(sum(p.numel() for p in self.masters)), dtype=torch.double)
        )
        self._stride = max(1, math.ceil(float(total) / _WATCHED))
        self._inspections = _INSPECTED

    @classmethod
    def of(
        cls,
        module: nn.Module,
        config: OptimizerConfig,
        compute_dtype: torch.dtype = torch.float32,
        float32: Collection[str] = (),
        across: Across | None = None,
    ) -> Masters:
        """Those of a whole module, which is cast to `compute_dtype`, but for packed weights and the
        parameters named in `float32`."""
        trained: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                trained[name] = parameter
        cast_unpacked((p for p in module.parameters() if not p.requires_grad), compute_dtype)
        masters = [_master(p, torch.float32 if n in float32 else compute_dtype) for n, p in trained.items()]
        return cls(list(trained), list(trained.values()), masters, config, across)

    def absorb(self) -> None:
        """Add low-precision gradients to the masters' float32 ones and clear them; call after every
        backward."""
        for parameter, low in zip(self.params, self._low, strict=True):
            if low:
                self._absorb_one(parameter)

    @contextmanager
    def absorbing(self) -> Iterator[None]:
        """Backward passes within it have each low-precision gradient absorbed as soon as it is there, so that
        they are never all held."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._absorb_one)
            for parameter, low in zip(self.params, self._low, strict=True)
            if low
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _absorb_one(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.add(self.master_of(parameter), parameter.grad)
            parameter.grad = None

    def drop_low_gradients(self) -> None:
        """Clear the gradients of the parameters that have masters beside them."""
        for parameter, low in zip(self.params, self._low, strict=True):
            if low:
                parameter.grad = None

    @staticmethod
    def add(master: nn.Parameter, gradient: Tensor) -> Tensor:
        """Add a gradient of any dtype to a master's; returns the master's."""
        if master.grad is None:
            master.grad = gradient.to(torch.float32, copy=True)
        else:
            master.grad += gradient
        return master.grad

    def gradient_sample(self) -> Tensor:
        """A small part of this rank's accumulated gradient, zeros where there is none yet.

        It is that of the last norm or bias, or of the last matrix of an adapter that starts at zero: these
        have a gradient whenever the logits have one.
        """
        return _gradient(self._sampled).reshape(-1)[:_SAMPLED].clone()

    def _untouched(self) -> tuple[str, ...]:
        """Names of the trainable tensors whose gradient is absent or 0 throughout, on the first steps."""
        if not self._inspections:
            return ()
        self._inspections -= 1
        largest = [
            m.new_zeros(()) if m.grad is None or not m.numel() else torch.linalg.vector_norm(m.grad, math.inf)
            for m in self.masters
        ]
        values = self._across.sum(torch.stack(largest)).tolist()
        untouched = tuple(n for n, value in zip(self.names, values, strict=True) if value == 0.0)
        # Once every tensor has had a gradient there is nothing left to see, and a look reads all of them.
        if not untouched:
            self._inspections = 0
        return untouched

    def master_of(self, parameter: Tensor) -> nn.Parameter:
        """The master of a trainable parameter."""
        return self._master_of[parameter]  # type: ignore[index]

    def step(self, learning_rate: float) -> StepStats:
        """Clip, step and clear the gradient. Raises NonFiniteGradient before anything changes on any rank."""
        gradients = [m.grad for m in self.masters if m.grad is not None]
        norm = self._norm(nn.utils.get_total_norm(gradients, error_if_nonfinite=False))
        grad_norm = float(norm)
        is_finite = math.isfinite(grad_norm)
        if not self._across.all(is_finite):
            whose = "another rank's gradient is not finite, this one's " if is_finite else ""
            raise NonFiniteGradient(f"{whose}gradient norm {grad_norm}")
        limit = self._config.max_grad_norm
        if limit > 0:
            nn.utils.clip_grads_with_norm_(self.masters, limit, norm)
        untouched = self._untouched()
        should_move = self._watched(gradient=True).abs() > self._config.epsilon
        before = self._watched()
        self._take_step(learning_rate)
        change = self._watched() - before
        moved = change != 0
        self._optimizer.zero_grad(set_to_none=True)
        self._write_back()
        counts = torch.stack([moved.sum(), (moved & should_move).sum(), should_move.sum()]).double()
        size = counts.new_tensor([moved.numel()])
        num_moved, num_due, due, num = self._across.sum(torch.cat([counts, size])).tolist()
        return StepStats(
            grad_norm=grad_norm,
            grad_norm_clipped=min(grad_norm, limit) if limit > 0 else grad_norm,
            learning_rate=learning_rate,
            update_ratio=float(self._norm(change.norm()) / self._norm(before.norm()).clamp_min(1e-30)),
            frac_params_changed=num_moved / max(1.0, num),
            frac_moved=num_due / due if due else None,
            untouched=untouched,
        )

    def _take_step(self, learning_rate: float) -> None:
        if self._steps is not None:
            self._steps.step(learning_rate)
            return
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _norm(self, own: Tensor) -> Tensor:
        """The norm of all shards from that of this rank's."""
        return self._across.sum(own.double() ** 2).sqrt().to(own.dtype)

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """The accumulated float32 gradients with the parameters' names, not copied; zeros where there is
        none."""
        return ((n, _gradient(m)) for n, m in zip(self.names, self.masters, strict=True))

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated float32 gradients by parameter name; zeros where there is none."""
        return {
            name: torch.zeros_like(m) if m.grad is None else m.grad.detach().clone()
            for name, m in zip(self.names, self.masters, strict=True)
        }

    def _watched(self, *, gradient: bool = False) -> Tensor:
        """The watched weights, or their gradients."""
        tensors = [_gradient(m) if gradient else m.detach() for m in self.masters]
        return torch.cat([t.reshape(-1)[:: self._stride] for t in tensors])

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master, low in zip(self.params, self.masters, self._low, strict=True):
            if low:
                parameter.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and, where they are not the parameters themselves, masters."""
        out: dict[str, Tensor] = {}
        for name, master, low in zip(self.names, self.masters, self._low, strict=True):
            held = self._steps.state(master) if self._steps else self._optimizer.state.get(master, {})
            for key, value in held.items():
                out[f"{key}/{name}"] = value
            if low:
                out[f"master/{name}"] = master.detach()
        return out

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` gave; an unstepped optimizer has no moments to restore.

        CheckpointError where a tensor is of another parameter, of another shape, or not there.
        """
        saved: dict[str, list[str]] = {name: [] for name in self.names}
        for key in tensors:
            kind, _, name = key.partition("/")
            if name not in saved:
                raise CheckpointError(f"the checkpoint has {key}, and this run trains no {name}")
            saved[name].append(kind)
        for name, master, low in zip(self.names, self.masters, self._low, strict=True):
            found = {kind: _of_shape(tensors, f"{kind}/{name}", master) for kind in saved[name]}
            if low:
                if "master" not in found:
                    raise CheckpointError(
                        f"the checkpoint has no master/{name}, the float32 weights of {name}"
                    )
                master.copy_(found["master"])
            moments = {k: t.to(master.device, copy=True) for k, t in found.items() if k != "master"}
            if moments and self._steps is not None:
                self._steps.load(master, moments)
            elif moments:
                self._optimizer.state[master] = moments
        self._write_back()


def _of_shape(tensors: Mapping[str, Tensor], key: str, master: Tensor) -> Tensor:
    """A saved tensor, which is of its master's shape or one number."""
    tensor = tensors[key]
    if tensor.dim() and tensor.shape != master.shape:
        words = f"{key} of the checkpoint is {tuple(tensor.shape)}, and in this run {tuple(master.shape)}"
        raise CheckpointError(words)
    return tensor


def _gradient(master: nn.Parameter) -> Tensor:
    return torch.zeros_like(master) if master.grad is None else master.grad.detach()


def _master(parameter: nn.Parameter, compute_dtype: torch.dtype) -> nn.Parameter:
    """A parameter's float32 master; the parameter itself is cast to the compute dtype."""
    assert parameter.dtype == torch.float32, "weights come in float32, so that masters lose nothing"
    if compute_dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.data)
    parameter.data = parameter.data.to(compute_dtype)
    return master
