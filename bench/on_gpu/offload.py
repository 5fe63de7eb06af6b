"""Part 5, its last lines: what offload_optimizer leaves on the device, what it costs, and its bits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from covey.checksums import checksum
from covey.learner.backends.single import SingleBackend
from covey.models.policy import Policy
from covey.options.schema import LearnerOptions
from on_gpu.lines import Found, Lines
from on_gpu.machine import Shape, device, forget_peak, peak_bytes, random_model, wait

_STEPS = 3


def offload_lines(lines: Lines, shape: Shape, options: LearnerOptions) -> None:
    """Write a line for steps with all state on the device, and one for state in CPU memory."""
    sums: dict[str, list[int]] = {}
    for name, away in (("state on the device", False), ("state in CPU memory", True)):
        own = options.model_copy(update={"offload_optimizer": away})
        lines.case(
            f"{shape.name} {name}",
            lambda: _steps(shape, own, lambda s: sums.update({name: s})),  # noqa: B023
            needs_s=8,
        )
        gc.collect()
    if len(sums) == 2:
        is_same = len(set(map(tuple, sums.values()))) == 1
        why = "" if is_same else "the weights differ"
        lines.case(f"{shape.name} bits", lambda: Found(figures={"same": is_same}, passed=is_same, why=why))


def _steps(shape: Shape, options: LearnerOptions, tell: Callable[[list[int]], None]) -> Found:
    """Optimizer steps on drawn gradients, the bytes that are held between them, and their seconds."""
    forget_peak()
    policy = Policy(random_model(shape, torch.float32)).train()
    backend = SingleBackend(policy, options, compute_dtype=torch.bfloat16)
    masters, seconds = backend.masters, []
    for seed in range(_STEPS):
        torch.manual_seed(seed)
        for parameter in masters.params:
            parameter.grad = torch.randn_like(parameter)
        masters.absorb()
        forget_peak()
        wait()
        began = time.perf_counter()
        backend.step(1e-6)
        wait()
        seconds.append(time.perf_counter() - began)
    peak = peak_bytes()
    held = torch.cuda.memory_allocated() if device().type == "cuda" else 0
    tell([checksum(p) for p in policy.parameters()])
    return Found(figures={"step_s": min(seconds), "held_gb": held / 1e9, "peak_gb": peak / 1e9})
