"""`covey replay`: the episodes of a recorded group, rendered, answered and scored again, and drawn again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.activity import Activity
from covey.batching.credit import RowCredit, row_credits
from covey.batching.needs import needs
from covey.batching.samples import to_samples
from covey.checks.tools.rehearsal import marked
from covey.comm import LocalComm
from covey.config.checkpoints import checkpoint_step
from covey.environments.protocol import Opened
from covey.errors import ConfigError, CoveyError
from covey.models.lora import merged
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.problem import problem
from covey.rollout.collect import episode_loop
from covey.rollout.records import groups_of
from covey.rollout.replayed import Recorded, answered_again, rendered_again, turns_of
from covey.rollout.slots import CollectPlan, Slot
from covey.telemetry.jsonl import encode
from covey.texts import joined, tr
from covey.training.backend import engine_for
from covey.training.replay_differences import (
    Difference,
    Drawn,
    drawn_again,
    environment_differences,
    rendering_differences,
)
from covey.training.replay_parts import Parts, read_parts
from covey.training.rescoring import RunWeights, config_of, gaps, scorable
from covey.types import Episode, Fix, Problem, Prompt, Sample, Score, ScoredGroup

Record = Mapping[str, Any]
_ENVIRONMENT = "environment"
# Characters of a prompt that are shown.
_MOST_SHOWN = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """Holds how far the logprobs of an episode's trained tokens are from those of the weights, in nats."""

    num_tokens: int
    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """An episode as it was recorded, and what a replay says of it.

    `versions` are pairs of a version and how many trained tokens it sampled. `masked` says why it is out of
    the loss ("": it is in it). `rendering` and `environment` are differences, and None where nothing was
    replayed; so are `scored` and `drawn`.
    """

    sibling: int
    conversation: str
    outcome: str
    failure: str
    reward: float | None
    parts: Mapping[str, float | None]
    advantage: float
    masked: str
    versions: tuple[tuple[int, int], ...]
    rendering: tuple[Difference, ...] | None
    environment: tuple[Difference, ...] | None
    scored: Rescored | None
    drawn: Drawn | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Holds a group of a rollout, replayed. `groups` are the numbers of all groups of the rollout; `weights`
    are those that scored it, of the step `step`: "" and None where there are none, or nobody says which."""

    rollout: int
    group: int
    groups: tuple[int, ...]
    version: int
    weights: str
    step: int | None
    notes: tuple[str, ...]
    episodes: tuple[ReplayedEpisode, ...]

    @property
    def num_flips(self) -> int:
        """Return how many episodes were drawn with another token."""
        return sum(one.drawn is not None and not one.drawn.same for one in self.episodes)


def replay(
    run: Path, rollout: int, records: Sequence[Record], group: int, checkpoint: Path | None, *, draws: bool
) -> Replay:
    """Replay a group of a rollout, whose records these are, by the weights of a checkpoint, or of the one
    nearest to what sampled it. ConfigError (E408) where it is to be drawn again and cannot be; CoveyError
    where records cannot be read again."""
    config = config_of(run)
    weights = RunWeights(run, config)
    own = sorted((r for r in records if r["group"] == group), key=itemgetter("sibling"))
    with closing(read_parts(config, own, [*weights.by_step.values()])) as parts:
        numbers = sorted({record["group"] for record in records})
        index, groups = numbers.index(group), groups_of(records, parts.images)
        samples = to_samples(groups)
        pairs = zip(samples, row_credits(groups, samples, config), strict=True)
        # All rows of an episode have its advantage.
        credits = {s.sibling: credit for s, credit in pairs if s.group == index}
        scored = scorable([s for s in samples if s.group == index])
        replaying = _Replaying(config, parts, groups[index], own, scored, weights, checkpoint)
        if draws and (refused := replaying.against_drawing()):
            raise ConfigError(refused)
        episodes = tuple(replaying.episodes(credits, draws=draws))
        return Replay(
            rollout=rollout,
            group=group,
            groups=tuple(numbers),
            version=replaying.version,
            weights="" if replaying.directory is None else str(replaying.directory),
            step=replaying.step,
            notes=tuple(replaying.notes),
            episodes=episodes,
        )


class _Replaying:
    """Replays the episodes of a group: its records are `own`, its rows with trained tokens `samples`."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        group: ScoredGroup,
        own: Sequence[Record],
        samples: Sequence[Sample],
        weights: RunWeights,
        checkpoint: Path | None,
    ) -> None:
        self._config, self._parts, self._own, self._samples = config, parts, own, samples
        self._prompt, self._episodes, self._scores = group.group.prompt, group.group.episodes, group.scores
        self._weights = weights
        self.notes = list(parts.notes)
        if needs(config, 1).kl_in_reward:
            self.notes.append(tr("advantages are those without the KL term in the rewards"))
        self.version = max((v for s in samples for v, count in s.versions if count), default=0)
        self.directory, self.step = self._chosen(checkpoint)

    def _chosen(self, checkpoint: Path | None) -> tuple[Path | None, int | None]:
        """Return the weights that score, and their step; a note says where it is another one."""
        if checkpoint is not None:
            by_path = {path.resolve(): step for step, path in self._weights.by_step.items()}
            directory, step = checkpoint, by_path.get(checkpoint.resolve(), checkpoint_step(checkpoint.name))
        else:
            try:
                step = self._weights.nearest(self.version)
            except CoveyError as error:
                self.notes.append(tr("nothing is scored again: {error}", error=error))
                return None, None
            directory = self._weights.by_step[step]
        if step != self.version:
            words = tr(
                "the tokens are of step {version}, and the weights of another one, which makes a gap of its "
                "own; --save_steps 1 keeps each step's",
                version=self.version,
            )
            self.notes.append(words)
        return directory, step

    def episodes(self, credits: Mapping[int, RowCredit], *, draws: bool) -> Iterator[ReplayedEpisode]:
        """Replay each episode."""
        policy = None if self.directory is None else self._weights.load(self.directory)
        scored = {} if policy is None else self._scored_again(policy)
        rendering, environment = self._made_again()
        drawn = self._drawn(policy) if draws and policy is not None else {}
        for number, (episode, score) in enumerate(zip(self._episodes, self._scores, strict=True)):
            yield ReplayedEpisode(
                sibling=episode.id.sibling,
                conversation=marked(episode, self._parts.codec, _MOST_SHOWN),
                outcome=str(episode.outcome),
                failure=episode.failure,
                reward=score.total,
                parts={part.name: part.value for part in score.parts},
                advantage=credits[number].advantage,
                masked=credits[number].masked or "",
                versions=_versions(episode),
                rendering=rendering.get(number),
                environment=environment.get(number),
                scored=scored.get(number),
                drawn=drawn.get(number),
            )

    def _scored_again(self, policy: Policy) -> dict[int, Rescored]:
        """Return how far the weights are from the sampler, by the number of the episode."""
        if not self._samples:
            return {}
        parts = gaps(policy, self._samples).abs().split([s.num_trained for s in self._samples])
        of_episode: dict[int, list[Tensor]] = {}
        for sample, part in zip(self._samples, parts, strict=True):
            of_episode.setdefault(sample.sibling, []).append(part)
        gap_N = {number: torch.cat(own) for number, own in of_episode.items()}
        return {
            number: Rescored(num_tokens=len(own), mean=float(own.mean()), largest=float(own.max()))
            for number, own in gap_N.items()
        }

    def _recorded(self) -> dict[int, Recorded]:
        """Return the episodes whose rows are there, by number, with the slots that make them again."""
        prompt = self._parts.prompts.get(self._prompt.id)
        if prompt is None:
            return {}
        for number, episode in enumerate(self._episodes):
            if episode.turns and len(turns_of(episode)) != len(episode.turns):
                words = tr("the record of completion {number} has tokens of other turns", number=number)
                raise CoveyError(words)
        taken = replace(prompt, token_ids=tuple(prompt.token_ids), origin=self._prompt.origin)
        return {
            number: Recorded(
                slot=_slot(number, episode, taken), episode=episode, messages=_messages(self._own[number])
            )
            for number, episode in enumerate(self._episodes)
            if episode.sequences
        }

    def _made_again(self) -> tuple[dict[int, tuple[Difference, ...]], dict[int, tuple[Difference, ...]]]:
        """Return how the episodes differ that are rendered again, and that are answered again, by number."""
        parts, recorded = self._parts, self._recorded()
        opened: dict[int, Opened | None] = {}
        made: dict[int, Episode] = {}
        if parts.agents is not None and recorded:
            again, begun = answered_again([*recorded.values()], parts.codec, parts.agents)
            made = dict(zip(recorded, again, strict=True))
            opened = dict(zip(recorded, begun, strict=True))
        environment = {
            number: environment_differences(
                one.episode, one.messages, _of_environment(self._scores[number]), made[number]
            )
            for number, one in recorded.items()
            if number in made
        }
        if not parts.can_render:
            return {}, environment
        if self._config.multi_turn_scheduler is not None:
            # What it writes between two turns is rendered in the same go.
            return {
                number: rendering_differences(recorded[number].episode, again, parts.codec)
                for number, again in made.items()
            }, environment
        rendering = {}
        for number, one in recorded.items():
            if _has_images(one.episode):
                self.notes.append(
                    tr("completion {number} is not rendered again: answers have images", number=number)
                )
                continue
            start = _begun(one, opened.get(number), made.get(number))
            written = rendered_again(one, parts.codec, parts.writers, start)
            rendering[number] = rendering_differences(one.episode, written, parts.codec)
        return rendering, environment

    def against_drawing(self) -> list[Problem]:
        """Return why the episodes cannot be drawn again; empty where they can."""
        said: list[tuple[str, list[Fix]]] = []
        own = sorted({version for episode in self._episodes for version, _ in _versions(episode)})
        if own != [self.step]:
            kept = sorted(self._weights.by_step)
            seen = tr(
                "The weights of step {versions} sampled group {group}, these are of step {step}, and the run "
                "has those of step {kept}.",
                versions=joined(", ", map(str, own)),
                group=self._own[0]["group"],
                step="?" if self.step is None else self.step,
                kept=joined(", ", map(str, kept)),
            )
            fixes = [Fix(text=tr("keep each step's from the beginning of a run"), edits={"save_steps": 1})]
            if len(own) == 1 and own[0] in kept:
                fixes = [Fix(text=tr("leave out --checkpoint"))]
            said.append((seen, fixes))
        needs_rows = self._parts.agents is not None
        if not self._parts.can_draw or (needs_rows and not self._recorded()):
            seen = tr(
                "What samples the episodes of this run is not all here: {notes}.",
                notes=joined("; ", self._parts.notes),
            )
            said.append((seen, []))
        other = Fix(text=tr("leave out --sample"))
        return [problem("E408", "sample", seen, "", *fixes, other) for seen, fixes in said]

    def _drawn(self, policy: Policy) -> dict[int, Drawn]:
        """Draw the episodes again with the noise of their ids."""
        parts, agents = self._parts, self._parts.agents
        slots = [one.slot for one in self._recorded().values()]
        if agents is None:
            own = [(n, episode) for n, episode in enumerate(self._episodes) if episode.sequences]
            slots = [_slot(number, episode, self._prompt) for number, episode in own]
        else:
            agents = replace(agents, keeps_environments=False)
        config = self._config.model_copy(update={"use_vllm": False, "rollout_servers": ()})
        with (
            merged(policy),
            closing(engine_for(config, parts.facts, policy, LocalComm(), parts.codec.tokenizer)) as engine,
        ):
            engine.publish(iter(()), self.version)
            episodes = dict(episode_loop(slots, engine, parts.codec, agents, Activity()).episodes())
        return {
            slot.number: drawn_again(self._episodes[slot.number], episodes[index], parts.codec)
            for index, slot in enumerate(slots)
        }


