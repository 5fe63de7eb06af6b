"""Collect: prompts in, scored groups out, on every engine alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

from covey.activity import Activity, Stopped
from covey.comm import Comm
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.errors import EngineLost
from covey.rewards.protocol import Scored
from covey.rollout.assembly import RankShare, assemble
from covey.rollout.engine import Capabilities, Engine
from covey.rollout.running import lost_episode
from covey.rollout.slots import CollectPlan, Slot, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import (
    Completion,
    Episode,
    GenerationRequest,
    Outcome,
    Prompt,
    Score,
    ScoredGroup,
    ScorePart,
    TokenSequence,
)

Scorer = Callable[[Sequence[Scored]], Callable[[], list[Score]]]
"""Starts scoring rows; the function that comes back waits for one score a row."""

# Finished groups are handed to the rewards in this many parts, while the others still decode; a part of fewer
# tokens waits for more, as a call of its own would take longer than decoding them.
_PARTS = 4
_PART_TOKENS = 4096


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
    rollout. `selection` is None where every group stays.
    """

    groups: tuple[ScoredGroup, ...]
    rollout_s: float
    reward_s: float
    is_replayed: bool = False
    tasks: Mapping[str, Collection[str]] = field(default_factory=dict)
    stale: frozenset[int] = frozenset()
    selection: Selection | None = None

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
) -> Collected:
    """Sample and score every completion of a rollout; engines take equal shares (`own_slots`). What is not a
    token or a text is known to all ranks then. `agents` are the tools and the environment between the turns
    of an episode; None where each has one turn.

    A completion depends on its noise key alone, so which rank samples it changes nothing. Where nothing is
    left that could sample, those that have not come back are infrastructure failures. Raises Stopped on
    every rank if a signal reached one of them before it had sampled its share for training.
    """
    slots = slots_of(prompts, plan)
    mine = own_slots(slots, engine.capabilities, comm)
    share_of_rank: _Share | None = None
    with suppress(Stopped):
        share_of_rank = _sample_share(mine, engine, score, codec, plan, comm.activity, agents)
    (is_stopped,) = comm.max([float(share_of_rank is None)])
    if is_stopped or share_of_rank is None:
        raise Stopped
    return Collected(
        groups=tuple(assemble(slots, share_of_rank.own, codec, plan, comm)),
        rollout_s=share_of_rank.rollout_s,
        reward_s=share_of_rank.reward_s,
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank samples of a rollout, and what it took in seconds."""

    own: RankShare
    rollout_s: float
    reward_s: float


def _sample_share(
    mine: Sequence[Slot],
    engine: Engine,
    score: Scorer,
    codec: TextCodec,
    plan: CollectPlan,
    activity: Activity,
    agents: Agents | None,
) -> _Share:
    """Sample and score the completions of this rank; nothing here waits for another one, but for those that
    are one engine with it."""
    # An evaluation is not stopped: the step that it belongs to has been taken and is recorded with it.
    is_kept = plan.split != "train"
    stoppable = nullcontext if is_kept else activity.stoppable
    spans = engine.capabilities.num_ranks > 1 and not is_kept
    started = time.perf_counter()
    waiting: list[tuple[list[int], Callable[[], list[Score]]]] = []
    episodes: dict[int, Episode] = {}
    with activity.stoppable_between_steps() if spans else stoppable():
        if agents is None:
            ending = _single_turns(mine, engine, plan, codec, activity)
        else:
            ending = TurnLoop(mine, engine, plan, codec, agents, activity).episodes()
        for numbers in _whole_groups(mine, ending, episodes):
            rows = [Scored.of(mine[i].prompt, episodes[i]) for i in numbers]
            waiting.append((numbers, score(rows)))
    sampled = time.perf_counter()
    scores: dict[int, Score] = {}
    with stoppable():
        activity.enter("evaluate" if is_kept else "reward")
        for numbers, wait in waiting:
            scores.update(zip(numbers, wait(), strict=True))
            _release([episodes[number] for number in numbers], agents)
            activity.advance()
    return _Share(
        own=RankShare(
            slots=mine,
            episodes=[episodes[i] for i in range(len(mine))],
            scores=[scores[i] if i in scores else _no_score(plan) for i in range(len(mine))],
        ),
        rollout_s=sampled - started,
        reward_s=time.perf_counter() - sampled,
    )


def _release(episodes: Sequence[Episode], agents: Agents | None) -> None:
    """Let go of the environments of episodes that are scored."""
    keys = [e.environment for e in episodes if e.environment is not None]
    if keys and agents is not None and agents.environment is not None:
        agents.environment.release(keys)


def _whole_groups(
    slots: Sequence[Slot], ending: Iterator[tuple[int, Episode]], episodes: dict[int, Episode]
) -> Iterator[list[int]]:
    """Put the episodes that end into `episodes`; gives the numbers of the slots of groups that have ended,
    several groups at a time, in slot order, but for slots whose episode is lost."""
    members: dict[int, list[int]] = {}
    for number, slot in enumerate(slots):
        members.setdefault(slot.group, []).append(number)
    running = {group: len(numbers) for group, numbers in members.items()}
    ended: list[int] = []
    tokens = 0
    for number, episode in ending:
        episodes[number] = episode
        tokens += episode.num_trained
        group = slots[number].group
        running[group] -= 1
        if running[group] == 0:
            own = [n for n in members[group] if episodes[n].outcome is not Outcome.INFRASTRUCTURE]
            ended.extend(own)
        if len(ended) * _PARTS >= len(slots) and tokens >= _PART_TOKENS:
            yield sorted(ended)
            ended, tokens = [], 0
    if ended:
        yield sorted(ended)


def _single_turns(
    slots: Sequence[Slot], engine: Engine, plan: CollectPlan, codec: TextCodec, activity: Activity
) -> Iterator[tuple[int, Episode]]:
    """Sample episodes of one turn; gives each, with the number of its slot, as it ends."""
    number_of = {
        engine.submit(
            GenerationRequest(
                prompt_token_ids=tuple(slot.prompt.token_ids),
                sampling=plan.sampling,
                turn=slot.episode_id(plan).turn_id(),
                media=slot.prompt.media,
            )
        ): number
        for number, slot in enumerate(slots)
    }
    try:
        for completion in engine.results():
            activity.advance()
            number = number_of.pop(completion.request_id)
            yield number, _episode(slots[number], completion, codec, plan)
    except EngineLost as error:
        for number in number_of.values():
            yield number, lost_episode(slots[number], error.finding.seen, plan)


def _no_score(plan: CollectPlan) -> Score:
    """The score of a lost completion: no reward was asked."""
    return Score(total=None, parts=tuple(ScorePart(name=name, value=None) for name in plan.weights))


def _episode(slot: Slot, completion: Completion, codec: TextCodec, plan: CollectPlan) -> Episode:
    # A reader sees what the prompt has opened and the completion as one text.
    before = slot.prompt.token_ids if slot.prompt.opened else ()
    if plan.split != "train" and completion.kept is not None:
        # Nothing is trained on it.
        completion = replace(completion, kept=None)
    return Episode(
        id=slot.episode_id(plan),
        sequences=(TokenSequence.of_turn(slot.prompt.token_ids, completion, slot.prompt.media),),
        outcome=Outcome(completion.finish),
        text=codec.decode_behind(before, completion.token_ids.tolist()),
        sampling=plan.sampling,
        seconds=completion.seconds,
    )
