"""Two processes that are one vLLM: against one process, and with what befalls one of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.types import Finish
from support.engines import sampled
from support.vllm_learner import Learner, prompts, request_of
from support.vllm_ranks import on_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.multi]

# Of float32 on both sides.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two saw."""
    return on_ranks(Path(__file__).with_name("group_program.py"), tmp_path_factory.mktemp("ranks"), 2)


def test_the_first_rank_is_given_what_it_asks_for(found, start, learner: Learner) -> None:
    """The tokens that one process draws for the same requests, in logprobs as close as rounding."""
    first, second = (own["samples"] for own in found)
    asked = [request_of(p, i, stop_strings=("k><think>",)) for i, p in enumerate(prompts())]
    with start() as alone:
        alone.publish(learner.weights(), 0)
        expected = sampled(alone, asked)
    assert first["tokens"] == [list(c.token_ids) for c in expected]
    assert {c.finish for c in expected} == {Finish.STOP, Finish.LENGTH}
    for logprobs, completion in zip(first["logprobs"], expected, strict=True):
        assert logprobs == pytest.approx(completion.logprobs, abs=CLOSE)
    assert first["gap"] < CLOSE
    assert first["unasked"] == second["unasked"] == second["tokens"] == []


def test_a_request_is_ended(found) -> None:
    """The other one goes on."""
    kept, ended = found[0]["samples"]["ended"]
    assert kept[:2] == ["length", 60] and kept[2] < CLOSE
    assert ended[0] == "abort" and ended[1] < 60 and ended[2] < CLOSE


def test_what_is_held_is_read_back_over_both(found, learner: Learner) -> None:
    linear = {n for n in learner.given if n.endswith("_proj.weight")}
    for own in found:
        assert own["agrees"]
        for version in (1, 2):
            assert own["publishes"][f"agrees {version}"] and own["publishes"][f"gap {version}"] < CLOSE
            assert set(own["publishes"][f"unread {version}"]) <= linear


def test_a_load_that_fails_on_one_rank_fails_on_both(found) -> None:
    """The weights that are left are gathered on both, so that what follows is in step."""
    first, second = (own["publishes"] for own in found)
    assert second["failed"]["type"] == "ValueError" and second["failed"]["words"] == "no room left"
    assert first["failed"]["type"] == "OtherRankFailed" and "rank 1" in first["failed"]["words"]
    for own in (first, second):
        assert own["in step"] and "no weights" in own["weights"]["words"]
        assert own["agrees 4"] and own["gap 4"] < CLOSE


def test_a_signal_to_one_rank_stops_both_at_the_same_step(found) -> None:
    first, second = (own["stops"] for own in found)
    # One more, in which what was aborted comes back.
    assert first["steps"] == second["steps"] == 11
    assert first["given"] >= 1 and second["given"] == 0
    for own in found:
        assert own["stops"]["raised"]["type"] == "Stopped"
        assert own["stops"]["gap"] < CLOSE and own["stops"]["in step"]


def test_ranks_that_sample_different_tokens_are_stopped(found) -> None:
    for own in found:
        assert own["ends"]["drifted"]["code"] == "F302", own["ends"]["drifted"]


def test_the_end_of_vllm_is_not_that_of_the_run(found) -> None:
    for own in found:
        ends = own["ends"]
        assert ends["after close"] and ends["after collection"] and ends["at the end"]
        assert ends["agrees"] and ends["gap"] < CLOSE


def test_shared_memory_is_the_groups_own_and_ends_with_it(found) -> None:
    """What lay under the name that vLLM gives by itself was in nobody's way, and a process that is killed
    leaves nothing behind."""
    for own in found:
        assert own["mapped"] and own["shared"] == []