def _slot(number: int, episode: Episode, prompt: Prompt) -> Slot:
    """Return the slot that draws an episode."""
    own = episode.id
    plan = CollectPlan(num_generations=1, sampling=episode.sampling, seed=own.seed, split=own.split)
    return Slot(number, 0, own.sibling, prompt, plan)


def _messages(record: Record) -> tuple[Mapping[str, Any], ...] | None:
    return tuple(record["messages"]) if "messages" in record else None


def _begun(one: Recorded, opened: Opened | None, again: Episode | None) -> Opened:
    """Return what an environment opened the recorded episode with: what it gives now where that is the same,
    and else the recorded messages."""
    now = None if again is None else again.prompt_messages
    if opened is not None and encode(now) == encode(one.messages):
        return opened
    return Opened(messages=one.messages, tools=() if opened is None else opened.tools)


def _of_environment(score: Score) -> float | None:
    return next((part.value for part in score.parts if part.name == _ENVIRONMENT), None)


def _has_images(episode: Episode) -> bool:
    """Return whether tools or environment gave images, of which a record keeps the tokens alone."""
    return any(len(s.media) > len(s.prompt_media) for s in episode.tokens)


def _versions(episode: Episode) -> tuple[tuple[int, int], ...]:
    """Return the versions of an episode's trained tokens, in order, and how many each sampled."""
    runs = (run for sequence in episode.tokens for run in sequence.versions if run[1])
    return tuple((v, sum(count for _, count in own)) for v, own in groupby(runs, key=itemgetter(0)))
