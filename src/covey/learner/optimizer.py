"""AdamW on float32 masters, with float32 gradient accumulation whatever the compute dtype.

Thirty-two bfloat16 accumulations into `.grad` add about 1 % of error, and at GRPO's learning rates a bfloat16
weight cannot hold its update at all. So a parameter in a lower dtype has a float32 master with a float32
gradient; a float32 parameter is its own master, an adapter's always. Frozen weights have neither.

Moments and masters beside the weights can wait in CPU memory. They come to the device for a step, some layers
at a time, and leave again: the arithmetic is the device's own, so every bit is that of a run without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from covey.errors import CheckpointError
from covey.learner.adam import Adam
from covey.learner.offload import Offloaded, layer_groups, own_memory
from covey.models.quantized import cast_unpacked
from covey.norms import total_norm
from covey.options.schema import LearnerOptions
from covey.texts import tr
from covey.types import StepStats

# Elements compared before and after a step, for update_ratio and frac_params_changed.
_WATCHED = 1 << 16
# Steps at whose gradient every tensor is looked at.
_INSPECTED = 8
# Elements of one tensor's gradient compared before and after a backward pass.
_SAMPLED = 1 << 12


class NonFiniteGradient(ArithmeticError):
    """The gradient holds NaN or infinity; nothing has been applied."""


class Reduction(Protocol):
    """Combines values of the ranks that take a step together."""

    def all(self, own: bool) -> bool:
        """Return whether `own` is true on every rank."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """Return the sums over the ranks that hold one model's shards; `values` where each rank holds all."""
        ...


class LocalReduction:
    """Combines the values of one process: they stay as they are."""

    def all(self, own: bool) -> bool:
        """Return `own`."""
        return own

    def sum(self, values: Tensor) -> Tensor:
        """Return `values`."""
        return values


