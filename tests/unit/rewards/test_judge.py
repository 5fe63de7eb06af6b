"""The reward judge against a service on this machine: order, retries, bounds, and what becomes of answers
that hold no reward."""

from __future__ import annotations

import time
from typing import Any

import pytest

from covey.rewards.judge_text import (
    SEARCHED,
    BadPattern,
    NoReward,
    filled,
    placeholders,
    prompt_in_words,
    reward_in,
    reward_pattern,
    row_limit_s,
    template_text,
)
from covey.rewards.protocol import JudgedRow, TrainerState
from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import answered
from covey.types import Origin, Prompt, Status
from support.judges import Answer, Service, serving

USUAL = r"Reward:\s*([-+0-9.]+)"
KEY = "sk-a-secret-of-this-test"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def options(service: Service | str, **changes: Any) -> dict[str, Any]:
    usual = {
        "judge_base_url": service if isinstance(service, str) else service.url,
        "judge_model": "tiny-judge",
        "judge_prompt": "{completion} for {prompt}, gold {solution}",
        "judge_regex": USUAL,
        "judge_concurrency": 4,
        "judge_retries": 2,
        "judge_timeout_s": 5.0,
    }
    return usual | changes


def prompt(number: int) -> Prompt:
    return Prompt(
        id=number,
        messages=({"role": "user", "content": f"question {number}"},),
        text="",
        token_ids=(1,),
        columns={"solution": number},
        origin=Origin(epoch=0, rollout=0),
    )


def judged(
    answer: Answer, texts: list[str], delay_s: float = 0.0, **changes: Any
) -> tuple[list[JudgedRow], Service]:
    rows = [answered(prompt(i), text, 0) for i, text in enumerate(texts)]
    with (
        serving(answer, delay_s) as service,
        RewardSet.start(["judge"], options=options(service, **changes)) as rewards,
    ):
        return list(rewards.score(rows, TrainerState()).rows), service


def test_each_completion_gets_its_own_answer_in_order() -> None:
    """The first answers come last, so an order by arrival would show."""

    def answer(question: str, times: int) -> tuple[int, Any]:
        number = int(question.split()[0])
        time.sleep(0.02 * (8 - number))
        return 200, f"Let me see. Reward: 9 is too much.\nReward: {number / 2}"

    rows, service = judged(answer, [str(i) for i in range(8)], judge_concurrency=8)
    assert [row.parts[0].value for row in rows] == [i / 2 for i in range(8)]
    assert rows[3].extras["judge_answer"] == "Let me see. Reward: 9 is too much.\nReward: 1.5"
    request = next(r for r in service.requests if r["messages"][0]["content"].startswith("3 "))
    assert request["messages"] == [{"role": "user", "content": "3 for question 3, gold 3"}]
    assert (request["model"], request["temperature"]) == ("tiny-judge", 0)
    assert set(service.keys) == {f"Bearer {KEY}"}


def test_the_pattern_says_which_number_is_the_reward() -> None:
    said = "Reward: 3\nScore: 0.5"
    for pattern, value in ((USUAL, 3.0), (r"Score: ([0-9.]+)", 0.5)):
        rows, _ = judged(lambda q, n: (200, said), ["a"], judge_regex=pattern)
        assert rows[0].parts[0].value == value


def test_no_more_questions_wait_than_the_option_says() -> None:
    _, service = judged(
        lambda q, n: (200, "Reward: 1"), [str(i) for i in range(20)], 0.05, judge_concurrency=3
    )
    assert service.most_at_once == 3 and len(service.requests) == 20


def test_a_busy_service_is_asked_again() -> None:
    rows, service = judged(
        lambda q, n: (int(q.split()[0]), {}) if n < 2 else (200, "Reward: -1.5"), ["429", "500", "503"]
    )
    assert [row.parts[0].value for row in rows] == [-1.5] * 3 and len(service.requests) == 9


def test_after_the_retries_a_row_is_invalid_with_its_words_and_the_others_are_not() -> None:
    def answer(question: str, times: int) -> tuple[int, Any]:
        return (
            (429, {"error": {"message": f"slow down, {KEY}"}}) if question[0] == "b" else (200, "Reward: 1")
        )

    rows, service = judged(answer, ["a", "b", "c"], judge_retries=1)
    parts = [row.parts[0] for row in rows]
    assert [p.status for p in parts] == [Status.OK, Status.ERROR, Status.OK]
    assert "429" in parts[1].message and "slow down, ***" in parts[1].message
    assert len(service.requests) == 4 and rows[1].extras["judge_answer"] is None


