"""Sampling filters: values, temperatures and engines that they cannot be used with."""

from __future__ import annotations

from typing import Any

import pytest

from covey.plan.check_filters import MOST_LISTED
from covey.plan.facts import ServerFacts, VllmServeFacts
from covey.types import Problem
from support.checks import Case, assert_fixes_mend, assert_says, facts, found

VAL = {"val_dataset": ["v.jsonl"]}
SMALL = facts(model={"embedding_rows": 320})
ALL = {"top_p": 0.9, "top_k": 50, "min_p": 0.05}
CASES = (
    Case(code="E110", option="top_k", words="top_k is 1", options={"top_k": 1}),
    Case(code="E110", option="min_p", words="min_p is 1", options={"min_p": 1.0}),
    Case(code="E109", option="top_k", words="320 tokens", facts=SMALL, options={"top_k": 321}),
    Case(code="E109", option="eval_top_k", words="320", facts=SMALL, options={**VAL, "eval_top_k": 1000}),
    Case(
        code="E111",
        option="eval_min_p",
        words="min_p 0.1",
        options={**VAL, "eval_temperature": 0.0, "eval_min_p": 0.1},
    ),
    Case(
        code="E120",
        option="top_p",
        words="top_p 0.9, min_p 0.05",
        facts=facts(machine={"cuda": False}),
        options={"top_p": 0.9, "min_p": 0.05, "use_vllm": True},
    ),
    Case(
        code="E120",
        option="eval_top_p",
        words="top_p 0.5",
        facts=facts(machine={"cuda": False}, model={"embedding_rows": 50}),
        options={**VAL, "eval_top_p": 0.5, "use_vllm": True},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_seen(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


@pytest.mark.parametrize(
    "options",
    [
        ALL,
        {**ALL, "temperature_end": 0.5},
        {"top_k": 320},
        {"top_p": 1.0, "top_k": -1, "min_p": None, "use_vllm": True},
        {**ALL, "engine": "generate"},
        {**ALL, **VAL, "use_vllm": True},
        # Evaluations follow training, take the most probable token, or there are none.
        {**VAL, **ALL, "eval_temperature": 0.0},
        {**VAL, **ALL, "eval_top_p": 1.0, "eval_top_k": 1},
        {"eval_top_k": 1000, "eval_strategy": "no"},
        {"replay_rollouts": "runs/b/rollouts", "use_vllm": True, "top_p": 0.5},
    ],
)
def test_what_is_right(options: dict[str, Any]) -> None:
    assert [p for p in found(SMALL, **options) if p.code.startswith("E1")] == []


def test_filters_at_a_temperature_of_0_are_named_beside_it() -> None:
    problems = {p.code: p for p in found(temperature=0.0, min_p=0.1)}
    assert problems.keys() == {"E110", "E111"} and problems["E111"].option == "min_p"
    fix = problems["E111"].fixes[0].edits
    assert fix == {"temperature": 1.0} and found(min_p=0.1, **fix) == []


def on_servers(*servers: ServerFacts, **options: Any) -> list[Problem]:
    given = facts(machine={"cuda": False}, servers={"asked": servers})
    more = {"rollout_token_file": "a.token", "rollout_servers": [s.address for s in servers]}
    return [p for p in found(given, **more, **options) if p.code == "E120"]


def test_servers_by_their_engine() -> None:
    """The native engine's record sets; of one that does not answer something else is said."""
    native = ServerFacts(address="http://a:8000", engine="native", noise_keys=True)
    vllm = ServerFacts(address="http://b:8000", engine="vllm")
    serve = ServerFacts(address="http://b:8000", vllm=VllmServeFacts(version="0.32.0", takes_weights=True))
    silent = ServerFacts(address="http://b:8000", fault="silent", said="nothing")
    assert on_servers(native, silent, top_p=0.9) == []
    generate = ServerFacts(address="http://c:8000", engine="generate")
    assert on_servers(native, generate, top_p=0.9) == on_servers(native, vllm) == []
    assert on_servers(native, vllm, top_p=0.9, top_k=50) == []
    for other, filters in (
        (vllm, {"top_p": 0.9}),
        (vllm, {"top_p": 0.9, "top_k": MOST_LISTED + 1}),
        (serve, {"top_p": 0.9}),
        (serve, {"top_p": 0.9, "top_k": 50}),
    ):
        (problem,) = on_servers(native, other, **filters, use_vllm=True, vllm_mode="server")
        assert "top_p 0.9" in problem.seen and "http://b:8000" in problem.seen
        *listed, start, whole = problem.fixes
        assert [fix.edits for fix in listed] == ([{"top_k": 100}] if other is vllm else [])
        assert "`covey rollout --model models/tiny --host b --port 8000`" in start.text
        assert whole.edits == {name: {"top_p": 1.0, "top_k": 0}[name] for name in filters}