class Steps(Protocol):
    """What steps masters: covey's AdamW, or another library."""

    def step(self, learning_rate: float) -> None:
        """Step the masters by their gradients."""
        ...

    def moments(self) -> list[Tensor]:
        """The moments of all masters."""
        ...

    def state(self, master: Tensor) -> Mapping[str, Tensor]:
        """Moments and the step count of a master; nothing before the first step."""
        ...

    def load(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave."""
        ...


class _Group:
    """Masters that are stepped together, by their places: all of them, or those of some layers."""

    def __init__(
        self,
        places: Sequence[int],
        masters: Sequence[nn.Parameter],
        low: Sequence[bool],
        options: LearnerOptions,
        steps: Steps | None,
        factors: Sequence[float],
    ) -> None:
        self.places = places
        adam: Steps = steps or Adam([masters[i] for i in places], options, [factors[i] for i in places])
        self.adam = adam
        own = [masters[i] for i in places if low[i]]
        self.offloaded = Offloaded(lambda: [*own, *adam.moments()])


class Masters:
    """Float32 masters of trainable parameters, and the optimizer that steps them.

    `params` compute; a master that is not its parameter is copied to it after each step. What is held may be
    the shards of tensors: `reduction` adds up what is asked of all of them. `steps` is what steps them where
    that is another library. Masters named in `low` are gathered in a lower dtype to compute: the model's
    files have them rounded, so they are part of the state. `factors` multiply the learning rate of the
    masters that they name.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        masters: Sequence[nn.Parameter],
        options: LearnerOptions,
        reduction: Reduction | None = None,
        steps: Steps | None = None,
        low: Collection[str] = (),
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.names, self.params, self.masters = list(names), list(params), list(masters)
        self._master_of = dict(zip(self.params, self.masters, strict=True))
        self._options, self._reduction = options, reduction or LocalReduction()
        self._low = [p is not m for p, m in zip(self.params, self.masters, strict=True)]
        self._saves_master = [is_low or n in low for n, is_low in zip(self.names, self._low, strict=True)]
        places = [list(range(len(self.masters)))]
        if options.offload_optimizer or options.offload_model:
            own_memory(m for m, low in zip(self.masters, self._low, strict=True) if low)
            places = layer_groups(self.names, options.move_model_batches)
        each = [(factors or {}).get(name, 1.0) for name in self.names]
        self._groups = [_Group(some, self.masters, self._low, options, steps, each) for some in places]
        if options.offload_optimizer:
            for group in self._groups:
                group.offloaded.to_cpu()
        vectors = [m for m in self.masters if m.dim() == 1]
        ups = [m for n, m in zip(self.names, self.masters, strict=True) if "lora_B" in n]
        self._sampled = [*self.masters, *vectors, *ups][-1]
        size = torch.tensor(sum(m.numel() for m in self.masters), dtype=torch.double)
        self._stride = max(1, math.ceil(float(self._reduction.sum(size)) / _WATCHED))
        self._inspections = _INSPECTED

    @classmethod
    def of(
        cls,
        module: nn.Module,
        options: LearnerOptions,
        compute_dtype: torch.dtype = torch.float32,
        float32: Collection[str] = (),
        reduction: Reduction | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> Masters:
        """Those of a whole module, which is cast to `compute_dtype`, but for packed weights and the
        parameters named in `float32`."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        cast_unpacked((p for p in module.parameters() if not p.requires_grad), compute_dtype)
        masters = [_master(p, torch.float32 if n in float32 else compute_dtype) for n, p in trained.items()]
        return cls(list(trained), list(trained.values()), masters, options, reduction, factors=factors)

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
        values = self._reduction.sum(torch.stack(largest)).tolist()
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
        norm = self._norm([m.grad for m in self.masters if m.grad is not None])
        grad_norm = float(norm)
        is_finite = math.isfinite(grad_norm)
        if not self._reduction.all(is_finite):
            whose = tr("another rank's gradient is not finite, this one's ") if is_finite else ""
            raise NonFiniteGradient(tr("{whose}gradient norm {grad_norm}", whose=whose, grad_norm=grad_norm))
        limit = self._options.max_grad_norm
        if limit > 0:
            nn.utils.clip_grads_with_norm_(self.masters, limit, norm.float())
        untouched = self._untouched()
        places = [i for group in self._groups for i in group.places]
        should_move = self._watched(places, gradient=True).abs() > self._options.adam_epsilon
        before, after = self._step_groups(learning_rate)
        change = after - before
        moved = change != 0
        counts = torch.stack([moved.sum(), (moved & should_move).sum(), should_move.sum()]).double()
        size = counts.new_tensor([moved.numel()])
        num_moved, num_due, due, num = self._reduction.sum(torch.cat([counts, size])).tolist()
        return StepStats(
            grad_norm=grad_norm,
            grad_norm_clipped=min(grad_norm, limit) if limit > 0 else grad_norm,
            learning_rate=learning_rate,
            update_ratio=float(self._norm([change]) / self._norm([before]).clamp_min(1e-30)),
            frac_params_changed=num_moved / max(1.0, num),
            frac_moved=num_due / due if due else None,
            untouched=untouched,
        )

    def _step_groups(self, learning_rate: float) -> tuple[Tensor, Tensor]:
        """Step the masters group by group, and give the parameters their values; returns the watched weights
        as they were and as they are."""
        before, after = [], []
        for group in self._groups:
            with group.offloaded.on_device():
                before.append(self._watched(group.places))
                group.adam.step(learning_rate)
                for i in group.places:
                    self.masters[i].grad = None
                after.append(self._watched(group.places))
                self._write_back(group.places)
        return torch.cat(before), torch.cat(after)

    def _norm(self, own: Sequence[Tensor]) -> Tensor:
        """The norm of all shards, in float64, from this rank's."""
        return self._reduction.sum(total_norm(own).double() ** 2).sqrt()

    def each_gradient(self) -> Iterator[tuple[str, Tensor]]:
        """The accumulated float32 gradients with the parameters' names, not copied; zeros where there is
        none."""
        return ((n, _gradient(m)) for n, m in zip(self.names, self.masters, strict=True))

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated float32 gradients by parameter name; zeros where there is none."""
        return {name: gradient.clone() for name, gradient in self.each_gradient()}

    def _watched(self, places: Sequence[int], *, gradient: bool = False) -> Tensor:
        """The watched weights of some masters, or their gradients."""
        found = (self.masters[i] for i in places)
        tensors = [_gradient(m) if gradient else m.detach() for m in found]
        return torch.cat([t.reshape(-1)[:: self._stride] for t in tensors])

    @torch.no_grad()
    def _write_back(self, places: Sequence[int] | None = None) -> None:
        for i in range(len(self.masters)) if places is None else places:
            if self._low[i]:
                self.params[i].copy_(self.masters[i])

    def each(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The masters with their names, each where it can be read until the next is asked for."""
        for group in self._groups:
            with group.offloaded.on_device(is_changed=False):
                yield from ((self.names[i], self.masters[i]) for i in group.places)

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Within it, where a rollout is to have their memory, masters beside the weights and the moments are
        in CPU memory."""
        with ExitStack() as stack:
            for group in self._groups if self._options.offload_model else ():
                stack.enter_context(group.offloaded.on_cpu())
            yield

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and, where the model's files have them in a lower dtype, masters."""
        out: dict[str, Tensor] = {}
        for group in self._groups:
            for i in group.places:
                name, master = self.names[i], self.masters[i]
                for key, value in group.adam.state(master).items():
                    out[f"{key}/{name}"] = group.offloaded.read(value)
                if self._saves_master[i]:
                    out[f"master/{name}"] = group.offloaded.read(master)
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
                raise CheckpointError(
                    tr("the checkpoint has {key}, but this run does not train {name}", key=key, name=name)
                )
            saved[name].append(kind)
        for group in self._groups:
            with group.offloaded.on_device():
                for i in group.places:
                    name = self.names[i]
                    self._load_one(i, group.adam, {kind: tensors[f"{kind}/{name}"] for kind in saved[name]})
                self._write_back(group.places)

    def _load_one(self, place: int, adam: Steps, found: Mapping[str, Tensor]) -> None:
        name, master = self.names[place], self.masters[place]
        for kind, tensor in found.items():
            # The scales of moments of 8 bits have a shape of their own.
            if tensor.dim() and tensor.shape != master.shape and not kind.startswith("absmax"):
                raise CheckpointError(
                    tr(
                        "{kind}/{name} has shape {shape} in the checkpoint, but {own} in this run",
                        kind=kind,
                        name=name,
                        shape=tuple(tensor.shape),
                        own=tuple(master.shape),
                    )
                )
        if self._saves_master[place]:
            if "master" not in found:
                words = tr("the checkpoint has no master/{name}, the float32 weights of {name}", name=name)
                raise CheckpointError(words)
            master.copy_(found["master"])
        moments = {k: t for k, t in found.items() if k != "master"}
        if moments:
            adam.load(master, moments)


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
