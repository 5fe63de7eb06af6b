"""Collect: prompts in, scored groups out, on every engine alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from covey.activity import Activity, Stopped
from covey.comm import Comm
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.rollout.assembly import RankShare, assemble
from covey.rollout.by_function import FunctionEpisodes
from covey.rollout.engine import Capabilities, Engine, nothing
from covey.rollout.function_context import RolloutFunction
from covey.rollout.shares import Scorer, Share
from covey.rollout.single_turns import SingleTurns
from covey.rollout.slots import CollectPlan, Slot, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import Episode, Metric, Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which groups of a rollout were kept for the update, and which were left out.

    `sampled` are all that were sampled for it, at first and in `attempts` more. `dropped` has the ids of the
    prompts whose groups were left out, by reason; `num_silent` groups without signal stay because nothing
    could replace them.
    """

    sampled: tuple[ScoredGroup, ...]
    attempts: int
    dropped: Mapping[str, tuple[int, ...]]
    num_silent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups of a rollout, known to every rank, and what this rank took for its share in seconds.

    `is_replayed` says that they were read from files: which policy sampled them, and how many completions a
    prompt, is not known. `tasks` are those of the whole data set, each with the names of the rewards that
    score it; no names mean all rewards. `stale` are the numbers of groups that were sampled for an earlier
    rollout. `selection` is None where every group stays. `metrics` are those of how it was sampled.
    """

    groups: tuple[ScoredGroup, ...]
    rollout_s: float
    reward_s: float
    is_replayed: bool = False
    tasks: Mapping[str, Collection[str]] = field(default_factory=dict)
    stale: frozenset[int] = frozenset()
    selection: Selection | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def sampled(self) -> tuple[ScoredGroup, ...]:
        """What the newest policy sampled, before anything was left out."""
        return self.groups if self.selection is None else self.selection.sampled


def collect(
    prompts: Sequence[Prompt],
    engine: Engine,
    score: Scorer,
    codec: TextCodec,
    plan: CollectPlan,
    comm: Comm,
    agents: Agents | None = None,
    function: RolloutFunction | None = None,
) -> Collected:
    """Sample and score every completion of a rollout; engines take equal shares (`own_slots`). What is not a
    token or a text is known to all ranks then. `agents` are the tools and the environment between the turns
    of an episode; None where each has one turn. A `function` makes the episodes itself.

    A completion depends on its noise key alone, so which rank samples it changes nothing. Where nothing is
    left that could sample, those that have not come back are infrastructure failures. Raises Stopped on
    every rank if a signal reached one of them before it had sampled its share for training.
    """
    slots = slots_of(prompts, plan)
    share = Share(own_slots(slots, engine.capabilities, comm), score, agents)
    # An evaluation is not stopped: the step that it belongs to has been taken and is recorded with it.
    is_kept = plan.split != "train"
    spans = engine.capabilities.num_ranks > 1 and not is_kept

    def sample() -> None:
        activity = comm.activity
        with activity.stoppable_between_steps() if spans else stoppable(plan, activity):
            loop = (
                episode_loop(share.slots, engine, codec, agents, activity)
                if function is None
                else FunctionEpisodes(share.slots, engine, codec, function, activity)
            )
            for number, episode in loop.episodes():
                share.take(number, episode)

    return finish(slots, share, sample, codec, plan, comm)


def finish(
    slots: Sequence[Slot],
    share: Share,
    sample: Callable[[], None],
    codec: TextCodec,
    plan: CollectPlan,
    comm: Comm,
) -> Collected:
    """Return the rollout with these slots, of which `sample` samples this rank's share; nothing in it waits
    for another rank, but for those that are one engine with it. Collective.

    Raises Stopped on every rank if a signal reached one of them before its share was sampled and scored.
    """
    own: RankShare | None = None
    started = sampled = time.perf_counter()
    with suppress(Stopped):
        sample()
        sampled = time.perf_counter()
        with stoppable(plan, comm.activity):
            comm.activity.enter("reward" if plan.split == "train" else "evaluate")
            own = share.scored(comm.activity)
    (is_stopped,) = comm.max([float(own is None)])
    if is_stopped or own is None:
        raise Stopped
    reward_s = time.perf_counter() - sampled
    groups = tuple(assemble(slots, own, codec, plan, comm))
    return Collected(groups=groups, rollout_s=sampled - started, reward_s=reward_s)


def stoppable(plan: CollectPlan, activity: Activity) -> AbstractContextManager[None]:
    """A signal ends what is done in here for training, and no evaluation."""
    return activity.stoppable() if plan.split == "train" else nullcontext()


class EpisodeLoop(Protocol):
    """Samples episodes on one rank; further ones may be added while it runs."""

    def add(self, slots: Sequence[Slot]) -> range: ...

    def episodes(self) -> Iterator[tuple[int, Episode]]: ...


def episode_loop(
    slots: Sequence[Slot],
    engine: Engine,
    codec: TextCodec,
    agents: Agents | None,
    activity: Activity,
    between: Callable[[], None] = nothing,
) -> EpisodeLoop:
    """Return what samples the episodes of these slots, with what `agents` do between their turns; `between`
    is called between two steps of the engine."""
    if agents is None:
        return SingleTurns(slots, engine, codec, activity, between)
    return TurnLoop(slots, engine, codec, agents, activity, between)


def own_slots(slots: Sequence[Slot], engine: Capabilities, comm: Comm) -> Sequence[Slot]:
    """Return the slots that this rank samples, scores and owns: one of as many equal shares as there are
    engines, or none where it only computes with the rank that asks its engine.

    Of 8 slots and 4 ranks that are 2 engines, rank 0 has the slots 0 to 3 and rank 2 has 4 to 7.
    """
    if not engine.is_asked_by(comm.rank):
        return ()
    share = -(-len(slots) // (comm.world // engine.num_ranks))
    first = comm.rank // engine.num_ranks * share
    return slots[first : first + share]
