"""`covey mismatch`: recorded tokens are scored again, each time with one thing changed, so that what explains
the gap between sampler and learner shows.

Axes: N trained tokens of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from covey.batching.samples import to_samples
from covey.config.adapters import is_adapter
from covey.data.text import load_codec
from covey.errors import CoveyError
from covey.models.load import choose_stream
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.rollout.records import groups_of
from covey.telemetry.rollouts import list_rollouts, read_rollout
from covey.texts import tr
from covey.training.process import compute_dtype, own_device
from covey.training.rescoring import RunWeights, config_of, gaps, scorable
from covey.training.standalone import still_policy
from covey.types import Medium, Prompt, Sample, TokenSequence
from covey.types.arrays import constant_bools, ints, joined_bools, joined_ints

# A change explains a gap if this share of it is left at most; a smaller gap than this is rounding.
_EXPLAINED, _ROUNDING = 0.25, {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """How far the sampler's logprobs are from the learner's with one thing `changed` ("": nothing): mean and
    largest |difference|, and its mean with the sign of sampler less learner."""

    changed: str
    mean: float
    largest: float
    signed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Holds the scores of a rollout of `num_tokens` tokens, which the weights of `version` sampled.

    `weights` are those that scored them; `is_other_step` says that they are of another step. `scores` begin
    with that of the run's own settings. `notes` say what could not be tried. `is_rounding`: the gap is no
    larger than the dtype makes it.
    """

    num_tokens: int
    version: int
    weights: str
    is_other_step: bool
    scores: tuple[Scored, ...]
    notes: tuple[str, ...]
    is_rounding: bool

    @property
    def explained(self) -> tuple[str, ...]:
        """Return the changes that leave a quarter of the gap or less, the one that leaves least first."""
        first, *others = self.scores
        enough = [s for s in others if not self.is_rounding and s.mean <= _EXPLAINED * first.mean]
        return tuple(s.changed for s in sorted(enough, key=lambda s: s.mean))


def measure(run: Path, rollout: int) -> Mismatch:
    """Score a rollout of a run again. CoveyError where the run has none of this number, or no weights."""
    config = config_of(run)
    found = list_rollouts(run / "rollouts").get(rollout)
    if found is None or found.problem:
        raise CoveyError(
            found.problem if found else tr("{run} has no rollout {rollout}", run=run, rollout=rollout)
        )
    groups = groups_of(read_rollout(found, with_sets=True))
    samples = scorable(to_samples(groups))
    if not samples:
        raise CoveyError(tr("no token of rollout {rollout} was trained", rollout=rollout))
    version = max(v for s in samples for v, _ in _tokens(s).versions)
    return _Scoring(run, config, samples, [g.group.prompt for g in groups], version).mismatch()


