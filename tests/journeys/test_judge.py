"""A run whose reward is what another model answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from journeys.helpers import covey, flags, rollouts, rows, small, succeed, write_jsonl
from support.judges import serving

KEY = "sk-a-secret-of-this-journey"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", rows(32))


def asked(data: Path, output: Path, url: str, **changes: Any) -> list[str]:
    judge = {
        "reward_funcs": ["judge", "format"],
        "judge_base_url": url,
        "judge_model": "tiny-judge",
        "judge_prompt": "{prompt}|{answer}|{completion}",
        "max_steps": 1,
    }
    return flags(small(data, output, **{**judge, **changes}))


def answer(question: str, times: int) -> tuple[int, Any]:
    return 200, f"Reward: {len(question.split('|', 2)[2])} {KEY}"


def test_a_run_with_a_judge_and_its_key_in_no_file(data: Path, tmp_path: Path) -> None:
    with serving(answer) as service:
        plan = succeed("plan", *asked(data, tmp_path / "run", service.url))
        assert service.requests == []
        done = succeed("train", *asked(data, tmp_path / "run", service.url))
        # Two of the trial, eight of the step.
        assert len(service.requests) == 10
    records = rollouts(tmp_path / "run")[0]
    for record in records:
        assert record["parts"][0]["name"] == "judge"
        assert record["parts"][0]["value"] == len(record["text"])
        assert record["extras"]["judge_answer"].endswith("***")
    questions = [r["messages"][0]["content"] for r in service.requests]
    assert any(q.startswith("What is ") and q.endswith(records[0]["text"]) for q in questions)
    texts = [f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()]
    assert not any(KEY.encode() in text for text in texts)
    assert KEY not in plan.out + plan.err + done.out + done.err


def test_without_the_trial_nobody_is_asked_before_the_run(data: Path, tmp_path: Path) -> None:
    with serving(answer) as service:
        succeed("train", *asked(data, tmp_path / "run", service.url, reward_trial=False))
        assert len(service.requests) == 8


def test_a_judge_that_answers_nothing_ends_the_command_in_its_trial(data: Path, tmp_path: Path) -> None:
    with serving(lambda q, n: (401, {"error": {"message": f"bad key {KEY}"}})) as service:
        done = covey("train", *asked(data, tmp_path / "run", service.url))
    assert done.code == 2 and "E316" in done.err and "401" in done.err and "OPENAI_API_KEY" in done.err
    assert KEY not in done.err and not (tmp_path / "run").exists()


def test_a_judge_that_fails_in_the_run_stops_it(data: Path, tmp_path: Path) -> None:
    with serving(lambda q, n: (200, "I would say seven.")) as service:
        done = covey("train", *asked(data, tmp_path / "run", service.url, reward_trial=False))
    assert done.code == 3 and "F107" in done.err and "judge_regex finds no reward" in done.err


def test_everything_that_is_wrong_is_said_at_once(data: Path, tmp_path: Path) -> None:
    changes = {"judge_prompt": "{promt}", "judge_regex": "Reward: (", "judge_concurrency": 0}
    done = covey("train", *asked(data, tmp_path / "run", "127.0.0.1:8000", **changes))
    assert done.code == 2
    assert all(code in done.err for code in ("E340", "E341", "E342", "E109"))


def test_options_of_a_judge_that_nobody_asks_are_said(data: Path, tmp_path: Path) -> None:
    done = covey("plan", *flags(small(data, tmp_path / "run")), "--judge_model", "m")
    assert "W108" in done.out + done.err and "judge_model" in done.out + done.err
