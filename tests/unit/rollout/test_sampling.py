"""How completions are drawn, from the options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from covey.data.text import TextCodec, load_codec
from covey.options.schema import Config
from covey.quickstart.task import MODEL_DIR
from covey.rollout.sampling import eval_sampling, sampling
from support.checks import config

VAL = {"val_dataset": ["v.jsonl"]}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR)


def filters(params: Any) -> tuple[float, int, float]:
    return params.top_p, params.top_k, params.min_p


def test_filters_reach_the_engine(codec: TextCodec) -> None:
    given = config(top_p=0.9, top_k=50, min_p=0.05, temperature=0.8)
    params = sampling(given, codec)
    assert filters(params) == (0.9, 50, 0.05) and params.has_filters
    assert params.temperature == 0.8 and params.max_new_tokens == given.max_completion_length
    assert params.stop_token_ids == codec.stop_token_ids
    assert not sampling(config(top_k=-1), codec).has_filters


def test_evaluations_are_drawn_as_training_or_by_filters_of_their_own(codec: TextCodec) -> None:
    given: Config = config(**VAL, top_p=0.9, eval_top_k=5, eval_temperature=0.5)
    assert filters(eval_sampling(given, codec)) == (0.9, 5, 0.0)
    assert eval_sampling(config(**VAL, top_p=0.9), codec) == sampling(config(top_p=0.9), codec)
    greedy = eval_sampling(config(**VAL, top_p=0.9, eval_top_k=5, eval_temperature=0.0), codec)
    assert not greedy.has_filters and 0 < greedy.temperature < 1e-5
    whole = sampling(config(), codec)
    assert greedy == replace(whole, temperature=greedy.temperature)
