"""Faults planted in passes that are taken at once, as those of a compiled model are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.learner import at_once
from covey.models.passes_native import Passes
from covey.types import MicroBatch
from mutants.faults import IN_PASSES, TWICE, Plant, before, changed, nan_loss
from mutants.harness import Mutant


def _weighs(weight: Callable[[int, int], float]) -> Plant:
    """What each pass is told of the loss, by its number and how many they are."""

    def of_pass(self: Passes) -> list[Tensor]:
        many = len(self.micros)
        return [torch.full_like(m.advantage_N, weight(n, many)) for n, m in enumerate(self.micros)]

    return _weighs_slopes(of_pass)


def _weighs_slopes(weights: Callable[[Passes], list[Tensor]]) -> Plant:
    def weighed(self: Passes, slopes: Any, advance: Any) -> tuple[Any, ...]:
        weight_N = torch.cat(weights(self))
        return self, tuple(None if slope_N is None else slope_N * weight_N for slope_N in slopes), advance

    return before(Passes, "go", weighed)


def _without_followed(self: Passes) -> list[Tensor]:
    """Nothing for what a prompt predicts in any pass but the last that has it in common."""
    weights = [torch.ones_like(micro.advantage_N) for micro in self.micros]
    for micro, weight_N in zip(self.micros, weights, strict=True):
        if micro.shared is not None and micro.shared.is_followed:
            own_N = weight_N[micro.shared.own_X]
            weight_N.zero_()[micro.shared.own_X] = own_N
    return weights


def _of_micros(change: Callable[[MicroBatch], MicroBatch]) -> Plant:
    return before(Passes, "go", lambda self, *s: (replace(self, micros=[change(m) for m in self.micros]), *s))


def _mixed(micro: MicroBatch) -> MicroBatch:
    whole = replace(micro.segments[0], length=int(micro.tokens_T.shape[0]))
    return replace(micro, segments=(whole,), shared=None)


def _of_another_prompt(micro: MicroBatch) -> MicroBatch:
    """The prompt that passes have in common is another one."""
    end = micro.segments[0].length if micro.shared is not None else 0
    return replace(micro, tokens_T=torch.cat([micro.tokens_T[:end].flip(0), micro.tokens_T[end:]]))


def _weighs_a_tensor(out: Any, self: Passes, *args: Any) -> Any:
    self.layers.known.layers[1].gated[1].weight.grad.mul_(1.5)
    return out


def _moved(inputs: Any, *args: Any) -> Any:
    return replace(inputs, logprob_N=inputs.logprob_N - 0.05)


MUTANTS = (
    Mutant("at once: drops the second pass", "F123", 1, _weighs(lambda n, many: float(n != 1))),
    Mutant("at once: keeps the last pass alone", "F123", 1, _weighs(lambda n, many: float(n == many - 1))),
    Mutant("at once: counts the first pass twice", "F127", 1, _weighs(lambda n, many: 1.0 + (n == 0))),
    Mutant("at once: counts the last pass twice", "F127", 1, _weighs(lambda n, many: 1.0 + (n == many - 1))),
    Mutant("at once: averages over passes", "F127", 1, _weighs(lambda n, many: 1.0 / many)),
    Mutant("at once: turns the gradient around", "F127", 1, _weighs(lambda n, many: -1.0)),
    Mutant("at once: no gradient", "F102", 1, _weighs(lambda n, many: 0.0)),
    Mutant(
        "at once: forgets a prompt's earlier passes", "F127", 1, _weighs_slopes(_without_followed), IN_PASSES
    ),
    Mutant("at once: goes on from another prompt", "F115", 1, _of_micros(_of_another_prompt), IN_PASSES),
    Mutant("at once: mixes packed rows", "F115", 1, _of_micros(_mixed)),
    Mutant("at once: weighs one tensor's gradient", "F127", 1, changed(Passes, "go", _weighs_a_tensor)),
    Mutant(
        "at once: divides the loss by the micro-batches",
        "F111",
        1,
        changed(at_once, "policy_loss", lambda out, *a: replace(out, loss=out.loss / 2)),
    ),
    Mutant("at once: NaN in the loss", "F101", 1, changed(at_once, "policy_loss", nan_loss)),
    Mutant(
        "at once: NaN in a temperature",
        "F101",
        1,
        _of_micros(lambda m: replace(m, temperature_N=m.temperature_N * math.nan)),
    ),
    Mutant("at once: measures at other weights", "F116", 1, changed(at_once, "micro_inputs", _moved), TWICE),
)
