"""Records of episodes of schedulers: they are read again as they were, and pass the guard of turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey.batching.samples import to_samples
from covey.data.text import TextCodec, load_codec
from covey.environments.environment_host import HostedEnvironments
from covey.errors import GuardStop
from covey.health.guards.rollout import RolloutFacts
from covey.health.guards.turns import check_turns
from covey.quickstart.task import MODEL_DIR
from covey.rollout.records import groups_of, records_of, with_sets_as_text
from covey.types import (
    AnnotatedSample,
    Completion,
    Episode,
    Finish,
    Group,
    Score,
    ScoredGroup,
    ScorePart,
    Source,
    TrainSample,
    TurnId,
)
from support.agents import prompt_of
from support.schedulers import USER, play_rows, scheduling
from support.turn_hosts import Filtering

MASK = [0, 1, 0, *[1] * 9]
ROWS: dict[str, dict[str, Any]] = {
    "masked": {"kind": "Own", "mask": MASK},
    "a whole turn masked": {"kind": "Own", "mask": []},
    "goes on behind a cut": {"kind": "CutsAndAdds", "rounds": 3},
    "goes on where it stands": {"kind": "GoesOn", "rounds": 3},
    "rewritten": {"kind": "Rewrites", "rounds": 3},
    "several outputs": {"kind": "Several"},
    "the last turn alone": {"kind": "Single"},
}
FACTS = RolloutFacts(
    step=1,
    num_generations=2,
    num_episodes=2,
    scaled_by=None,
    is_over_rollout=False,
    version=0,
    makes_prompts=True,
)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR)


@pytest.fixture(scope="module")
def host() -> Iterator[HostedEnvironments]:
    with scheduling() as host:
        yield host


def group_of(
    name: str, host: HostedEnvironments, codec: TextCodec, *, trains_last: bool = False
) -> ScoredGroup:
    """Two siblings, each of whose tokens has a logprob, a version and a set of its own."""

    def say(turn: TurnId) -> Completion:
        ids = codec.encode([f"It is six, {turn.turn}."])[0]
        ids = (*ids, codec.stop_token_ids[0])
        return Completion(
            request_id=0,
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([-0.1 * n - turn.turn / 7 for n in range(len(ids))], np.float32),
            versions=((turn.turn, 5), (turn.turn + 1, len(ids) - 5)),
            finish=Finish.STOP,
            seconds=0.25,
        )

    found = play_rows(host, codec, say, [ROWS[name]], siblings=2, engine=Filtering, trains_last=trains_last)
    prompt = prompt_of(codec, [USER])
    scores = tuple(Score(total=n, parts=(ScorePart(name="r", value=n),)) for n in map(float, range(2)))
    group = Group(prompt=prompt, episodes=tuple(found.episodes), planned=2)
    return ScoredGroup(group=group, scores=scores)


def rows_of(groups: list[ScoredGroup]) -> list[TrainSample]:
    return [
        TrainSample(
            annotated=AnnotatedSample(sample=sample, old_logprob_N=None, ref_logprob_N=None),
            advantage=0.5,
            loss_mask=(True,) * sample.num_trained,
        )
        for sample in to_samples(groups)
    ]


@pytest.mark.parametrize("trains_last", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_what_was_recorded_is_read_again(
    name: str, trains_last: bool, host: HostedEnvironments, codec: TextCodec
) -> None:
    before = group_of(name, host, codec, trains_last=trains_last)
    lines = [json.dumps(with_sets_as_text(record)) for record in records_of([before])]
    (after,) = groups_of([json.loads(line) for line in lines])
    for one, other in zip(before.group.episodes, after.group.episodes, strict=True):
        assert other.sequences == one.sequences
        assert (other.turns, other.counts, other.text) == (one.turns, one.counts, one.text)
        assert any(turn.num_left_out for turn in one.turns) is (
            "masked" in name or name == "the last turn alone" or (trains_last and "several" not in name)
        )
    for groups in ([before], [after]):
        check_turns(groups, rows_of(groups), FACTS)


def test_records_say_of_each_run_who_wrote_it_and_whether_it_is_trained(
    host: HostedEnvironments, codec: TextCodec
) -> None:
    record, _ = records_of([group_of("masked", host, codec)])
    assert record["sources"][:5] == [
        *(["model", 1, 0, 0], ["model", 1, 1, 1], ["model", 1, 0, 0], ["model", 9, 1, 9]),
        ["environment", record["sources"][4][1], 0, 0],
    ]
    assert record["trained_mask"][:12] == MASK
    assert record["rollout_infos"] == {"num_turns": 2, "asked": 1}
    assert record["turns"][0]["num_left_out"] == 2
    record, _ = records_of([group_of("goes on behind a cut", host, codec)])
    assert [s[0] for s in record["sources"]] == ["model", "environment"] * 2 + ["model"]
    assert codec.written_out(record["turns"][0]["cut_ids"]) == "six, 0.<|im_end|>"


def with_mask(episode: Episode, change: slice, value: bool) -> Episode:
    """Return an episode with another mask of its first sequence, whose logprobs and versions fit it."""
    first, *others = episode.sequences
    is_trained = first.is_trained.copy()
    is_trained[first.prompt_length :][change] = value
    count = int(is_trained.sum())
    other = replace(
        first,
        is_trained=is_trained,
        logprobs=np.zeros(count, np.float32),
        versions=((0, count),),
        kept=None,
    )
    return replace(episode, sequences=(other, *others))


@pytest.mark.parametrize(
    ("change", "value"), [(slice(0, 1), True), (slice(1, 2), False), (slice(12, 14), True)]
)
def test_a_mask_that_is_not_the_schedulers_is_stopped(
    change: slice, value: bool, host: HostedEnvironments, codec: TextCodec
) -> None:
    """One that trains a token that was left out, leaves out another one, or trains what a template wrote."""
    scored = group_of("masked", host, codec)
    first, *others = scored.group.episodes
    wrong = replace(scored, group=replace(scored.group, episodes=(with_mask(first, change, value), *others)))
    assert {source for source, _ in first.sequences[0].sources} == {*Source} - {Source.TOOL}
    with pytest.raises(GuardStop) as stop:
        check_turns([wrong], rows_of([wrong]), FACTS)
    assert stop.value.finding.code == "F110"
