"""A suggestion is valid when it is typed, there always is one, and what is valid is never refused."""

from math import gcd
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.checks.batch import batch_problems
from covey.config import Resolved, from_dict
from covey.plan.shape import faults, shape_of
from covey.types import Problem

BASE = {"model": "m", "dataset": "d.jsonl", "reward_funcs": "accuracy", "output_dir": "o"}
BATCH = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations",
    "generation_batch_size", "num_iterations",
)  # fmt: skip
COUNT = st.one_of(st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(-1, 100), st.integers(1, 10**12))
OPTIONS = st.fixed_dictionaries({}, optional=dict.fromkeys(BATCH, COUNT))
PROCESSES = st.one_of(st.sampled_from([1, 2, 3, 4, 7, 8, 64]), st.integers(1, 512))
PROMPTS = st.one_of(st.none(), st.integers(1, 50), st.just(10_000))


def resolved(options: dict[str, Any], processes: int) -> Resolved:
    return from_dict({**BASE, **options}, processes)


@settings(max_examples=80, deadline=None)
@given(OPTIONS, PROCESSES, PROMPTS)
def test_fixes_are_valid_when_typed(options: dict[str, int], processes: int, prompts: int | None) -> None:
    found = resolved(options, processes)
    problems = batch_problems(found.config, processes, prompts, found.typed_names)
    assert bool(problems) == bool(faults(shape_of(found.config, processes), prompts))
    for problem in problems:
        assert problem.fixes
        for fix in problem.fixes:
            fixed = resolved({**options, **fix.edits}, processes)
            assert fixed.problems == ()
            assert not batch_problems(fixed.config, processes, prompts)


@settings(max_examples=200, deadline=None)
@given(
    processes=st.integers(1, 1024),
    per_device=st.integers(1, 128),
    passes=st.integers(1, 64),
    factor=st.integers(1, 16),
    iterations=st.integers(1, 100),
    data=st.data(),
)
def test_what_is_valid_is_never_refused(
    processes: int, per_device: int, passes: int, factor: int, iterations: int, data: st.DataObject
) -> None:
    total = processes * per_device * passes * factor
    group = gcd(total, data.draw(st.integers(2, 2**20)))
    if group < 2:
        return
    options = {
        "per_device_train_batch_size": per_device, "gradient_accumulation_steps": passes,
        "steps_per_generation": passes * factor, "num_generations": group, "num_iterations": iterations,
    }  # fmt: skip
    prompts = data.draw(st.one_of(st.none(), st.integers(total // group, total)))
    assert batch_problems(resolved(options, processes).config, processes, prompts) == []


def fixes(processes: int = 1, prompts: int | None = None, **options: int) -> list[dict[str, Any]]:
    return [dict(fix.edits) for fix in problem(processes, prompts, **options).fixes]


def problem(processes: int = 1, prompts: int | None = None, **options: int) -> Problem:
    found = resolved(options, processes)
    return batch_problems(found.config, processes, prompts, found.typed_names)[0]


def test_the_first_fix_is_the_one_people_want() -> None:
    assert fixes(num_generations=1)[0] == {"num_generations": 8}
    assert fixes(per_device_train_batch_size=1)[0] == {"gradient_accumulation_steps": 8}
    assert {"per_device_train_batch_size": 8} in fixes(per_device_train_batch_size=1)
    assert {"num_generations": 7} in fixes(7, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    longer = fixes(gradient_accumulation_steps=8, steps_per_generation=4)
    assert longer[0] == {"steps_per_generation": 8}
    assert {"gradient_accumulation_steps": 4} in longer
    assert fixes(2, generation_batch_size=50)[0] == {"generation_batch_size": 48}
    both = fixes(2, generation_batch_size=64, steps_per_generation=2)
    assert both[:2] == [{"generation_batch_size": 32}, {"steps_per_generation": 4}]
    assert fixes(1, 7)[0] == {"gradient_accumulation_steps": 7}


def test_a_fix_names_what_has_to_be_typed_with_it() -> None:
    # Typing the batch size alone would bring gradient_accumulation_steps from its default down to 1.
    per_device = [edits for edits in fixes(1, 7) if "per_device_train_batch_size" in edits]
    assert per_device == [{"per_device_train_batch_size": 7, "gradient_accumulation_steps": 8}]


def test_a_product_out_of_range_is_a_problem_though_its_factors_are_not() -> None:
    huge = problem(per_device_train_batch_size=10**6, gradient_accumulation_steps=10**6)
    assert (huge.code, huge.option) == ("E208", "generation_batch_size")
