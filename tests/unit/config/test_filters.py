"""top_p, top_k and min_p as they are typed, what switches them off, and those of evaluations."""

from __future__ import annotations

from typing import Any

import pytest

from covey.config import from_dict, parse
from covey.config.filters import eval_filters_of, evaluated_alone, filters_of, filters_off
from covey.options.schema import Config

RUN = {"model": "m", "dataset": "d", "reward_funcs": ["accuracy"], "val_dataset": ["v"]}


def made(**options: Any) -> Config:
    resolved = from_dict({**RUN, **options})
    assert resolved.problems == ()
    return resolved.config


@pytest.mark.parametrize(
    "words",
    [
        "--top_p 1 --top_k 0 --min_p 0",
        "--top_p 1.0 --top_k -1 --min_p 0.0",
        "--top_p 1.00 --top_k=-1 --min_p None",
        "--top-p 1 --top-k -1 --min-p none --eval_top_k -1",
    ],
)
def test_off_as_trl_and_ms_swift_write_it(words: str) -> None:
    parsed = parse(words.split())
    assert parsed.problems == ()
    config = made(**{name: typed.value for name, typed in parsed.typed.items()})
    assert (config.top_p, config.top_k, config.min_p) == (1.0, 0, 0.0)
    assert (config.eval_top_p, config.eval_top_k, config.eval_min_p) == (1.0, 0, 0.0)
    assert filters_of(config) == eval_filters_of(config) == filters_off(config) == {}


def test_off_in_python() -> None:
    config = made(top_p=1, top_k=-1, min_p=None)
    assert (config.top_p, config.top_k, config.min_p) == (1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--top_k 0.5", "E103"),
        ("--top_k many", "E103"),
        ("--top_p nan", "E103"),
        ("--min_p nan", "E103"),
        ("--top_p inf", "E103"),
        ("--top_p", "E103"),
    ],
)
def test_what_is_no_number(words: str, code: str) -> None:
    (problem,) = parse(words.split()).problems
    assert (problem.code, problem.option) == (code, words.split()[0].strip("-"))


def test_evaluations_follow_training() -> None:
    config = made(top_p=0.9, top_k=50, min_p=0.1, eval_top_p=0.5)
    assert filters_of(config) == {"top_p": 0.9, "top_k": 50, "min_p": 0.1}
    assert eval_filters_of(config) == {"eval_top_p": 0.5, "eval_top_k": 50, "eval_min_p": 0.1}
    off = made(**{**config.model_dump(), **filters_off(config)})
    assert filters_of(off) == eval_filters_of(off) == {}
    assert eval_filters_of(made(top_p=0.9, eval_strategy="no")) == {}


def test_an_evaluation_without_training_has_its_own_alone() -> None:
    config = made(top_p=0.9, eval_top_k=5)
    alone = evaluated_alone(config)
    assert filters_of(alone) == {}
    assert eval_filters_of(alone) == {"eval_top_p": 0.9, "eval_top_k": 5}
    assert eval_filters_of(evaluated_alone(made(top_p=0.9, eval_temperature=0.0))) == {}
