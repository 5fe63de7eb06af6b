"""Values of rewards that are no finite numbers stop a run; failures of a few rows do not."""

from __future__ import annotations

import pytest

from covey.errors import GuardStop
from covey.health.rewards import RewardWatch, refuse_no_numbers
from covey.types import (
    Draw,
    Finish,
    Group,
    NoiseKey,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    ScorePart,
    Segment,
    Severity,
    Source,
    Status,
    Trajectory,
)

FINE = ScorePart(name="judge", value=0.5)
ERROR = ScorePart(name="judge", value=None, status=Status.ERROR, message="ValueError: no")


def no_number(message: str) -> ScorePart:
    return ScorePart(name="judge", value=None, status=Status.INVALID, message=message)


def group(number: int, *parts: ScorePart) -> ScoredGroup:
    """A group of one completion for each part of the reward `judge`, beside a reward that is fine."""
    prompt = Prompt(
        id=number, messages=None, text="", token_ids=(9,), columns={}, draw=Draw(epoch=0, rollout=0)
    )
    trajectories = tuple(
        Trajectory(
            segments=(
                Segment(token_ids=(9,), source=Source.PROMPT, trained=False),
                Segment(token_ids=(1,), source=Source.MODEL, trained=True, logprobs=(-1.0,), versions=(0,)),
            ),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=()),
            noise_key=NoiseKey(
                seed=0, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling
            ),
            finish=Finish.STOP,
            text=f"text {sibling}",
        )
        for sibling in range(len(parts))
    )
    scores = tuple(
        Score(total=part.value, parts=(ScorePart(name="other", value=float(i)), part), status=part.status)
        for i, part in enumerate(parts)
    )
    return ScoredGroup(
        group=Group(prompt=prompt, trajectories=trajectories, planned=len(parts)), scores=scores
    )


@pytest.mark.parametrize("message", ["gave nan for this row", "gave inf for this row", "gave a str where"])
def test_one_value_that_is_no_number_stops_at_once(message: str) -> None:
    """One of 64 completions, in any rollout: the function and the row are named."""
    good = [group(n, *[FINE] * 8) for n in range(7)]
    bad = group(41, *[FINE] * 5, no_number(message), *[FINE] * 2)
    watch = RewardWatch()
    watch.look([*good, group(40, *[FINE] * 8)], 0)
    with pytest.raises(GuardStop) as stopped:
        watch.look([*good, bad], 3)
    finding = stopped.value.finding
    assert (finding.code, finding.step) == ("F107", 3)
    assert finding.seen == f"the reward judge {message}: row 42 of the data, completion 6 of 8, 'text 5'"
    assert finding.why and finding.cause and finding.fixes


def test_an_error_or_a_timeout_of_one_row_does_not() -> None:
    late = ScorePart(name="judge", value=None, status=Status.TIMEOUT, message="gave no answer within 60 s")
    silent = ScorePart(name="judge", value=None)
    groups = [group(0, FINE, ERROR, late, silent, *[FINE] * 4)]
    refuse_no_numbers(groups, 0)
    assert [found.severity for found in RewardWatch().look(groups, 0)] == [Severity.WARNING]


def test_a_reward_that_fails_throughout_stops() -> None:
    with pytest.raises(GuardStop, match="failed on 4 of 4 completions"):
        RewardWatch().look([group(0, ERROR, ERROR), group(1, ERROR, ERROR)], 0)
