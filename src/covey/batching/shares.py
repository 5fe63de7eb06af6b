"""Divides the rows of a rollout into optimizer steps, and those of a step among ranks.

The rows of a step depend on their order and on B x A x N alone, never on how the step is cut. Steps are whole
episodes. What a rank forwards is dealt by tokens from columns that every rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from covey.batching.assignment import Assignment, assign
from covey.comm import Comm
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.shape import tokens_per_pass
from covey.token_streams import StreamKind
from covey.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """How a rollout is cut: `completions_per_rank` is B x A, in episodes; a forward pass holds at most
    `max_tokens` tokens. `top_entropy_quantile` is the share of a step's tokens whose policy term counts."""

    rank: int
    world: int
    completions_per_rank: int
    num_iterations: int
    max_tokens: int
    max_completion_length: int
    stream: StreamKind
    device: torch.device
    top_entropy_quantile: float = 1.0


def pack_plan(config: Config, longest: int, policy: Policy, comm: Comm) -> PackPlan:
    """Return how the rollouts of a run are cut; `longest` are the tokens of the longest prompt."""
    return PackPlan(
        rank=comm.rank,
        world=comm.world,
        completions_per_rank=config.per_device_train_batch_size * config.gradient_accumulation_steps,
        num_iterations=config.num_iterations,
        max_tokens=tokens_per_pass(config, longest_prompt=longest, cpu_model=_cpu_model(policy)),
        max_completion_length=config.most_sampled,
        stream=policy.stream,
        device=policy.device,
        top_entropy_quantile=config.top_entropy_quantile,
    )


def _cpu_model(policy: Policy) -> tuple[int, int] | None:
    """Return width and layers of a model on a CPU, as its config has them."""
    text: Any = policy.model.config
    text = text.get_text_config()
    hidden, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    if policy.device.type != "cpu" or hidden is None or layers is None:
        return None
    return hidden, layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Holds the row numbers of an optimizer step and the rank that forwards each."""

    rows: range
    assignment: Assignment

    def of_rank(self, rank: int) -> list[int]:
        """Return the numbers of a rank's rows within the rollout, in order."""
        return [self.rows.start + number for number in self.assignment.rows_of(rank)]


def steps_of(samples: Sequence[Sample], forward: Sequence[bool], plan: PackPlan) -> list[Step]:
    """Return the optimizer steps of one pass over a rollout; `forward` says which rows have a gradient.

    Before they are dealt, ranks have equal shares of a step's episodes in their order.
    """
    found = []
    for rows in step_slices(samples, plan):
        here = [samples[i] for i in rows]
        length = np.array([s.length for s in here])
        prompt = np.array([0 if s.sequence else s.prompt_length for s in here])
        number = np.cumsum([i > 0 and s.episode != here[i - 1].episode for i, s in enumerate(here)])
        is_forwarded = np.array([forward[i] for i in rows])
        dealt = assign(
            length * is_forwarded,
            np.array([s.group for s in here]),
            number // plan.completions_per_rank,
            plan.world,
            prompt * is_forwarded if plan.stream == "prefix" else None,
        )
        found.append(Step(rows=rows, assignment=dealt))
    return found


def step_slices(samples: Sequence[Sample], plan: PackPlan) -> list[range]:
    """The sample numbers of each optimizer step of one pass, in order, all ranks together: a whole number of
    episodes."""
    per_step = plan.completions_per_rank * plan.world
    is_first = [i == 0 or s.episode != samples[i - 1].episode for i, s in enumerate(samples)]
    starts = [*(i for i, first in enumerate(is_first) if first), len(samples)]
    num_episodes = len(starts) - 1
    assert num_episodes == len({s.episode for s in samples}), "rows of an episode stand together"
    assert num_episodes % per_step == 0, "a rollout is a whole number of optimizer steps"
    return [range(start, stop) for start, stop in pairwise(starts[::per_step])]
