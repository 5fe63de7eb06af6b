"""config.yaml reads back as the configuration it was written from, whatever is in it."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config import from_dict, parse, resolve, to_yaml
from covey.config.values import kind_of
from covey.options.schema import FACTS, GROUPS, OPTIONS

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda s: s.strip() != ""
)


# No path holds it, so an option that takes one refuses it.
PATH = TEXT.filter(lambda s: "\0" not in s)


def strategy(name: str) -> st.SearchStrategy[Any]:
    kind, text = kind_of(name), TEXT if FACTS[name].path is None else PATH
    one: st.SearchStrategy[Any] = {
        "bool": st.booleans(),
        "int": st.integers(-5, 10**6),
        "float": st.floats(allow_nan=False, allow_infinity=False),
        "str": text,
        "choice": st.sampled_from(kind.choices or ("",)),
        "json": st.dictionaries(TEXT, TEXT, max_size=3),
        "rollout_log": st.one_of(st.sampled_from(["all", "none"]), st.integers(1, 99)),
    }[kind.base]
    some = st.lists(one, min_size=1, max_size=3) if kind.many else one
    return st.one_of(st.none(), some) if kind.optional else some


REQUIRED = {name: strategy(name) for name in ("model", "dataset", "reward_funcs", "output_dir")}
# The directory of an adapter is read where options are resolved, so it has to be there.
OTHERS = {n: strategy(n) for n in OPTIONS if n not in (*REQUIRED, "adapters")}


GIVEN = given(st.fixed_dictionaries(REQUIRED, optional=OTHERS), st.integers(1, 9))


@settings(max_examples=20, deadline=None)
@GIVEN
def test_round_trip(options: dict[str, Any], world_size: int) -> None:
    assert_written_and_read_is_equal(options, world_size)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@GIVEN
def test_many_round_trips(options: dict[str, Any], world_size: int) -> None:
    assert_written_and_read_is_equal(options, world_size)


def assert_written_and_read_is_equal(options: dict[str, Any], world_size: int) -> None:
    first = from_dict(options, world_size)
    assert first.problems == ()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "config.yaml")
        path.write_text(to_yaml(first), encoding="utf-8")
        parsed = parse([str(path)])
    second = resolve(parsed.typed, world_size, parsed.problems)
    assert second.problems == ()
    assert second.config == first.config


def test_the_file_is_grouped_and_says_where_values_came_from() -> None:
    words = "--model m --dataset a.jsonl --reward_funcs accuracy --seed 7 --output_dir o"
    parsed = parse(words.split())
    lines = to_yaml(resolve(parsed.typed, 1)).splitlines()
    groups = [line.rstrip(":") for line in lines if line and line[0] not in " #"]
    assert groups == list(GROUPS)
    assert "  seed: 7  # flag --seed" in lines
    assert "  data_seed: 7  # derived from seed" in lines
    assert "  learning_rate: 1.0e-06  # default" in lines
    assert "  dataset: [a.jsonl]  # flag --dataset" in lines
