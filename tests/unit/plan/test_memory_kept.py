"""The memory of kept sets, by hand; model and run are those of test_memory.py, with a vocabulary of 100."""

from __future__ import annotations

from typing import Any

import pytest

from covey.plan.facts import Facts
from covey.plan.memory import MemoryPlan, memory_plan
from support.checks import SIZES, changed, config, facts

FACTS = facts(
    model={"sizes": SIZES}, prompts={"longest": 10}, machine={"cuda": False, "free_memory_bytes": 10**10}
)
RUN = {
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_tokens_per_micro_batch": 64,
    "max_completion_length": 6,
    "torch_dtype": "float32",
    "num_iterations": 2,
}
OWN = ("filters of sampling", "kept sets", "kept sets of a pass")
# A bitmap over 100 tokens has four words.
BITMAP = 16


def plan(given: Facts = FACTS, **options: Any) -> MemoryPlan:
    return memory_plan(config(**{**RUN, **options}), given)


def parts(found: MemoryPlan) -> dict[str, dict[str, int]]:
    """What phases hold of kept sets."""
    own = {p.name: {name: b for name, b in p.parts.items() if name in OWN} for p in found.phases}
    return {name: of for name, of in own.items() if of}


@pytest.mark.parametrize(
    ("filters", "each"),
    [
        ({"top_p": 0.9}, 4 + BITMAP),
        ({"min_p": 0.1}, 4 + BITMAP),
        ({"top_k": 3, "top_p": 0.9}, 4 + 12),
        ({"top_k": 50}, 4 + BITMAP),
    ],
)
def test_a_set_takes_ids_or_a_bitmap(filters: dict[str, Any], each: int) -> None:
    """Four completions of six tokens in a rollout and in the fullest pass; each of the four rows that are
    sampled has a bitmap and 24 bytes a logit."""
    found = plan(**filters)
    after = {"kept sets": 24 * each}
    assert parts(found) == {
        "rollout": {**after, "filters of sampling": 4 * (BITMAP + 24 * 100)},
        "annotate": {**after, "kept sets of a pass": 24 * each},
        "update": {**after, "kept sets of a pass": 24 * each},
        "step": after,
    }
    assert (found.set_bytes, found.rollout_set_bytes) == (each, 24 * each)
    assert found.as_dict()["kept_set_bytes"] == 24 * each


def test_a_gpu_holds_those_of_a_pass_and_what_filters_rows() -> None:
    found = plan(changed(FACTS, machine={"cuda": True}), top_k=2)
    assert parts(found) == {
        "rollout": {"filters of sampling": 4 * (8 * BITMAP + 40 * 100)},
        "annotate": {"kept sets of a pass": 24 * 12},
        "update": {"kept sets of a pass": 24 * 12},
    }
    assert found.rollout_set_bytes == 24 * 12


def test_without_filters_nothing_is_counted_or_said() -> None:
    found = plan()
    assert parts(found) == {} and found.set_bytes == 0 and found.as_dict()["kept_set_bytes"] == 0
    assert not any("filters keep" in line for line in found.in_words())
    assert [line for line in plan(top_k=3).in_words() if "filters keep" in line] == [
        "the tokens that filters keep take at most 16 bytes for a sampled token, 0.384 kB of the machine's "
        "memory for a rollout of a process"
    ]
