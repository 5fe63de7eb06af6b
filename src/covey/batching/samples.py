"""From scored groups to samples: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from covey.types import Episode, Sample, ScoredGroup, SequenceSummary, TokenSequence


def to_samples(groups: Sequence[ScoredGroup], version: int | None = None) -> list[Sample]:
    """One sample a sequence, episode by episode in sibling order; what is trained is the very ids sampled.

    An episode without a sequence has an empty row. `version` is the policy's, from which ages are counted
    (None: that of the newest token).
    """
    if version is None:
        version = max((v for g in groups for e in g.group.episodes for v in e.versions), default=0)
    samples: list[Sample] = []
    episode_number = 0
    for number, scored in enumerate(groups):
        for sibling, episode in enumerate(scored.group.episodes):
            rows = [_sample(episode, s, version) for s in episode.sequences or (_nothing_of(scored),)]
            samples += [
                replace(row, group=number, sibling=sibling, episode=episode_number, sequence=index)
                for index, row in enumerate(rows)
            ]
            episode_number += 1
    return samples


def ages_of(sample: Sample) -> NDArray[np.int64]:
    """How many optimizer steps older than the policy the weights are that sampled each trained token (N,)."""
    versions, counts = zip(*sample.versions, strict=True) if sample.versions else ((), ())
    newest = sample.age + sample.tokens.oldest_version
    return newest - np.repeat(np.array(versions, np.int64), np.array(counts, np.int64))


def _sample(episode: Episode, tokens: TokenSequence | SequenceSummary, version: int) -> Sample:
    """Make a row of a sequence; its numbers within the rollout are 0."""
    return Sample(
        group=0,
        sibling=0,
        episode=0,
        tokens=tokens,
        temperature=episode.sampling.temperature,
        outcome=episode.outcome,
        age=version - tokens.oldest_version if tokens.num_trained else 0,
        owner=episode.owner if episode.sequences else None,
    )


def _nothing_of(scored: ScoredGroup) -> TokenSequence:
    """Make a sequence of the prompt, with no trained token, as every rank knows it."""
    prompt = scored.group.prompt
    size = len(prompt.token_ids)
    return TokenSequence.behind(
        size,
        token_ids=prompt.token_ids,
        is_trained=[False] * size,
        logprobs=(),
        versions=(),
        media=prompt.media,
    )
