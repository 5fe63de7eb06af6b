"""The rewards of TRL by their own arguments, on values worked out by hand; and as rewards of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.errors import ConfigError
from covey.trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from support.verbs import alone


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_accuracy() -> None:
    noted: dict[str, list[Any]] = {}
    texts = said(r"\boxed{1}", r"so \boxed{\frac{1}{2}}", r"\boxed{3}")
    solution = ["1", r"\frac{1}{3}", ""]
    values = accuracy_reward(completions=texts, solution=solution, log_extra=noted.__setitem__, prompts=[])
    assert values == [1.0, 0.0, None] and len(noted["parsed_by"]) == 3
    assert accuracy_reward([r"\boxed{0.5}"], [r"$\frac{1}{2}$"]) == [1.0]


def test_accuracy_behind_thoughts() -> None:
    texts = said(r"<think>\boxed{2}</think> \boxed{1}", r"<think>a</think> \boxed{2}", r"<think> \boxed{1}")
    assert reasoning_accuracy_reward(texts, ["1", "1", "1"]) == [1.0, 0.0, 0.0]
    other = said(r"\boxed{1} END \boxed{2} END \boxed{3}", r"<think>a</think> \boxed{3}", r"x STOP \boxed{3}")
    assert reasoning_accuracy_reward(other, ["3"] * 3, reasoning_delimiters=["END", "STOP"]) == [
        1.0,
        0.0,
        1.0,
    ]


def test_form() -> None:
    texts = said("<think>\na\n</think>\nb", "<think>a", "a<think>b</think>", "<think>a</think><think>")
    assert think_format_reward(texts) == [1.0, 0.0, 0.0, 0.0]


def test_cosine() -> None:
    texts = said(*[r"\boxed{1}"] * 4, *[r"\boxed{2}"] * 3, r"\boxed{1}")
    ids = [[0] * n for n in (0, 50, 100, 200, 0, 50, 100, 7)]
    reward = get_cosine_scaled_reward(max_len=100)
    values = reward(completions=texts, solution=["1"] * 7 + [""], completion_ids=ids)
    assert values[:7] == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5]) and values[7] is None
    other = get_cosine_scaled_reward(10, min_value_wrong=-4.0, max_value_wrong=0.0, max_value_correct=3.5)
    assert other(texts[3:5], ["1", "1"], [[0] * 5, [0] * 5]) == pytest.approx([2.0, -2.0])


def test_penalties() -> None:
    repetition = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
    # 3 pairs, all different; 4 pairs, all the same, so three of them again; no pair.
    assert repetition(completion_ids=[[1, 2, 3, 4], [5] * 5, [1]]) == [0.0, -0.75, 0.0]
    assert get_repetition_penalty_reward(max_penalty=-2.0)([[7] * 4]) == [-1.0]
    with pytest.raises(ValueError, match=r"0\.5"):
        get_repetition_penalty_reward(max_penalty=0.5)
    overlong = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    ids = [[0] * n for n in (80, 85, 90, 100, 101)]
    assert overlong(completion_ids=ids, prompts=[]) == [0.0, -0.25, -0.5, -1.0, -1.0]
    assert get_soft_overlong_punishment(100, 0)([[0] * 100, [0] * 101]) == [0.0, -1.0]


def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewards: Any, column: str = "solution") -> Any:
    alone(monkeypatch, tmp_path)
    rows = [{"question": f"What is {n}+1?", column: str(n + 1)} for n in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: Any = {"model": "quickstart", "dataset": "train.jsonl", "max_completion_length": 8}
    return covey.plan(**options, reward_funcs=rewards)


def test_a_function_is_the_built_in_reward_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = [accuracy_reward, think_format_reward, reasoning_accuracy_reward]
    plan = planned(tmp_path, monkeypatch, rewards)
    names = ["accuracy_reward", "think_format_reward", "reasoning_accuracy_reward"]
    assert plan["options"]["reward_funcs"] == names
    assert planned(tmp_path, monkeypatch, accuracy_reward)["options"]["reward_funcs"] == ["accuracy_reward"]
    # Its gold is in TRL's column alone, and it is one reward whatever it is called by.
    with pytest.raises(ConfigError, match="solution"):
        planned(tmp_path, monkeypatch, rewards, column="answer")
    with pytest.raises(ConfigError) as error:
        planned(tmp_path, monkeypatch, [accuracy_reward, "accuracy_reward"])
    assert "E307" in [problem.code for problem in error.value.problems]


def test_rewards_with_arguments_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [
        get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=2),
        get_repetition_penalty_reward(),
        get_cosine_scaled_reward(max_len=8),
    ]
    assert planned(tmp_path, monkeypatch, rewards)["options"]["reward_funcs"] == [
        "soft_overlong_punishment_reward",
        "repetition_penalty_reward",
        "cosine_scaled_reward",
    ]
