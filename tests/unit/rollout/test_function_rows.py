"""What a rollout function may return, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import pytest

from covey.rollout.function_rows import FunctionRow, UnusableRows, rows_of

GOOD: dict[str, Any] = {
    "prompt_ids": [[1, 2], [1, 2]],
    "completion_ids": [[3, 4, 5], [6]],
    "logprobs": [[-0.5, -1.0, 0.0], [-0.25]],
}


def read(output: Any) -> list[FunctionRow]:
    return rows_of(output, 2, 2, vocab=10, context=8)


def with_first(**values: Any) -> dict[str, Any]:
    """The good rows with another value in the first of them; the second has one that is right."""
    second = {"env_mask": [1], "logprob_token_ids": [6]}
    return {**GOOD, **{n: [v, GOOD.get(n, [None, second.get(n)])[1]] for n, v in values.items()}}


def test_rows_are_read_as_they_are() -> None:
    first, second = read({**GOOD, "env_mask": [[1, 0, 1], [1]], "won": (1, 0), "level": "easy"})
    assert first == FunctionRow(
        prompt_ids=(1, 2),
        completion_ids=(3, 4, 5),
        is_trained=(True, False, True),
        logprobs=(-0.5, 0.0),
        columns={"won": 1, "level": "easy"},
    )
    assert second.columns == {"won": 0, "level": "easy"} and second.is_trained == (True,)


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": [-0.5, 0.0], "env_mask": [1, 0, 1]},
        {"logprobs": [[-0.5], [-1.0], [0.0]]},
        {"logprobs": [-0.5, -1.0, 0.0], "logprob_token_ids": [3, 4, 5]},
        {"logprobs": [[-9, -0.5], [-1.0, -9], [-9, 0.0]], "logprob_token_ids": [[9, 3], [4, 9], [9, 5]]},
    ],
    ids=["of the model", "each in a list", "with ids", "among others"],
)
def test_forms_of_logprobs(values: dict[str, Any]) -> None:
    expected = (-0.5, 0.0) if "env_mask" in values else (-0.5, -1.0, 0.0)
    assert read(with_first(**values))[0].logprobs == expected


BAD: dict[str, tuple[Any, str]] = {
    "no dict": ([GOOD], "it returned a list, not a dict with prompt_ids, completion_ids, logprobs"),
    "nothing": (None, "it returned a NoneType"),
    "missing": (
        {"prompt_ids": GOOD["prompt_ids"], "reward": 1},
        "its dict lacks completion_ids, logprobs; it has prompt_ids, reward",
    ),
    "one a group": (
        {**GOOD, "completion_ids": [[3]]},
        "completion_ids has 1 entries for 2 prompts; each prompt is given 2 times",
    ),
    "no list": ({**GOOD, "prompt_ids": 5}, "prompt_ids is a int, not a list with one entry a prompt"),
    "short column": ({**GOOD, "won": [1]}, "won has 1 values for 2 prompts"),
    "own column": ({**GOOD, "completions": "a"}, "completions cannot be a column for the rewards"),
    "empty": (with_first(completion_ids=[], logprobs=[]), "row 0: completion_ids is empty"),
    "no prompt": (with_first(prompt_ids=[]), "row 0: prompt_ids is empty"),
    "unknown id": (
        with_first(completion_ids=[3, 4, 10]),
        "row 0: completion_ids has the id 10, which is not",
    ),
    "negative id": (with_first(prompt_ids=[-1]), "row 0: prompt_ids has the id -1"),
    "words": (with_first(completion_ids=["a", "b", "c"]), "row 0: completion_ids is not a list of numbers"),
    "no ids": (with_first(completion_ids=None), "row 0: completion_ids is not a list of numbers"),
    "long": (with_first(prompt_ids=[1] * 6), "row 0: it has 9 tokens, but the model holds 8"),
    "short logprobs": (
        with_first(logprobs=[-1.0]),
        "row 0: logprobs has 1 entries, but completion_ids has 3",
    ),
    "positive": (
        with_first(logprobs=[-1, 0.5, -1]),
        "row 0: the log-probability of token 1 of the model is 0.5",
    ),
    "nan": (with_first(logprobs=[-1, -1, float("nan")]), "token 2 of the model is nan; it has to be finite"),
    "infinite": (with_first(logprobs=[float("-inf")] * 3), "token 0 of the model is -inf"),
    "no logprobs": (with_first(logprobs=None), "row 0: logprobs is a NoneType, not a list"),
    "two logprobs": (
        with_first(logprobs=[[-1, -2]] * 3),
        "row 0: of token 0 of completion_ids, 3, logprobs and",
    ),
    "other ids": (
        with_first(logprob_token_ids=[3, 9, 5]),
        "row 0: of token 1 of completion_ids, 4, logprobs and",
    ),
    "few ids": (with_first(logprob_token_ids=[3]), "row 0: logprob_token_ids has 1 entries"),
    "short mask": (with_first(env_mask=[1]), "row 0: env_mask has 1 entries, but completion_ids has 3"),
    "mask of 2": (with_first(env_mask=[2, 1, 1]), "row 0: env_mask has values other than 0 and 1"),
    "mask of 0": (with_first(env_mask=[0, 0, 0]), "row 0: env_mask is 0 for each token, so none is trained"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_is_named(name: str) -> None:
    output, words = BAD[name]
    with pytest.raises(UnusableRows) as caught:
        read(output)
    assert words in str(caught.value)
