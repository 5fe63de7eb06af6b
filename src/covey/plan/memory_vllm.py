"""The memory of vLLM beside the training: its weights, and the cache of the completions that it samples."""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.activations import Training, key_bytes
from covey.plan.facts import ModelSizes
from covey.plan.layout import Layout

MOST_SIDE_BY_SIDE = 256
"""Completions side by side where nobody types a number."""

# Tokens of a block of the cache at most, and what vLLM works with beside weights and cache (an estimate,
# until it is measured on a GPU).
_BLOCK, _WORKSPACE = 128, 3 << 29
# Tokens that the prompts of a publish's canary take with what is sampled of them.
_LEAST = 16


def side_by_side(config: Config, rows: int) -> int:
    """Return how many completions a vLLM samples side by side, of so many that it is asked for."""
    return config.vllm_max_num_seqs or min(rows, MOST_SIDE_BY_SIDE)


def held_tokens(config: Config, prompt: int, context: int | None) -> int:
    """Return the tokens of the longest prompt with its completion that vLLM holds: no more than the model's
    context (None: not known), where vLLM does not start."""
    held = max(_LEAST, config.vllm_max_model_len or prompt + config.most_tokens)
    return held if context is None else min(held, context)


def largest_adapter_rank(config: Config) -> int:
    """Return the highest rank of an adapter for which a vLLM of this run has memory; 0 where the
    adapter is added to the weights, or there is none."""
    if not config.vllm_enable_lora or config.tuner_type != "lora":
        return 0
    return config.vllm_max_lora_rank or config.lora_rank


def cache_bytes(
    config: Config, model: ModelSizes, element: int, tokens: int, rows: int, spans: int = 1
) -> int:
    """Return the bytes of a process in which every completion side by side has its place, however long it
    gets.

    One vLLM of `spans` processes samples the `rows` of each of them. Each process keeps its heads of keys, at
    least one.
    """
    each = completion_bytes(model, element, tokens) // min(spans, model.kv_heads)
    return side_by_side(config, rows * spans) * each


def completion_bytes(model: ModelSizes, element: int, tokens: int) -> int:
    """Return the bytes of the cache that one completion of so many tokens, with its prompt, takes at most."""
    return (tokens + _BLOCK) * key_bytes(model, element)


def weight_bytes(model: ModelSizes, how: Training, layout: Layout) -> int:
    """Return the bytes of vLLM's own copy; on a CPU a head that is the embedding too is there twice."""
    twice = model.vocabulary * model.hidden if model.tied and not how.cuda else 0
    return how.element * (model.parameters + twice) // max(1, layout.engine_parallel)


def wanted_bytes(
    config: Config, layout: Layout, how: Training, model: ModelSizes, tokens: int, rows: int
) -> int:
    """Return what vLLM takes where nothing is short: weights, a place for every completion, and what it works
    with."""
    cache = cache_bytes(config, model, how.element, tokens, rows, max(1, layout.engine_parallel))
    return weight_bytes(model, how, layout) + cache + (_WORKSPACE if how.cuda else 0)


def engine_bytes(
    config: Config, layout: Layout, how: Training, model: ModelSizes, tokens: int, rows: int
) -> int:
    """Return what vLLM holds of a device that trains too: its share of a GPU, on a CPU what it wants."""
    if layout.engine != "colocate" or layout.gpu_bytes:
        return layout.engine_bytes
    return wanted_bytes(config, layout, how, model, tokens, rows)
