"""Rollouts that are begun while earlier ones are learned from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil
from statistics import median
from typing import Any, ClassVar, cast

from covey.checkpoint.registry import State
from covey.comm import Comm
from covey.data.image_records import NO_ROWS, ImageRows
from covey.health.history import History
from covey.rollout.ahead import Begun, CollectsAhead
from covey.rollout.collect import Collected
from covey.rollout.records import episode_of, to_record, with_sets_as_text
from covey.texts import tr
from covey.training.source import LiveSource
from covey.types import Episode, EpisodeId, Metric, Score, ScoredGroup
from covey.types.episode import held

LEARNER_WAITS, SAMPLER_WAITS = "ahead/learner_waits", "ahead/sampler_waits"
# Shares of the time that say who waits.
_LITTLE, _MUCH = 0.05, 0.2


@dataclass(slots=True)
class _Clock:
    """Tells the seconds from one call to the next."""

    at: float = field(default_factory=time.monotonic)

    def take(self) -> float:
        now = time.monotonic()
        took, self.at = now - self.at, now
        return max(took, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadSource(LiveSource):
    """Begins rollouts up to `most` ahead of the one that is learned from, and none from `end` on.

    Rollout n begins when the weights are published that n - `most` rollouts were learned from, so that no
    token of it is sampled by older ones. What runs goes on by each version that is published meanwhile.
    Rollouts are taken in their order, however late they end. A rollout is for `steps_per_rollout` steps. A
    checkpoint keeps the episodes that have ended, but for those of environments, which rewards may ask.
    """

    name: ClassVar[str] = "ahead"

    most: int
    end: int
    steps_per_rollout: int
    images: ImageRows = NO_ROWS
    _begun: dict[int, Begun] = field(default_factory=dict)
    _known: dict[EpisodeId, Episode] = field(default_factory=dict)
    _clock: _Clock = field(default_factory=lambda: _Clock())

    def next(self, rollout: int) -> Collected:
        """Publish, begin what may be begun now, and wait for rollout number `rollout`. Collective."""
        self.comm.begin("rollout")
        ahead = cast(CollectsAhead, self.collector)
        ahead.publish()
        for number in range(rollout, min(rollout + self.most + 1, max(self.end, rollout + 1))):
            if number not in self._begun:
                known = self._take_known(number)
                self._begun[number] = ahead.begin(self.supply.take(number), self.plan_of(number), known)
        num_ready = sum(begun.share.is_sampled for begun in self._begun.values())
        collected = ahead.finish(self._begun[rollout])
        del self._begun[rollout]
        waited, since = collected.rollout_s + collected.reward_s, self._clock.take()
        metrics = {
            "ahead/begun": Metric(value=len(self._begun)),
            "ahead/ready": Metric(value=num_ready),
            LEARNER_WAITS: Metric(value=min(1.0, waited / since)),
            SAMPLER_WAITS: Metric(value=ahead.sampler.take_idle()),
            **age_metrics(
                collected.groups, self.comm.activity.step, self.steps_per_rollout, self.most, self.comm
            ),
        }
        return replace(collected, tasks=self.tasks, metrics=metrics)

    def _take_known(self, rollout: int) -> dict[EpisodeId, Episode]:
        """The episodes of a rollout that the stopped run has sampled, where they are not too old by now."""
        oldest = (rollout - self.most) * self.steps_per_rollout
        mine = {key: self._known.pop(key) for key in list(self._known) if key.rollout == rollout}
        return {key: e for key, e in mine.items() if all(version >= oldest for version in e.versions)}

    def state(self) -> State:
        """The episodes that have ended, as records, which ranks tell each other. Collective."""
        agents = cast(CollectsAhead, self.collector).agents
        is_kept = agents is None or agents.environment is None
        own = [
            with_sets_as_text(to_record(slot.prompt, episode, _NO_SCORE, group=slot.group))
            for begun in (self._begun.values() if is_kept else ())
            for place, episode in begun.share.ended.items()
            for slot in (begun.share.slots[place],)
            if episode.sequences
        ]
        every: Any = list(chain.from_iterable(self.comm.gather_json(own)))
        return State(json={"episodes": every})

    def load_state(self, state: State) -> None:
        """Sample what these records have not."""
        values: Any = state.json
        for record in values["episodes"]:
            episode = episode_of(record, self.images)
            self._known[episode.id] = episode


_NO_SCORE = Score(total=None, parts=())


def waits(history: History, most: int, num_servers: int) -> list[str]:
    """Return the closing line of a run that sampled ahead: who waited for whom, and what would change it."""
    found = [history.series[n] for n in (LEARNER_WAITS, SAMPLER_WAITS) if n in history.series]
    if len(found) < 2:
        return []
    learner, sampler = (median(series.last.numbers()) for series in found)
    advice = ""
    if learner > _MUCH and _holds_up(history):
        advice = tr("; rewards hold it up, and a larger --reward_workers calls more of them at once")
    elif learner > _MUCH and sampler > _LITTLE:
        advice = tr("; --max_staleness {more} lets the servers begin earlier", more=most + 1)
    elif learner > _MUCH:
        advice = tr("; more servers would make it faster")
    elif sampler > _MUCH and most > 1:
        advice = tr("; --max_staleness {less} may be as fast, with younger tokens", less=most - 1)
    elif sampler > _MUCH and num_servers > 1:
        advice = tr("; fewer servers may be as fast")
    line = tr(
        "ahead     the model waited for completions in {learner:.0%} of the time, the servers for work in "
        "{sampler:.0%}{advice}",
        learner=learner,
        sampler=sampler,
        advice=advice,
    )
    return [line]


def _holds_up(history: History) -> bool:
    """Whether rewards are waited for longer than completions."""
    found = [history.series[n] for n in ("time/reward_s", "time/rollout_s") if n in history.series]
    rewards, completions = (median(s.last.numbers()) for s in found) if len(found) == 2 else (0.0, 0.0)
    return rewards > completions


def age_metrics(
    groups: Sequence[ScoredGroup], version: int, steps_per_rollout: int, most: int, comm: Comm
) -> dict[str, Metric]:
    """How many rollouts the weights that sampled a token are behind `version`, which learns from it: the
    mean, the largest, and the share of tokens of each age. Collective.

    Weights of 6 steps before, with 4 steps a rollout, are 1.5 rollouts behind and count among those of 2.
    """
    episodes = [episode for scored in groups for episode in scored.group.episodes]
    own = [episode for episode in episodes if (episode.owner or 0) == comm.rank]
    counts, behind, oldest = [0.0] * (most + 1), 0.0, 0.0
    for sampled_by, number in (run for e in own for s in e.sequences for run in held(s).versions):
        age = (version - sampled_by) / steps_per_rollout
        behind, oldest = behind + age * number, max(oldest, age)
        counts[max(0, min(most, ceil(age)))] += number
    *counts, behind = comm.sum([*counts, behind])
    (oldest,) = comm.max([oldest])
    total = int(sum(counts))
    shares = {
        f"age/share_{age}": Metric(value=n / total if total else None, count=total)
        for age, n in enumerate(counts)
    }
    mean = Metric(value=behind / total if total else None, count=total)
    return {"age/mean": mean, "age/max": Metric(value=oldest, count=total), **shares}
