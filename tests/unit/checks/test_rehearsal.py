"""Scripted policies: what they get of tools and rewards, and that slow ones do not hold up a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from covey.checks.tools import rehearsal
from covey.data.text import load_codec
from covey.quickstart.tools_task import MODEL_DIR
from covey.rewards.registry import build
from support.agents import SCHEMA, AnsweringTools, agents_for, prompt_of

COUNTING = """
class Counting:
    def reset(self, **row):
        self.total = 0
        return "Count."

    def add(self, by: int) -> int:
        \"\"\"Add to the total.

        Args:
            by: what to add.
        \"\"\"
        self.total += by
        return self.total

def counted(environments, **_):
    return [float(one.total) for one in environments]
"""
USER = {"role": "user", "content": "What is 2*3?"}


def played():
    codec = load_codec(MODEL_DIR)
    prompt = prompt_of(codec, [USER], [SCHEMA])
    object.__setattr__(prompt, "columns", {"solution": "6"})
    agents = agents_for(codec, AnsweringTools(), max_tokens=400)
    return rehearsal.rehearse(prompt, "6", codec, agents, build(["accuracy"]), [1.0])


def test_each_policy_gets_what_it_did() -> None:
    found = {policy.name: policy for policy in played().policies}
    names = ["gold", "random", "silent", "broken call", "wrong arguments", "crashing tool", "endless"]
    assert list(found) == names
    assert found["gold"].reward == 1.0 and found["silent"].reward == 0.0
    assert (found["broken call"].num_calls, found["broken call"].num_failed_calls) == (1, 1)
    assert (found["crashing tool"].num_calls, found["crashing tool"].num_failed_calls) == (1, 1)
    assert found["endless"].num_calls > 3 and found["endless"].num_failed_calls == 0
    assert played().starts_alike and "⟦<tool_call>" in played().sample


def test_a_slow_environment_is_played_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_SECONDS", -1.0)
    (first,) = played().policies
    assert (first.name, first.num_turns) == ("gold", 1)


def test_a_method_of_an_environment_crashes_in_the_rehearsal_alone(tmp_path: Path) -> None:
    """The environment that a reward reads is the run's own one; its method was not called."""
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)
    command = ["rehearse", "--model", "quickstart-tools", "--dataset", "quickstart-tools"]
    command += ["--environment_factory", f"{file}:Counting", "--reward_funcs", f"{file}:counted"]
    done = subprocess.run(
        [sys.executable, "-m", "covey", *command], capture_output=True, text=True, check=True
    )
    rows = {line[:16].strip(): line[16:].split() for line in done.stdout.split("\n\n")[0].splitlines()[1:]}
    assert rows["crashing tool"][:5] == ["0", "stop", "2", "1", "1"]
    assert float(rows["endless"][0]) == float(rows["endless"][3]) > 3 and rows["endless"][4] == "0"
