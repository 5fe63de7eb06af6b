"""A resumed run goes on with the prompts that come next."""

from __future__ import annotations

import pytest

from covey.checkpoint.registry import State
from covey.errors import GuardStop
from covey.training.buffer import RolloutBuffer
from covey.training.state import Progress, check_position
from support.steps import plan_of


def _upcoming(shift: int, text: int):
    return lambda rollout: [[4 * rollout + shift + i, text + i] for i in range(4)]


def _stopped(shift: int = 0, text: int = 0) -> Progress:
    progress = Progress(_upcoming(shift, text))
    progress.step, progress.rollout, progress.num_tokens = 12, 3, 700
    return progress


def test_the_same_prompts_go_on() -> None:
    resumed = Progress(_upcoming(0, 0))
    resumed.load_state(_stopped().state())
    assert (resumed.step, resumed.rollout, resumed.num_tokens) == (12, 3, 700)


@pytest.mark.parametrize(
    ("shift", "text", "words"),
    [
        (1, 0, "rows [14, 15, 16, 17], but in the stopped run they were [13, 14, 15, 16]"),
        (0, 1, "the next prompts (rows [13, 14, 15, 16]) have another text"),
    ],
    ids=["another place", "other rows"],
)
def test_other_prompts_are_named(shift: int, text: int, words: str) -> None:
    with pytest.raises(GuardStop) as stopped:
        Progress(_upcoming(shift, text)).load_state(_stopped().state())
    assert (stopped.value.finding.code, stopped.value.finding.step) == ("F126", 12)
    assert words in stopped.value.finding.seen


def test_another_order_by_the_users_word_goes_on() -> None:
    resumed = Progress(_upcoming(1, 0), may_differ=True)
    resumed.load_state(_stopped().state())
    assert resumed.rollout == 3
    assert resumed.state().json["upcoming"] == [[13 + i, i] for i in range(4)]


@pytest.mark.parametrize("done", [0, 1, 3])
def test_another_step_of_the_rollout_is_named(done: int) -> None:
    stopped, buffer = _stopped(), RolloutBuffer(plan_of())
    stopped.began = 10
    resumed = Progress(_upcoming(0, 0))
    resumed.load_state(stopped.state())
    buffer.done = 2
    check_position(resumed, buffer)
    buffer.done = done
    with pytest.raises(GuardStop) as wrong:
        check_position(resumed, buffer)
    assert (wrong.value.finding.code, wrong.value.finding.step) == ("F126", 12)
    assert (
        f"2 steps of the rollout were taken, but the resumed run would continue after {done}"
        in wrong.value.finding.seen
    )


def test_a_checkpoint_that_does_not_say_where_its_rollout_began_is_taken() -> None:
    values = dict(_stopped().state().json)
    del values["began"]
    resumed = Progress(_upcoming(0, 0))
    resumed.load_state(State(json=values))
    check_position(resumed, RolloutBuffer(plan_of()))


def test_a_stream_says_nothing_beforehand() -> None:
    resumed = Progress()
    resumed.load_state(_stopped().state())
    assert resumed.rollout == 3
    Progress(_upcoming(0, 0)).load_state(Progress().state())
