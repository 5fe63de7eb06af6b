"""Which completions a rollout has, and how they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from covey.types import EpisodeId, Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectPlan:
    """How completions are drawn: `num_generations` a prompt, under noise keyed by `seed` and `split`.

    `weights` are those of the rewards by name, from which several ranks tell each other's scores.
    """

    num_generations: int
    sampling: SamplingParams
    seed: int
    split: str = "train"
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slot:
    """Names one completion to sample by its number, group and sibling within the rollout, and holds its
    prompt and the plan that it is drawn by."""

    number: int
    group: int
    sibling: int
    prompt: Prompt
    plan: CollectPlan

    @property
    def episode_id(self) -> EpisodeId:
        """The id of the slot's draw."""
        origin = self.prompt.origin
        return EpisodeId(
            seed=self.plan.seed,
            split=self.plan.split,
            rollout=origin.rollout,
            attempt=origin.attempt,
            prompt_id=self.prompt.id,
            sibling=self.sibling,
        )


def slots_of(prompts: Sequence[Prompt], plan: CollectPlan) -> list[Slot]:
    """Return the slots of a rollout, group after group."""
    pairs = [(g, s) for g in range(len(prompts)) for s in range(plan.num_generations)]
    return [
        Slot(number, group, sibling, prompts[group], plan) for number, (group, sibling) in enumerate(pairs)
    ]
