"""AdamW, with moments of 32 bits or of 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covey.errors import CheckpointError
from covey.options.training import OptimizerOptions
from covey.texts import tr

# What an optimizer keeps of a tensor that is of the tensor's size, or grows with it.
_LARGE = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
# Tables of bitsandbytes: what each of the 256 values of a moment stands for, the same in every run.
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}


class Adam:
    """AdamW over some masters; a matrix is decayed, a vector is not.

    `adamw_8bit` is bitsandbytes' AdamW (arXiv:2110.02861): moments in 8 bits, each block of 256 with a scale
    of its own; tensors of fewer than 4,096 numbers have moments of 32 bits.
    """

    def __init__(
        self, masters: Sequence[nn.Parameter], options: OptimizerOptions, factors: Sequence[float] = ()
    ) -> None:
        """Make the optimizer; the learning rate of each master is multiplied by its factor, where there are
        `factors`."""
        factor_of = dict(zip(masters, factors or [1.0] * len(masters), strict=True))
        groups = [
            {"params": params, "weight_decay": decay, "factor": factor}
            for factor in dict.fromkeys(factor_of.values())
            for params, decay in (
                ([m for m in masters if m.dim() > 1 and factor_of[m] == factor], options.weight_decay),
                ([m for m in masters if m.dim() <= 1 and factor_of[m] == factor], 0.0),
            )
        ]
        how: dict[str, Any] = {"lr": 0.0, "betas": options.betas, "eps": options.adam_epsilon}
        self._optimizer: torch.optim.Optimizer
        if options.optim == "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit

            self._optimizer = AdamW8bit(groups, **how)
        else:
            self._optimizer = torch.optim.AdamW(groups, **how, fused=True)

    def step(self, learning_rate: float) -> None:
        """Step every master that has a gradient, and clear the gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def moments(self) -> list[Tensor]:
        """What is kept of all masters that grows with them."""
        states = self._optimizer.state.values()
        return [state[key] for state in states for key in _LARGE if key in state]

    def state(self, master: Tensor) -> dict[str, Tensor]:
        """What is kept of a master, by name; nothing before its first step."""
        found: Mapping[str, Any] = self._optimizer.state.get(master, {})
        return {key: torch.as_tensor(value) for key, value in found.items() if key not in _TABLES}

    def load(self, master: Tensor, moments: Mapping[str, Tensor]) -> None:
        """Go on with what `state` gave; CheckpointError where that was of the other kind."""
        is_torch = isinstance(self._optimizer, torch.optim.AdamW)
        if is_torch == ("state1" in moments):
            words = (tr("adamw_torch, of 32 bits"), tr("adamw_8bit, of 8 bits"))
            ours, theirs = words if is_torch else words[::-1]
            raise CheckpointError(
                tr(
                    "the checkpoint has the moments of optim {theirs}, but this run uses {ours}",
                    theirs=theirs,
                    ours=ours,
                )
            )
        held: dict[str, Any] = {key: value.to(master.device, copy=True) for key, value in moments.items()}
        if "state1" in held:
            held["step"] = int(held["step"])
        if "absmax1" in held:
            tables = self._optimizer.name2qmap  # type: ignore[attr-defined]
            for key, name in _TABLES.items():
                tables[name] = held[key] = tables[name].to(master.device)
        self._optimizer.state[master] = held
