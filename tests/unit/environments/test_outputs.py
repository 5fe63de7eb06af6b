"""What is read of the outputs of a scheduler: which tokens of its sampled turns are trained."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from covey.environments.protocol import Ended
from covey.environments.swift.outputs import WrongOutput, read_outputs
from covey.environments.swift.protocol import RolloutInferRequest, RolloutOutput
from covey.environments.swift.trajectory import SampledTurn

FOREIGN = "response_loss_mask is 1 for tokens that the model has not sampled: they are not trained"
LOGPROBS = "rollout_logprobs are not those of the sampled tokens: those of the engine are used"
MESSAGES = [{"role": "user", "content": "Hi"}]


def turn(*ids: int) -> SampledTurn:
    return SampledTurn(f"turn {ids}", list(ids), [-0.01 * n for n in ids])


TURNS = [turn(1, 2, 3), turn(4, 5, 6), turn(1, 2, 9)]


def output(
    ids: list[list[int]], mask: Any = (), *, last: int = 2, turns: Any = TURNS, **more: Any
) -> RolloutOutput:
    response = SimpleNamespace(id=turns[last].id)
    return RolloutOutput(
        response=response, messages=MESSAGES, response_token_ids=ids, response_loss_mask=list(mask), **more
    )


def read(*outputs: RolloutOutput, turns: Any = TURNS) -> Ended:
    return read_outputs(outputs[0] if len(outputs) == 1 else [*outputs], turns, {"solution": "6"})


def masks(ended: Ended) -> list[str]:
    return ["".join(str(int(one)) for one in mask) for mask in ended.masks]


CASES: dict[str, tuple[list[list[int]], Any, list[str], list[str]]] = {
    "whole turns": ([[1, 2, 3], [4, 5, 6], [1, 2, 9]], (), ["111", "111", "111"], []),
    "no ids": ([], (), ["111", "111", "111"], []),
    "a list for a turn that goes on": (*([[1, 2, 3, 4, 5, 6], [1, 2, 9]], (), ["111", "111", "111"], []),),
    "a turn that was left out": ([[4, 5, 6]], (), ["000", "111", "000"], []),
    "a turn that was cut": ([[1, 2, 4, 5, 6]], (), ["110", "111", "000"], []),
    "the last turn, cut": ([[1, 2, 3], [4, 5]], (), ["111", "110", "000"], []),
    "text behind a cut turn": (
        *([[1, 2, 77, 78, 4, 5, 6]], [[1, 1, 0, 0, 1, 1, 1]], ["110", "111", "000"], []),
    ),
    "text that counts as trained": (
        *([[1, 2, 77, 78, 4, 5, 6]], [[1] * 7], ["110", "111", "000"], [FOREIGN]),
    ),
    "some tokens masked": ([[1, 2, 3], [4, 5, 6]], [[0, 1, 0], [1, 1, 0]], ["010", "110", "000"], []),
    "a flat list": ([4, 5, 6], [0, 1, 1], ["000", "011", "000"], []),
    # The first turn begins as the last one does.
    "a turn that another one begins like": ([[1, 2, 9]], (), ["000", "000", "111"], []),
}


@pytest.mark.parametrize("name", CASES)
def test_masks(name: str) -> None:
    ids, mask, expected, notes = CASES[name]
    ended = read(output(ids, mask))
    assert (masks(ended), list(ended.notes)) == (expected, notes)


def test_several_outputs_train_what_one_of_them_does() -> None:
    ended = read(
        output([[1, 2, 3]], [[1, 0, 0]], last=0),
        output([[1, 2, 3], [4, 5, 6]], [[0, 0, 1], [0, 1, 1]], last=1, rollout_infos={"part": 2}),
    )
    assert masks(ended) == ["101", "011", "000"]
    assert (ended.last_turns, ended.is_masked, dict(ended.infos)) == (
        (0, 1),
        True,
        {"num_turns": 3, "part": 2},
    )
    assert [dict(one) for one in ended.outputs] == [
        {"solution": "6", "messages": MESSAGES, "rollout_infos": infos} for infos in ({}, {"part": 2})
    ]


def test_a_request_may_name_one_image() -> None:
    assert RolloutInferRequest([], images="board.png").images == ["board.png"]


def test_a_mask_of_ones_masks_nothing() -> None:
    assert not read(output([[1, 2, 3], [4, 5, 6], [1, 2, 9]], [[1, 1, 1]] * 3)).is_masked
    assert not read(output([[4, 5, 6]])).is_masked


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "returned 7 instead of a RolloutOutput or a list of them"),
        ([], "returned [] instead of a RolloutOutput or a list of them"),
        (output([[1, 2, 3]], [[1, 1]]), "output 0, turn 0: response_loss_mask has 2 entries for 3 tokens"),
        (output([[1], [4]], [[1]]), "output 0: response_loss_mask has 1 lists, response_token_ids 2"),
        (output([[77, 78]]), "returned masks that leave no token of the model to train"),
        (output([[1, 2, 3]], [[0, 0, 0]]), "returned masks that leave no token of the model to train"),
        (
            output([[1, 2, 3]], rollout_infos={"total_reward": "much"}),
            "gave 'much' as total_reward, which is no finite number",
        ),
        (
            output([[1, 2, 3]], rollout_infos={"total_reward": float("nan")}),
            "gave nan as total_reward, which is no finite number",
        ),
    ],
)
def test_what_cannot_be_read_is_named(given: Any, words: str) -> None:
    with pytest.raises(WrongOutput) as error:
        read_outputs(given, TURNS, {})
    assert str(error.value) == words


def test_log_probabilities_of_others_are_noted() -> None:
    """Those of all tokens of a turn, or of its trained ones, are the engine's up to rounding."""
    ids, mask = [[1, 2, 3], [4, 5, 6]], [[0, 1, 1], [1, 1, 1]]
    trained = [[-0.02, -0.03000001], [-0.04, -0.05, -0.06]]
    every = [[-0.01, -0.02, -0.03], [-0.04, -0.05, -0.06]]
    for given in (trained, every, []):
        assert read(output(ids, mask, rollout_logprobs=given)).notes == ()
    for given in (every[:1], [[0.0] * 6], [[-0.02, -0.03], [-0.04, -0.05, -0.07]]):
        assert read(output(ids, mask, rollout_logprobs=given)).notes == (LOGPROBS,)


