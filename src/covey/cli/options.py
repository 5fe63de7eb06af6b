"""From the words of a command to a configuration, or to everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.cli.launch import OUTPUT_DIR
from covey.config import Resolved, Typed, parse, resolve

Base = Callable[[dict[str, Typed]], dict[str, Typed]]
"""What a verb puts under the options that were typed."""


def read(argv: Sequence[str], base: Base = dict) -> tuple[Resolved, int]:
    """Return the configuration of a command and the number of training processes over all machines."""
    parsed = parse(argv)
    typed = base(parsed.typed)
    num_processes = _num_processes(typed)
    resolved = resolve(typed, num_processes, parsed.problems)
    counted_up = os.environ.get(OUTPUT_DIR)
    if counted_up is not None and "output_dir" not in resolved.typed_names:
        config = resolved.config.model_copy(update={"output_dir": counted_up})
        resolved = replace(resolved, config=config)
    return resolved, num_processes


def under_torchrun() -> bool:
    """Return whether this process is one of several that a launcher started."""
    return "WORLD_SIZE" in os.environ


def _num_processes(typed: dict[str, Typed]) -> int:
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdigit() and int(world) >= 1:
        return int(world)
    return max(1, typed["nproc_per_node"].value) if "nproc_per_node" in typed else 1
