"""Completions to scores: the rewards of a run, their weights, and what they report beside their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from covey.comm import Comm
from covey.data.text import TextCodec
from covey.rewards.protocol import Scored, TrainerState
from covey.rewards.registry import weighted
from covey.rewards.reward_set import RewardSet
from covey.rewards.steps import step_ends
from covey.training.state import Progress
from covey.types import Metric, Score


def step_tokens(codec: TextCodec, separator: str) -> Callable[[Scored], tuple[int, ...]]:
    """Counts the trained tokens up to the end of each step of an episode; the last step ends with it. With
    tools or an environment each turn is a step."""

    def ends(row: Scored) -> tuple[int, ...]:
        if row.episode.turns:
            return row.episode.turn_ends
        ids, text = row.episode.completion_ids, row.episode.text
        characters = step_ends(text, separator)
        ends = (*codec.tokens_until(ids, text, characters[:-1]), len(ids)) if characters else ()
        # A rollout function may have written some of them.
        is_trained = [own for s in row.episode.tokens for own in s.is_trained[s.prompt_length :].tolist()]
        return tuple(sum(is_trained[:end]) for end in ends)

    return ends


class Scoring:
    """Scores rows with the run's rewards, which are told how far the run is.

    `weights` are those of the rewards by name. `ends` says how many of an episode's trained tokens stand
    before the end of each of its steps.
    """

    def __init__(
        self,
        rewards: RewardSet,
        weights: Sequence[float],
        progress: Progress,
        steps_per_epoch: float | None,
        ends: Callable[[Scored], tuple[int, ...]] = lambda row: (),
    ) -> None:
        self.rewards = rewards
        self.weights = dict(zip(rewards.names, weights, strict=True))
        self._progress = progress
        self._steps_per_epoch = steps_per_epoch
        self._ends = ends
        # By what the rows were sampled for: the split, and the number of the rollout.
        self._logged: dict[tuple[str, int], list[Mapping[str, Metric]]] = {}
        self.total_steps = 0

    def __call__(self, rows: Sequence[Scored]) -> Callable[[], list[Score]]:
        """Start scoring rows; the function that comes back waits for one score a row."""
        step = self._progress.step
        epoch = step / self._steps_per_epoch if self._steps_per_epoch else 0.0
        state = TrainerState(global_step=step, max_steps=self.total_steps, epoch=epoch)
        judge = self.rewards.begin(rows, state)

        def scores() -> list[Score]:
            judged = judge()
            for asked in {(row.episode.id.split, row.episode.id.rollout) for row in rows}:
                self._logged.setdefault(asked, []).append(judged.metrics)
            return weighted(judged, list(self.weights.values()), lambda row: self._ends(rows[row]))

        return scores

    def take_metrics(self, rollout: int, comm: Comm) -> dict[str, Metric]:
        """Return what the rewards logged of a rollout, averaged over its calls and over ranks, and drop what
        they logged of earlier rollouts and of evaluations."""
        mine = self._logged.get(("train", rollout), [])
        self._logged = {
            (split, number): logged
            for (split, number), logged in self._logged.items()
            if split == "train" and number > rollout
        }
        sums: dict[str, tuple[float, int]] = {}
        shares = comm.gather_json([{n: [m.value, m.count] for n, m in part.items()} for part in mine])
        for name, (value, count) in ((n, v) for share in shares for part in share for n, v in part.items()):
            total, seen = sums.get(name, (0.0, 0))
            sums[name] = (total + (value or 0.0) * count, seen + count)
        return {name: Metric(value=total / count, count=count) for name, (total, count) in sums.items()}
