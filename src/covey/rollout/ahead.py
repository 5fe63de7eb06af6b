"""Samples and scores on a thread of its own, while the main thread learns."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from covey.activity import Activity
from covey.comm import Comm
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.rollout.collect import Collected, episode_loop, finish, own_slots, stoppable
from covey.rollout.engine import Engine
from covey.rollout.publisher import Publisher
from covey.rollout.shares import Scorer, Share
from covey.rollout.slots import CollectPlan, Slot, slots_of
from covey.types import Episode, EpisodeId, Prompt

_LOOK_S = 0.01
# How long the thread may take to leave the engine.
_END_S = 10.0


class _Closed(Exception):
    """Ends the thread between two steps of the engine."""


class Sampler:
    """Samples several shares of rollouts side by side on a thread, which alone calls the engine but within
    `paused`. `activity` is what it does; the engine says there which servers it waits for."""

    def __init__(
        self, engine: Engine, codec: TextCodec, agents: Agents | None, activity: Activity | None = None
    ) -> None:
        self.activity = activity or Activity()
        self._loop = episode_loop((), engine, codec, agents, self.activity, self._between)
        self._changed = threading.Condition()
        self._new: list[Share] = []
        # Of each episode that runs, by the loop's number, its share and its place in it.
        self._place: dict[int, tuple[Share, int]] = {}
        self._is_paused = self._is_closed = False
        self._is_still = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._idle_s = 0.0
        self._idle_since = self._taken_at = time.monotonic()

    # -- by the main thread

    def begin(self, share: Share) -> None:
        """Have the thread sample what a share lacks, beside those that were begun before."""
        with self._changed:
            if not self._thread.ident:
                self._idle_since = self._taken_at = time.monotonic()
                self._thread.start()
            self._new.append(share)
            self._changed.notify_all()

    def wait(self, share: Share, activity: Activity) -> None:
        """Wait until a share is sampled; what the thread failed with is raised. Its progress is that of
        `activity`."""
        seen = 0.0
        try:
            while not share.is_sampled:
                if self._failure is not None:
                    raise self._failure
                moment = self.activity.moment
                activity.wait_for_service(moment.service)
                if moment.progress != seen:
                    seen = moment.progress
                    activity.advance()
                time.sleep(_LOOK_S)
        finally:
            activity.leave_service()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The thread asks nothing of the engine within."""
        with self._changed:
            self._is_paused = True
            self._changed.wait_for(lambda: self._is_still)
        try:
            if self._failure is not None:
                raise self._failure
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def take_idle(self) -> float:
        """The share of the time since the last call in which there was nothing to sample."""
        with self._changed:
            now = time.monotonic()
            if self._idle_since:
                self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
            share = self._idle_s / max(now - self._taken_at, 1e-9)
            self._idle_s, self._taken_at = 0.0, now
            return min(1.0, share)

    def close(self) -> None:
        """Drop what runs, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident:
            self._thread.join(_END_S)

    # -- by its own thread

    def _run(self) -> None:
        try:
            while self._has_work():
                for number, episode in self._loop.episodes():
                    share, place = self._place.pop(number)
                    share.take(place, episode)
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self._failure = error
        finally:
            with self._changed:
                self._is_still = True
                self._changed.notify_all()

    def _has_work(self) -> bool:
        """Wait for a share; False where there is to be none any more."""
        with self._changed:
            self._idle_since = time.monotonic()
            self._is_still = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closed or (self._new and not self._is_paused))
            self._is_still = False
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = 0.0
            return not self._is_closed

    def _between(self) -> None:
        """Rest while the main thread asks the engine; then take what was begun."""
        with self._changed:
            if self._is_paused:
                self._is_still = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or not self._is_paused)
                self._is_still = False
            if self._is_closed:
                raise _Closed
            new, self._new = self._new, []
        for share in new:
            places = [place for place in range(len(share.slots)) if place not in share.ended]
            numbers = self._loop.add([share.slots[place] for place in places])
            self._place.update({n: (share, place) for n, place in zip(numbers, places, strict=True)})


@dataclass(frozen=True, slots=True)
class Begun:
    """Holds a rollout or an evaluation in progress: its slots, this rank's share of them, and its plan."""

    slots: Sequence[Slot]
    share: Share
    plan: CollectPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectsAhead:
    """Collects by a sampler that goes on while the main thread learns."""

    publisher: Publisher
    sampler: Sampler
    score: Scorer
    codec: TextCodec
    comm: Comm
    agents: Agents | None = None

    def publish(self) -> None:
        """Have what runs go on with the weights of the steps taken. Collective."""
        self.sampler.activity.step = version = self.comm.activity.step
        with self.sampler.paused(), self.publisher.serve(version):
            pass

    def begin(
        self, prompts: Sequence[Prompt], plan: CollectPlan, known: Mapping[EpisodeId, Episode] | None = None
    ) -> Begun:
        """Begin to sample prompts beside what runs, but for episodes that are `known`."""
        slots = slots_of(prompts, plan)
        mine = own_slots(slots, self.publisher.engine.capabilities, self.comm)
        share = Share(mine, self.score, self.agents)
        for place, slot in enumerate(mine):
            episode = (known or {}).get(slot.episode_id)
            if episode is not None and episode.sequences[0].prompt_digest == slot.prompt.digest:
                share.take(place, episode)
        if not share.is_sampled:
            self.sampler.begin(share)
        return Begun(slots, share, plan)

    def finish(self, begun: Begun) -> Collected:
        """Wait until it is sampled and scored. Collective; raises Stopped as `collect`."""
        activity = self.comm.activity

        def sample() -> None:
            with stoppable(begun.plan, activity):
                self.sampler.wait(begun.share, activity)

        return finish(begun.slots, begun.share, sample, self.codec, begun.plan, self.comm)

    def collect(self, prompts: Sequence[Prompt], plan: CollectPlan) -> Collected:
        """Sample and score prompts with the weights of the steps taken. Collective."""
        self.publish()
        return self.finish(self.begin(prompts, plan))

    def close(self) -> None:
        """Drop what runs."""
        self.sampler.close()
