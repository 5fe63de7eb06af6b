"""How completions are drawn, in training and in evaluations."""

from __future__ import annotations

from dataclasses import replace

from covey.data.stop_words import stop_words
from covey.data.text import TextCodec
from covey.options.schema import Config
from covey.types import SamplingParams

# What temperature 0 means to an engine that draws: far below any difference of logits.
_GREEDY = 1e-6


def sampling(config: Config, codec: TextCodec) -> SamplingParams:
    """Return how the completions of training are drawn."""
    words = stop_words(codec, config.stop_words)
    return SamplingParams(
        temperature=max(config.temperature, _GREEDY),
        max_new_tokens=config.max_completion_length,
        stop_token_ids=tuple(dict.fromkeys([*codec.stop_token_ids, *words.token_ids])),
        stop_strings=words.strings,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        banned_token_ids=codec.banned_token_ids,
    )


def eval_sampling(config: Config, codec: TextCodec) -> SamplingParams:
    """Return how those of evaluations are drawn. At temperature 0 the most probable token is taken, so there
    is nothing to filter."""
    own = replace(sampling(config, codec), temperature=max(config.eval_temperature, _GREEDY))
    if config.eval_temperature <= 0:
        return replace(own, top_p=1.0, top_k=0, min_p=0.0)
    return replace(own, top_p=config.eval_top_p, top_k=config.eval_top_k, min_p=config.eval_min_p)
