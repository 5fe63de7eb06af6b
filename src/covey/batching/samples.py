"""From scored groups to samples: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from covey.types import Sample, ScoredGroup, Source, Trajectory


def to_samples(groups: Sequence[ScoredGroup], stale: Collection[int] = ()) -> list[Sample]:
    """One sample a trajectory, group by group and in sibling order; what is trained is the very ids
    sampled.

    `stale` are the numbers of groups that an earlier policy sampled.
    """
    drawn = [
        (number, sibling, trajectory)
        for number, scored in enumerate(groups)
        for sibling, trajectory in enumerate(scored.group.trajectories)
    ]
    return [
        _sample(trajectory, group=number, sibling=sibling, episode=episode, is_stale=number in stale)
        for episode, (number, sibling, trajectory) in enumerate(drawn)
    ]


def _sample(trajectory: Trajectory, *, group: int, sibling: int, episode: int, is_stale: bool) -> Sample:
    token_ids: list[int] = []
    is_trained: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for segment in trajectory.segments:
        token_ids.extend(segment.token_ids)
        is_trained.extend([segment.trained] * len(segment.token_ids))
        if segment.trained:
            logprobs.extend(segment.logprobs)
            versions.extend(segment.versions)
    first = trajectory.segments[0]
    return Sample(
        group=group,
        sibling=sibling,
        episode=episode,
        token_ids=tuple(token_ids),
        prompt_length=len(first.token_ids) if first.source is Source.PROMPT else 0,
        is_trained=tuple(is_trained),
        sampler_logprobs=tuple(logprobs),
        versions=tuple(versions),
        temperature=trajectory.sampling.temperature,
        finish=trajectory.finish,
        is_stale=is_stale,
    )