def test_the_reward_and_what_is_no_note() -> None:
    infos = {"total_reward": 1, "images": ["a.png"], "at": {"x": 2}}
    ended = read(output([[1, 2, 3]], rollout_infos=infos))
    assert ended.total_reward == 1.0
    assert dict(ended.infos) == {"num_turns": 3, "total_reward": 1, "at": {"x": 2}}
    assert read(output([[1, 2, 3]])).total_reward is None


def test_whatever_is_between_turns_what_is_trained_was_sampled() -> None:
    """Turns of few different tokens, so that they and what stands between them are often alike: as many
    tokens are trained as the mask says, where what stands between is masked."""
    rng = random.Random(0)
    for _ in range(500):
        turns = [turn(*(rng.randrange(4) for _ in range(rng.randrange(1, 6)))) for _ in range(3)]
        ids, mask = [], []
        for number, sampled in enumerate(turns):
            ids += sampled.token_ids
            mask += [rng.randrange(2) for _ in sampled.token_ids] if number else [1] * len(sampled.token_ids)
            between = [9] * rng.randrange(3)
            ids, mask = ids + between, mask + [0] * len(between)
        ended = read(output([ids], [mask], turns=turns), turns=turns)
        assert sum(sum(own) for own in ended.masks) == sum(mask)
        assert [len(own) for own in ended.masks] == [len(one.token_ids) for one in turns]
        assert ended.notes == ()