class _Scoring:
    """Scores the samples of a rollout in every way that there is."""

    def __init__(
        self, run: Path, config: Config, samples: Sequence[Sample], prompts: Sequence[Prompt], version: int
    ) -> None:
        self._config, self._samples, self._prompts, self._version = config, samples, prompts, version
        self._weights = RunWeights(run, config)
        self._notes: list[str] = []

    def mismatch(self) -> Mismatch:
        """Return what was found."""
        nearest = self._weights.nearest(self._version)
        if nearest != self._version:
            words = tr(
                "the tokens are of step {version}, and the nearest weights are of step {nearest}",
                version=self._version,
                nearest=nearest,
            )
            self._notes.append(words)
        policy = self._load(self._config, nearest)
        limit = _ROUNDING[compute_dtype(self._config, policy.device)]
        scores = [self._score("", policy, self._samples), *self._with(policy)]
        scores += self._other_weights(nearest)
        return Mismatch(
            num_tokens=sum(s.num_trained for s in self._samples),
            version=self._version,
            weights=str(self._weights.by_step[nearest]),
            is_other_step=nearest != self._version,
            scores=tuple(scores),
            notes=tuple(self._notes),
            is_rounding=scores[0].mean <= limit,
        )

    def _load(self, config: Config, step: int) -> Policy:
        return self._weights.load(self._weights.by_step[step], config)

    def _with(self, policy: Policy) -> Iterator[Scored]:
        """Score with other settings of the same weights."""
        for words, samples in self._other_samples():
            yield self._score(words, policy, samples)
        if policy.head.banned:
            head = policy.head
            policy.head = replace(head, banned=())
            yield self._score(tr("no token banned"), policy, self._samples)
            policy.head = head
        if policy.stream != "padded":
            with _padded(policy):
                yield self._score(tr("rows apart, by the model's own attention"), policy, self._samples)

    def _other_samples(self) -> Iterator[tuple[str, list[Sample]]]:
        """Return changes of what is scored, each with the samples."""
        changes: list[tuple[str, Callable[[Sample], Sample]]] = []
        if any(_tokens(s).kept is not None for s in self._samples):
            changes.append((tr("without top-p, top-k and min-p"), _without_sets))
        if any(s.temperature != 1.0 for s in self._samples):
            changes.append((tr("temperature 1"), lambda s: replace(s, temperature=1.0)))
        if (others := _other_images(self._samples)) is not None:
            changes.append((tr("images of other prompts"), others))
        if (rendered := self._rendered()) is not None:
            changes.append((tr("prompts as their text is encoded now"), rendered))
        for words, change in changes:
            yield words, [change(sample) for sample in self._samples]

    def _rendered(self) -> Callable[[Sample], Sample] | None:
        """Return a change to prompts whose text has other tokens now; None where it has not."""
        if any(p.media for p in self._prompts):
            return None
        try:
            codec = load_codec(self._weights.base, chat_template=self._config.chat_template)
            ids = codec.encode([p.text for p in self._prompts])
        except (CoveyError, OSError) as error:
            self._notes.append(tr("the prompts were not encoded again: {error}", error=error))
            return None
        then = [tuple(p.token_ids) for p in self._prompts]
        if all(own in (now, codec.prefix_ids + now) for own, now in zip(then, ids, strict=True)):
            return None

        def change(sample: Sample) -> Sample:
            tokens, own = _tokens(sample), ids[sample.group]
            start = len(self._prompts[sample.group].token_ids)
            return replace(
                sample,
                tokens=replace(
                    tokens,
                    token_ids=joined_ints([ints(own), tokens.token_ids[start:]]),
                    is_trained=joined_bools([constant_bools(False, len(own)), tokens.is_trained[start:]]),
                    sources=((tokens.sources[0][0], len(own)), *tokens.sources[1:]),
                ),
            )

        return change

    def _other_weights(self, step: int) -> Iterator[Scored]:
        """Score with another dtype, other kernels, other versions, and without the adapter."""
        config = self._config
        is_low = compute_dtype(config, own_device()) == torch.bfloat16
        dtype = "float32" if is_low else "bfloat16"
        changed = [(tr("computed in {dtype}", dtype=dtype), {"torch_dtype": dtype})]
        if config.kernels != "torch":
            changed.append((tr("kernels of torch alone"), {"kernels": "torch"}))
        for words, update in changed:
            policy = self._load(config.model_copy(update=update), step)
            yield self._score(words, policy, self._samples)
        for other in sorted(self._weights.by_step, key=lambda other: abs(other - step))[1:3]:
            yield self._score(
                tr("weights of step {step}", step=other), self._load(config, other), self._samples
            )
        if is_adapter(str(self._weights.by_step[step])):
            policy = still_policy(config, self._weights.base, None)
            choose_stream(policy)
            yield self._score(tr("without the adapter"), policy, self._samples)

    def _score(self, words: str, policy: Policy, samples: Sequence[Sample]) -> Scored:
        gap_N = gaps(policy, samples)
        size_N = gap_N.abs()
        return Scored(
            changed=words, mean=float(size_N.mean()), largest=float(size_N.max()), signed=float(gap_N.mean())
        )


def _tokens(sample: Sample) -> TokenSequence:
    assert isinstance(sample.tokens, TokenSequence), "records hold the tokens of all rows"
    return sample.tokens


def _without_sets(sample: Sample) -> Sample:
    return replace(sample, tokens=replace(_tokens(sample), kept=None))


def _other_images(samples: Sequence[Sample]) -> Callable[[Sample], Sample] | None:
    """Return a change that gives each prompt the images of another one; None where no image has another of
    its size."""
    every = sorted({m for s in samples for m in _tokens(s).media}, key=lambda m: (m.grid, m.key))
    instead: dict[Medium, Medium] = {}
    for _, same in groupby(every, key=lambda m: m.grid):
        media = list(same)
        instead |= dict(zip(media, media[1:] + media[:1], strict=True)) if len(media) > 1 else {}
    if not instead:
        return None

    def change(sample: Sample) -> Sample:
        media = tuple(instead.get(m, m) for m in _tokens(sample).media)
        return replace(sample, tokens=replace(_tokens(sample), media=media))

    return change


@contextmanager
def _padded(policy: Policy) -> Iterator[None]:
    before = policy.stream
    policy.use_stream("padded")
    try:
        yield
    finally:
        policy.use_stream(before)
