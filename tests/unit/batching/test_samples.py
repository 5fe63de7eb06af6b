"""From groups to samples: the very ids that were sampled, in group and sibling order."""

from __future__ import annotations

from dataclasses import replace

from covey.batching.samples import to_samples
from covey.types import Finish, Outcome, Sample, ScoredGroup, Source, TokenSequence
from support.groups import sequence


def test_a_plain_completion_written_out(scored_group):
    group = scored_group([1.0], prompt=[9, 8], lengths=[3], first=512, finishes={0: Finish.LENGTH})
    assert to_samples([group]) == [
        Sample(
            group=0,
            sibling=0,
            episode=0,
            tokens=TokenSequence.behind(
                2,
                token_ids=(9, 8, 512, 513, 514),
                is_trained=(False, False, True, True, True),
                logprobs=(-0.5, -513 / 1024, -514 / 1024),
                versions=((3, 3),),
            ),
            temperature=0.7,
            outcome=Outcome.TRUNCATED,
        )
    ]


def test_order(scored_group):
    groups = [scored_group([0.0, 1.0, 2.0], first=100), scored_group([3.0, 4.0], first=200)]
    samples = to_samples(groups)
    assert [(s.group, s.sibling) for s in samples] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [s.token_ids[2] for s in samples] == [100, 103, 106, 200, 203]


def with_sequences(group: ScoredGroup, *sequences: TokenSequence) -> ScoredGroup:
    """The group, whose only episode has these sequences."""
    (episode,) = group.group.episodes
    return replace(group, group=replace(group.group, episodes=(replace(episode, sequences=sequences),)))


def test_a_tools_tokens_are_kept_and_not_trained(scored_group):
    turns = (Source.MODEL, (100, 101), 3), (Source.TOOL, (50, 51), 0), (Source.MODEL, (60,), 4)
    (sample,) = to_samples([with_sequences(scored_group([1.0]), sequence((9, 8), *turns))])
    assert sample.token_ids.tolist() == [9, 8, 100, 101, 50, 51, 60]
    assert sample.is_trained.tolist() == [False, False, True, True, False, False, True]
    assert sample.sampler_logprobs.tolist() == [-1.0, -1.25, -1.5]
    assert sample.versions == ((3, 2), (4, 1)) and sample.age == 1


def test_each_sequence_of_an_episode_is_a_row(scored_group):
    first = sequence((9, 8), (Source.MODEL, (100, 101), 3), (Source.TOOL, (50,), 0))
    second = sequence((9, 8, 101, 50), (Source.MODEL, (60,), 3))
    groups = [with_sequences(scored_group([1.0]), first, second), scored_group([0.0, 1.0])]
    samples = to_samples(groups)
    assert [(s.episode, s.sequence, s.group, s.sibling) for s in samples] == [
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 0, 1, 0),
        (2, 0, 1, 1),
    ]
    assert samples[1].prompt_length == 4
    # The first rows of a group share its prompt; what a template has written anew is shared by none.
    keys = [s.prompt_key for s in samples]
    assert keys[2] == keys[3] and len(set(keys)) == 3


def test_an_episode_without_a_sequence_has_an_empty_row(scored_group):
    (sample,) = to_samples([with_sequences(scored_group([None]))])
    assert sample.token_ids.tolist() == [9, 8] and not sample.is_trained.any()


def test_ages_are_counted_from_the_policys_version(scored_group):
    groups = [scored_group([1.0, 0.0])]
    assert [s.age for s in to_samples(groups, 5)] == [2, 2]
    assert [s.age for s in to_samples(groups)] == [0, 0]


def test_an_empty_completion(scored_group):
    (sample,) = to_samples([scored_group([None], lengths=[0])])
    assert sample.token_ids.tolist() == [9, 8]
    assert sample.is_trained.tolist() == [False, False]
    assert not len(sample.sampler_logprobs) and sample.age == 0
