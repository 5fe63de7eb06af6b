"""The memory of the phase in which a run samples: the cache, and what sampling works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from covey.options.schema import Config
from covey.plan.activations import (
    CACHE_SHARE,
    FLAT_PROMPT,
    FLOAT,
    MAX_ROWS,
    PREFILL_TOKENS,
    PassSize,
    Training,
    key_bytes,
    weight_bytes,
    working_bytes,
)
from covey.plan.facts import Facts, ModelSizes
from covey.plan.layout import Layout
from covey.plan.memory_kept import filtering_bytes
from covey.plan.memory_vllm import engine_bytes, held_tokens
from covey.plan.memory_vllm import weight_bytes as copy_bytes

# Of a sampled row: logits, scaled logits and what their sum of exp takes.
_SAMPLING_BYTES = 3 * FLOAT


def planned_layout(facts: Facts) -> Layout:
    """Return the layout, on this machine with a device for each process."""
    layout = facts.layout
    return replace(layout, num_gpus=max(1, facts.launch.num_processes)) if layout.is_here else layout


def rollout_parts(
    config: Config, facts: Facts, how: Training, model: ModelSizes, prompt: int, held: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the cache, which the native engine keeps, and what sampling works with beside it; both empty
    where nothing is sampled."""
    asked, layout = requests_of(config, facts), planned_layout(facts)
    if not asked:
        return {}, {}
    if layout.engine != "own":
        tokens = held_tokens(config, prompt, facts.model.context)
        engine = {"engine": engine_bytes(config, layout, how, model, tokens, max(r for r, _ in asked))}
        return ({}, engine) if layout.engine_sleeps else (engine, engine)
    # The engine of the training process samples with the whole model, under FSDP a copy of it.
    whole = weight_bytes(model, how)
    missing = whole - (0 if layout.fsdp else layout.on_gpu(whole, "weights"))
    held += missing
    row = row_bytes(config, how, model, prompt)
    rows, slots = min(max(r for r, _ in asked), MAX_ROWS), max(s for _, s in asked)
    if facts.machine.free_memory_bytes is not None and config.engine == "native":
        # Moments are made by the first step, after the cache.
        rows = min(
            rows, max(1, int(CACHE_SHARE * max(0, facts.machine.free_memory_bytes - held)) // max(1, row))
        )
    slots = min(slots, rows) if config.engine == "native" else rows
    own = config.most_tokens + (prompt if prompt <= FLAT_PROMPT else 0)
    cache = {"KV cache": key_bytes(model, how.element) * (rows * own + slots * prompt)}
    prefill = min(slots * prompt, max(PREFILL_TOKENS, prompt))
    alone = PassSize(tokens=prefill, trained=0, cells=0, later=False)
    work = {"sampling": max(rows * model.vocabulary * _SAMPLING_BYTES, working_bytes(model, alone, how))}
    if filtering := filtering_bytes(config, model, cuda=how.cuda):
        work["filters of sampling"] = rows * filtering
    if not how.full and how.element == FLOAT and not how.packed_bits:
        work["merged weights"] = FLOAT * model.adapted_parameters
    if missing:
        work["gathered weights"] = missing
    return cache, work


def least_parts(
    config: Config,
    how: Training,
    model: ModelSizes,
    prompt: int,
    layout: Layout,
    parts: Mapping[str, int],
    *,
    samples: bool,
) -> dict[str, int]:
    """Return what an engine holds in a phase of these parts however few completions it samples: the cache of
    one where the native engine samples, vLLM's share of a GPU, and on a CPU vLLM's weights."""
    if layout.engine == "own" and samples:
        return {"KV cache of one row": row_bytes(config, how, model, prompt)}
    if layout.engine == "colocate" and "engine" in parts:
        return {"engine": layout.engine_bytes or copy_bytes(model, how, layout)}
    return {}


def row_bytes(config: Config, how: Training, model: ModelSizes, prompt: int) -> int:
    """Return the keys and values of the longest prompt with its completion."""
    return key_bytes(model, how.element) * (prompt + config.most_tokens)


def requests_of(config: Config, facts: Facts) -> list[tuple[int, int]]:
    """Return rows and prompts that a process samples side by side, in training and in each evaluation."""
    world = max(1, facts.launch.num_processes)
    asked = []
    if config.replay_rollouts is None:
        rows = config.per_device_train_batch_size * config.steps_per_generation
        asked.append((rows, -(-rows // max(1, config.num_generations))))
    if config.eval_strategy != "no":
        each = config.num_generations_eval
        asked += [
            (-(-s.num_prompts * each // world), -(-s.num_prompts // world)) for s in facts.data.eval_sets
        ]
    return asked
