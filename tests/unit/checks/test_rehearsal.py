"""Scripted policies: what they get of tools and rewards, and that slow ones do not hold up a run."""

from __future__ import annotations

import pytest

from covey.checks.tools import rehearsal
from covey.data.text import load_codec
from covey.quickstart.tools_task import MODEL_DIR
from covey.rewards.registry import build
from support.agents import SCHEMA, AnsweringTools, agents_for, prompt_of

USER = {"role": "user", "content": "What is 2*3?"}


def played():
    codec = load_codec(MODEL_DIR)
    prompt = prompt_of(codec, [USER], [SCHEMA])
    object.__setattr__(prompt, "columns", {"solution": "6"})
    agents = agents_for(codec, AnsweringTools(), max_tokens=400)
    return rehearsal.rehearse(prompt, "6", codec, agents, build(["accuracy"]), [1.0])


def test_each_policy_gets_what_it_did() -> None:
    found = {policy.name: policy for policy in played().policies}
    assert list(found) == ["gold", "random", "silent", "broken call", "wrong arguments", "endless"]
    assert found["gold"].reward == 1.0 and found["silent"].reward == 0.0
    assert (found["broken call"].num_calls, found["broken call"].num_failed_calls) == (1, 1)
    assert found["endless"].num_calls > 3 and found["endless"].num_failed_calls == 0
    assert played().starts_alike and "⟦<tool_call>" in played().sample


def test_a_slow_environment_is_played_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_SECONDS", -1.0)
    (first,) = played().policies
    assert (first.name, first.num_turns) == ("gold", 1)
