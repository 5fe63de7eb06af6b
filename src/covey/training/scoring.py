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
        ids, text = row.episode.trained_ids, row.episode.text
        characters = step_ends(text, separator)
        return (*codec.tokens_until(ids, text, characters[:-1]), len(ids)) if characters else ()

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
        self._logged: list[Mapping[str, Metric]] = []
        self._is_waiting = False
        self.total_steps = 0

    def __call__(self, rows: Sequence[Scored]) -> Callable[[], list[Score]]:
        """Start scoring rows; the function that comes back waits for one score a row."""
        step = self._progress.step
        epoch = step / self._steps_per_epoch if self._steps_per_epoch else 0.0
        state = TrainerState(global_step=step, max_steps=self.total_steps, epoch=epoch)
        if not self._is_waiting:
            # Further attempts of a rollout add to what was logged of its first.
            self._logged = self._logged if any(row.prompt.origin.attempt for row in rows) else []
            self._is_waiting = True
        judge = self.rewards.begin(rows, state)

        def scores() -> list[Score]:
            judged = judge()
            self._is_waiting = False
            self._logged.append(judged.metrics)
            return weighted(judged, list(self.weights.values()), lambda row: self._ends(rows[row]))

        return scores

    def take_metrics(self, comm: Comm) -> dict[str, Metric]:
        """What the rewards logged of the last rollout, averaged over its calls and over ranks; each is handed
        out once."""
        mine, self._logged = self._logged, []
        sums: dict[str, tuple[float, int]] = {}
        shares = comm.gather_json([{n: [m.value, m.count] for n, m in part.items()} for part in mine])
        for name, (value, count) in ((n, v) for share in shares for part in share for n, v in part.items()):
            total, seen = sums.get(name, (0.0, 0))
            sums[name] = (total + (value or 0.0) * count, seen + count)
        return {name: Metric(value=total / count, count=count) for name, (total, count) in sums.items()}
