"""The share of a GPU that vLLM takes where nobody types it."""

from __future__ import annotations

import math
from dataclasses import replace

from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.memory import memory_plan, recompute_of, training_of
from covey.plan.memory_rollout import requests_of
from covey.plan.memory_vllm import held_tokens, wanted_bytes, weight_bytes

# Shares are tried in twentieths, since no forecast is finer than that.
_PARTS, _LEAST, _MOST = 20, 1, 18


def with_engine_share(facts: Facts, config: Config) -> Facts:
    """The facts with the largest share that vLLM has a use for and that fits beside the training.

    It has a use for its weights, a place for every completion side by side, and what it works with. Where no
    share fits, it is the least, and the memory's check says so.
    """
    layout, model, prompt = facts.layout, facts.model.sizes, facts.prompts.longest
    asked = requests_of(config, facts)
    is_open = layout.engine == "colocate" and config.vllm_gpu_memory_utilization is None
    if not is_open or not layout.gpu_bytes or model is None or prompt is None or not asked:
        return facts
    how = training_of(config, facts, recompute_of(config, facts))
    tokens = held_tokens(config, prompt, facts.model.context)
    wanted = wanted_bytes(config, layout, how, model, tokens, max(rows for rows, _ in asked))
    most = _parts(wanted, layout.gpu_bytes)
    least = min(most, _parts(weight_bytes(model, how, layout) + 1, layout.gpu_bytes))
    tried = [
        replace(facts, layout=replace(layout, engine_share=parts / _PARTS))
        for parts in range(most, least - 1, -1)
    ]
    return next((given for given in tried if memory_plan(config, given).fits), tried[-1])


def _parts(num_bytes: int, gpu_bytes: int) -> int:
    return min(_MOST, max(_LEAST, math.ceil(_PARTS * num_bytes / gpu_bytes)))
