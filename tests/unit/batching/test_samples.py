"""From groups to samples: the very ids that were sampled, in group and sibling order."""

from __future__ import annotations

from dataclasses import replace

from covey.batching.samples import to_samples
from covey.types import Finish, Sample, Segment, Source


def test_a_plain_completion_written_out(scored_group):
    group = scored_group([1.0], prompt=[9, 8], lengths=[3], first=512, finishes={0: Finish.LENGTH})
    assert to_samples([group]) == [
        Sample(
            group=0,
            sibling=0,
            episode=0,
            token_ids=(9, 8, 512, 513, 514),
            prompt_length=2,
            is_trained=(False, False, True, True, True),
            sampler_logprobs=(-0.5, -513 / 1024, -514 / 1024),
            versions=(3, 3, 3),
            temperature=0.7,
            finish=Finish.LENGTH,
        )
    ]


def test_order(scored_group):
    groups = [scored_group([0.0, 1.0, 2.0], first=100), scored_group([3.0, 4.0], first=200)]
    samples = to_samples(groups)
    assert [(s.group, s.sibling) for s in samples] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [s.token_ids[2] for s in samples] == [100, 103, 106, 200, 203]


def test_a_tools_tokens_are_kept_and_not_trained(scored_group):
    group = scored_group([1.0], prompt=[9, 8], lengths=[2], first=100)
    (trajectory,) = group.group.trajectories
    segments = (
        *trajectory.segments,
        Segment(token_ids=(50, 51), source=Source.TOOL, trained=False),
        Segment(token_ids=(60,), source=Source.MODEL, trained=True, logprobs=(-0.25,), versions=(4,)),
    )
    changed = replace(group.group, trajectories=(replace(trajectory, segments=segments),))
    (sample,) = to_samples([replace(group, group=changed)])
    assert sample.token_ids == (9, 8, 100, 101, 50, 51, 60)
    assert sample.is_trained == (False, False, True, True, False, False, True)
    assert sample.sampler_logprobs == (-100 / 1024, -101 / 1024, -0.25)
    assert sample.versions == (3, 3, 4)


def test_an_empty_completion(scored_group):
    (sample,) = to_samples([scored_group([None], lengths=[0])])
    assert sample.token_ids == (9, 8)
    assert sample.is_trained == (False, False)
    assert sample.sampler_logprobs == sample.versions == ()
