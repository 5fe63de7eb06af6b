"""A word on passes with little room beside long prompts, held to what the packer makes of such rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.batching.pack import PackPlan, _row, micro_batches
from covey.models.stream import build_stream
from covey.plan.shape import tokens_per_pass
from covey.types import Finish, Sample
from support.checks import SIZES, config, edits_of, facts, found, one

LONG = facts(longest_prompt=1000, longest_prompt_in_data=1000, mean_prompt=1000.0)
ONE: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 64,
    "max_completion_length": 14,
}


def group_of(prompt: int, completion: int, siblings: int) -> list[Sample]:
    """Siblings that part at their first token and run to their limit."""
    return [
        Sample(
            group=0,
            sibling=number,
            token_ids=(*[9] * prompt, number, *[8] * (completion - 1)),
            prompt_length=prompt,
            is_trained=(False,) * prompt + (True,) * completion,
            sampler_logprobs=(0.0,) * completion,
            versions=(0,) * completion,
            temperature=1.0,
            finish=Finish.LENGTH,
        )
        for number in range(siblings)
    ]


def packed(samples: list[Sample], max_tokens: int) -> tuple[int, int]:
    """The passes that the packer makes of them, and their tokens, with the last of each completion, which is
    predicted alone."""
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=len(samples),
        num_iterations=1,
        max_tokens=max_tokens,
        max_completion_length=14,
        stream="prefix",
        device=torch.device("cpu"),
    )
    passes = micro_batches(samples, [True] * len(samples), range(len(samples)), plan, 0)
    streams = [build_stream([_row(samples[i]) for i in numbers], "prefix") for numbers in passes]
    return len(passes), sum(len(stream.tokens_T) for stream in streams) + len(samples)


@pytest.mark.parametrize(
    ("options", "given", "passes", "larger", "works"),
    [
        (ONE, LONG, 8, 1112, (1112, 8112)),
        (ONE | {"max_tokens_per_micro_batch": 1028}, LONG, 4, 1112, (1112, 4112)),
        # There is not so much more memory for the whole group: three siblings a pass.
        (ONE | {"max_completion_length": 100}, LONG, 8, 1300, (3800, 8800)),
        (ONE | {"num_generations": 4}, LONG, 4, 1056, (1056, 4056)),
    ],
)
def test_the_passes_and_tokens_that_it_says_are_the_packers(options, given, passes, larger, works):
    problem = one(given, **options)
    typed = "max_tokens_per_micro_batch"
    assert (problem.code, problem.option) == (
        "W119",
        typed if typed in options else "per_device_train_batch_size",
    )
    held = tokens_per_pass(config(**options), longest_prompt=1000, cpu_model=None)
    assert f"in up to {passes} forward passes" in problem.seen and f"{held:,} tokens" in problem.seen
    assert edits_of(problem) == [{"max_tokens_per_micro_batch": larger}]
    assert f"{works[0]:,} tokens in place of {works[1]:,}" in problem.fixes[0].text
    samples = group_of(1000, options["max_completion_length"], options["num_generations"])
    assert packed(samples, held) == (passes, works[1])
    assert packed(samples, larger)[1] == works[0]
    assert found(given, **options | edits_of(problem)[0]) == []


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, LONG),  # B as it is untyped has room for a group
        (ONE | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 32}, LONG),
        (ONE | {"max_completion_length": 1000}, LONG),  # twice the memory, for half of the work
        (ONE, facts(longest_prompt=1000, longest_prompt_in_data=1000, mean_prompt=100.0)),  # one is long
        (ONE, facts(longest_prompt=1000, longest_prompt_in_data=1000)),
        (ONE | {"attn_impl": "flash_attn"}, LONG),  # computes each row's prompt whatever there is room for
    ],
)
def test_nothing_is_said_where_there_is_room_or_nothing_to_gain(options, given):
    assert [p.code for p in found(given, **options) if p.code == "W119"] == []


@pytest.mark.parametrize(("free", "codes"), [(1, ["E211"]), (10**12, ["W119"])])
def test_nothing_is_said_where_what_it_offers_does_not_fit(free, codes):
    given = replace(LONG, model_sizes=SIZES, free_memory_bytes=free)
    assert [p.code for p in found(given, **ONE)] == codes
