"""How covey's time and memory grow: with real tokens, accumulation, vocabulary and length."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cases import Case
from models import VOCABULARIES
from runs import run_side

_BASE = Case(
    name="scaling",
    says="",
    reward="length",
    per_device_train_batch_size=32,
    forced=True,
    learning_rate=1e-6,
    steps=5,
    warmup=1,
)
_LENGTHS = (64, 128, 256, 512)
# The longest of 32 exponential lengths is about four times their mean.
_LONGEST = 4
_MAX_LENGTH = 1900
_SPLITS = ((64, 1), (16, 4), (2, 32), (1, 64))
_LARGER_PASS = 1024
_MEMORY = replace(_BASE, per_device_train_batch_size=16, max_completion_length=64, steps=1)


def length_table(work: Path) -> list[str]:
    """Seconds per real token at several lengths, all equal and each drawn by itself.

    The weights are random, so that siblings part at once and each token is computed.
    """
    lines = [
        "| mean length | lengths | real tokens | if padded | s/step | rollout µs/token | update µs/token |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in _LENGTHS:
        case = replace(_BASE, model="ragged", max_completion_length=length)
        lines.append(_length_row(case, f"{length}", "equal", work))
    for length in _LENGTHS:
        limit = min(_MAX_LENGTH, _LONGEST * length)
        case = replace(_BASE, model="ragged", max_completion_length=limit, mean_length=length)
        lines.append(_length_row(case, "", "ragged", work))
    return lines


def _length_row(case: Case, shown: str, kind: str, work: Path) -> str:
    result = _run(case, work)
    step_s, rollout_s, update_s = _medians(case, result)
    steps = [[c for group in groups for c in group["completions"]] for groups in result["lengths"]]
    real = statistics.mean(sum(step) for step in steps[-case.steps :])
    padded = statistics.mean(len(step) * max(step) for step in steps[-case.steps :])
    mean = shown or f"{real / case.per_device_train_batch_size:.0f}"
    times = [f"{step_s:.3f}", f"{rollout_s / real * 1e6:.1f}", f"{update_s / real * 1e6:.1f}"]
    return f"| {' | '.join([mean, kind, f'{real:,.0f}', f'{padded:,.0f}', *times])} |"


def accumulation_table(work: Path) -> list[str]:
    """Seconds of a step of 64 completions in 1, 4, 32 and 64 micro-batches: of lengths of their own, behind
    long prompts, and all of one length; and in 32 whose passes may be larger."""
    kinds = ("ragged", "1,000-token prompts", "all 256 tokens", "all 32 tokens")
    columns = [column for kind in kinds for column in (f"{kind} s/step", "of it update")]
    lines = [
        f"| {' | '.join(['batch × accumulation', *columns])} |",
        f"|{'---|' * (1 + len(columns))}",
    ]
    splits = [(batch, accumulation, None) for batch, accumulation in _SPLITS]
    splits.append((2, 32, _LARGER_PASS))
    found: dict[tuple[int, int, int | None], list[tuple[float, ...]]] = {split: [] for split in splits}
    for split in splits * 3:
        medians = [_medians(case, _run(case, work)) for case in _accumulating(*split)]
        found[split].append(tuple(seconds for step, _, update in medians for seconds in (step, update)))
    for (batch, accumulation, larger), seconds in found.items():
        option = f", `--max_tokens_per_micro_batch {larger}`" if larger else ""
        shown = (f"{statistics.median(column):.3f}" for column in zip(*seconds, strict=True))
        lines.append(f"| {' | '.join([f'{batch} × {accumulation}{option}', *shown])} |")
    return lines


def _accumulating(batch: int, accumulation: int, larger: int | None) -> tuple[Case, ...]:
    """Completions that have little in common, each with a length of its own; short ones behind long prompts;
    such that have little in common and all run to their limit; and short ones that do."""
    options = {} if larger is None else {"max_tokens_per_micro_batch": larger}
    split = replace(
        _BASE,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps=12,
        warmup=2,
        options=options,
    )
    ragged = replace(
        split, model="ragged", max_completion_length=_LONGEST * _LENGTHS[0], mean_length=_LENGTHS[0]
    )
    behind_long = replace(split, data="long", max_completion_length=14, steps=4, warmup=1)
    at_limit = replace(split, model="ragged", max_completion_length=256, steps=4, warmup=1)
    return ragged, behind_long, at_limit, replace(split, max_completion_length=32)


def memory_table(work: Path) -> list[str]:
    """Peak memory over vocabulary at one length, and over length at the smallest vocabulary."""
    lines = [
        "| vocabulary | tokens a step | logits would be, MB | peak MB | before training "
        "| gradient and moments | rest |",
        "|---|---|---|---|---|---|---|",
    ]
    for vocabulary in VOCABULARIES:
        lines.append(_memory_row(replace(_MEMORY, model=f"vocabulary-{vocabulary}"), vocabulary, work))
    for length in (128, 256):
        case = replace(_MEMORY, model=f"vocabulary-{VOCABULARIES[0]}", max_completion_length=length)
        lines.append(_memory_row(case, VOCABULARIES[0], work))
    return lines


def _memory_row(case: Case, vocabulary: int, work: Path) -> str:
    result = _run(case, work)
    before, peak = result["resident_bytes"][0], result["own_peak_bytes"]
    tokens = case.per_device_train_batch_size * case.max_completion_length
    # Gradient and both moments, in float32, come with the first step.
    state = 3 * 4 * _parameters(work / "models" / case.model)
    logits = 4 * tokens * vocabulary
    shown = [f"{value / 1e6:,.0f}" for value in (logits, peak, before, state, peak - before - state)]
    return f"| {' | '.join([f'{vocabulary:,}', f'{tokens:,}', *shown])} |"


def _parameters(model: Path) -> int:
    """Parameters by the header of a safetensors file of float32 weights."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(max(ends)) // 4


def _medians(case: Case, result: Mapping[str, Any]) -> tuple[float, float, float]:
    """Seconds of a step, of its rollout and of its update: medians over the steps behind the warm-up."""
    ends, first = result["ends"], case.warmup
    steps = [b - a for a, b in pairwise(ends[first - 1 :])]
    rollouts, rewards = result["rollout_s"][first:], result["reward_s"][first:]
    updates = [s - r - w for s, r, w in zip(steps, rollouts, rewards, strict=True)]
    return statistics.median(steps), statistics.median(rollouts), statistics.median(updates)


def _run(case: Case, work: Path) -> Mapping[str, Any]:
    return run_side(case, "covey", sys.executable, work)
