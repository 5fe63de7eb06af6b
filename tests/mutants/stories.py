"""Five runs that failed in public, each without a word of why: what names each of their causes here."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from covey.learner import update
from covey.types import Batch, MicroBatch, TokenStats
from mutants import faults, faults_ranks
from mutants.faults import Patch, changed
from mutants.harness import START, Mutant, nothing

# 000: ms-swift 4348. One completion a forward pass, 32 of them a step, no KL: loss 0 and KL 0 for ever.
SINGLE = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 32,
    "max_tokens_per_micro_batch": 1,
    "beta": 0.0,
}

# 002: ms-swift 3114. A configuration with three reasons to learn nothing, and checkpoints of thrice the size.
ALONE = {"num_generations": 1}
GREEDY = {"temperature": 0.0}
BFLOAT16 = {"torch_dtype": "bfloat16", "learning_rate": 1e-6}

# 004: trl 3419. Four completions at once, or two and two.
SPLIT = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,
    "max_tokens_per_micro_batch": 60,
}


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _full_disk(patch: Patch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: _Usage(10**9, 10**9 - 10**6, 10**6))


def _by_micro_batch(inputs: Any, stats: TokenStats, micro: MicroBatch, batch: Batch, *_: Any) -> Any:
    """The mean of the forward passes' means."""
    tokens = max(1, int(micro.target_N.shape[0])) * len(batch.micro_batches)
    return replace(inputs, denominators=replace(batch.denominators, num_tokens=tokens))


def _story(number: str, mutants: Sequence[Mutant]) -> tuple[Mutant, ...]:
    return tuple(replace(m, name=f"{number}: {m.name}") for m in mutants)


def _planted(name: str, options: dict[str, Any]) -> Mutant:
    (found,) = [m for m in faults.MUTANTS if m.name == name]
    return replace(found, options={**found.options, **options})


MUTANTS = (
    *_story(
        "000",
        [
            _planted("clears every gradient before the step", SINGLE),
            _planted("clears the gradient at each backward", SINGLE),
            _planted("steps other tensors than the model's", SINGLE),
        ],
    ),
    *_story(
        "002",
        [
            Mutant("one completion a prompt", "E201", START, nothing, ALONE),
            Mutant("temperature 0", "E110", START, nothing, GREEDY),
            Mutant("both, as it was typed", "E201 E110", START, nothing, {**ALONE, **GREEDY, **BFLOAT16}),
            Mutant("pure bf16 at lr 1e-6", "F103", 1, faults.bf16_masters, BFLOAT16),
            Mutant("checkpoints beyond the disk", "E407", START, _full_disk, is_read=True),
        ],
    ),
    *_story(
        "003",
        [
            Mutant(
                "one completion a prompt, batch of 1",
                "E201",
                START,
                nothing,
                {**ALONE, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
                says="num_generations is 1",
            )
        ],
    ),
    *_story(
        "004",
        [
            Mutant(
                "mean of forward passes",
                "F111",
                1,
                changed(update, "micro_inputs", _by_micro_batch),
                SPLIT,
            ),
        ],
    ),
)

# 001: ms-swift 3887. Two processes, one of which never came back.
RANKS = _story("001", faults_ranks.HANGS)