def test_what_no_repetition_mends_is_not_repeated() -> None:
    texts = ["400", "401", "404"]
    rows, service = judged(lambda q, n: (int(q.split()[0]), {"error": {"message": "no"}}), texts)
    assert all(text in row.parts[0].message for text, row in zip(texts, rows, strict=True))
    assert {row.parts[0].status for row in rows} == {Status.ERROR} and len(service.requests) == 3


def test_an_answer_without_a_reward_makes_its_row_invalid() -> None:
    cases: list[tuple[Any, str]] = [
        ("I would say seven.", "finds no reward in the answer 'I would say seven.'"),
        ("Reward: 1.2.3", "finds '1.2.3', which is not a number"),
        ("Reward: +" + "9" * 400, "which is not a finite number"),
        (None, "contains no text"),
        ({"choices": []}, "is not a chat completion: IndexError"),
        ({}, "is not a chat completion: KeyError"),
        ([1], "is not a chat completion: TypeError"),
        (b"<html>", "is not a chat completion: JSONDecodeError"),
        ({"choices": [{"message": {"content": [{"text": "Reward: 1"}]}}]}, "contains no text"),
    ]
    texts = [str(i) for i in range(len(cases))]
    rows, _ = judged(lambda q, n: (200, cases[int(q.split()[0])][0]), texts)
    for row, (_, words) in zip(rows, cases, strict=True):
        part = row.parts[0]
        assert part.value is None and part.status is Status.ERROR and words in part.message


def test_the_key_is_taken_out_of_an_answer() -> None:
    rows, _ = judged(lambda q, n: (200, f"You sent {KEY}. Reward: 2"), ["a"])
    assert rows[0].parts[0].value == 2.0 and rows[0].extras["judge_answer"] == "You sent ***. Reward: 2"


def test_a_late_answer_is_none() -> None:
    began = time.monotonic()
    rows, service = judged(lambda q, n: (200, "Reward: 1"), ["a"], 2.0, judge_timeout_s=0.3, judge_retries=1)
    assert rows[0].parts[0].status is Status.ERROR and "APITimeoutError" in rows[0].parts[0].message
    assert len(service.requests) == 2 and time.monotonic() - began < 30
    assert row_limit_s(retries=1, timeout_s=0.3) == pytest.approx(8.6)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with RewardSet.start(["judge"], options=options("http://127.0.0.1:9/v1", judge_retries=0)) as rewards:
        row = rewards.score([answered(prompt(0), "a", 0)], TrainerState()).rows[0]
    assert "the judge: APIConnectionError" in row.parts[0].message


def test_a_prompt_is_filled_once_and_never_formatted() -> None:
    template = '{completion} {{completion}} {prompt.__class__} {0} {} {"a": 1} {solution}{gone}'
    assert placeholders(template) == ["completion", "0", "solution", "gone"]
    hostile = "{solution} {prompt.__class__.__init__.__globals__} {{x}} %s"
    values = {"completion": hostile, "solution": "72", "prompt": "p"}
    assert filled(template, values) == f'{hostile} {{completion}} {{prompt.__class__}}  {{}} {{"a": 1}} 72'


def test_a_prompt_in_words() -> None:
    question = {"role": "user", "content": "1+2?"}
    assert prompt_in_words([question]) == "1+2?"
    assert (
        prompt_in_words([{"role": "system", "content": "Be brief."}, question])
        == "system: Be brief.\n\nuser: 1+2?"
    )


def test_a_prompt_is_text_or_a_file(tmp_path: Any) -> None:
    (tmp_path / "ask.md").write_text("Rate {completion}.")
    assert template_text(str(tmp_path / "ask.md")) == "Rate {completion}."
    assert template_text("Rate {completion}.\n") == "Rate {completion}.\n"


@pytest.mark.parametrize("pattern", ["Reward: (", "Reward: [0-9]+", "(Reward): ([0-9]+)", "(?P<a>x)(?P<b>y)"])
def test_a_pattern_has_one_group(pattern: str) -> None:
    with pytest.raises(BadPattern):
        reward_pattern(pattern)


def test_the_last_match_counts_and_the_search_is_bounded() -> None:
    pattern = reward_pattern(USUAL)
    assert reward_in("Reward: 3 … Reward: -0.5", pattern) == -0.5
    with pytest.raises(NoReward, match="finds no reward"):
        reward_in("Reward: 3" + " " * SEARCHED, pattern)
    began = time.monotonic()
    with pytest.raises(NoReward, match="took more than 1 s"):
        reward_in("a" * 5_000 + "b", reward_pattern(r"((?:a|aa)+)+$"))
    assert time.monotonic() - began < 10
