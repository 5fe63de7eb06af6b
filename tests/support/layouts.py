"""A model of 32.8 B parameters, and layouts of it on eight GPUs of 96 GiB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.plan.deepspeed import states_of
from covey.plan.deepspeed_file import from_content
from covey.plan.facts import Facts, ModelSizes
from covey.plan.layout import Layout
from support.checks import changed, config, facts

GIB = 2**30
WORDS, HIDDEN = 152_064, 5120
MODEL = ModelSizes(
    family="qwen2",
    layers=64,
    hidden=HIDDEN,
    heads=40,
    kv_heads=8,
    head_width=128,
    intermediate=27_648,
    vocabulary=WORDS,
    tied=False,
    parameters=32_763_876_352,
    adapted=("q_proj", "v_proj"),
    adapted_parameters=10**9,
    adapter_parameters=10**8,
)
P = MODEL.parameters
EIGHT = Layout(num_gpus=8, gpu_bytes=96 * GIB)
SHORT = {"max_completion_length": 1024, "gradient_accumulation_steps": 1, "generation_batch_size": 64}
SHARDED = replace(EIGHT, zero_stage=3)
OFFLOADED = replace(EIGHT, zero_stage=3, offload="params")


def elsewhere(layout: Layout, **changes: Any) -> Facts:
    given = facts(
        model={"sizes": MODEL, "num_parameters": P},
        prompts={"longest": 512},
        output={"free_bytes": None},
        launch={"num_processes": 8},
        machine={"free_memory_bytes": layout.gpu_bytes, "cuda": True},
        layout=layout,
    )
    return changed(given, **changes)


FIELDS = {
    "vllm_gpu_memory_utilization": "engine_share",
    "vllm_tensor_parallel_size": "engine_parallel",
    "vllm_enable_sleep_mode": "engine_sleeps",
    "vllm_mode": "engine",
    "nproc_per_node": "num_gpus",
}
"""Words of a layout, each with what it sets."""

STATES = ("deepspeed", "fsdp", "fsdp_offload")


def typed_on(layout: Layout, edits: Mapping[str, Any]) -> Layout:
    """The layout that words typed behind it make."""
    changed = replace(layout, **{FIELDS[name]: edits[name] for name in edits if name in FIELDS})
    words = {name: edits[name] for name in edits if name in STATES}
    if not words:
        return changed
    fsdp = "hybrid_shard" if layout.shard_gpus else "full_shard"
    run = config(**({"fsdp": fsdp} if layout.fsdp else {}) | words)
    word = run.deepspeed or ""
    read = from_content(json.loads(word), "JSON") if word.startswith("{") else None
    states, problems = states_of(run, read, cuda=True)
    assert problems == ()
    shards = layout.shard_gpus if run.fsdp and "hybrid" in str(run.fsdp) else 0
    return replace(
        changed, zero_stage=states.stage, offload=states.offload, fsdp=states.fsdp, shard_gpus=shards
    )
