"""The text of an exception, as a traceback of a program prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey import plan
from covey.errors import ConfigError, GuardStop, RunFailed
from covey.types import Finding, Fix, Problem, Severity

FAULT = Problem(
    code="E401",
    option="output_dir",
    seen="runs/a already holds a run.",
    why="W",
    cause="It was started before.",
    fixes=(
        Fix(text="use another directory", edits={"output_dir": "runs/b"}),
        Fix(text="delete that run", edits={"overwrite_output_dir": True}),
        Fix(text="leave out --top_p, or `covey explain E401 --lang zh`"),
    ),
)
PLAIN = Problem(code="E102", option="top_p", seen="top_p is 1.", why="W", fixes=(Fix(text="drop --top_p"),))
WARNING = Problem(
    code="W109", option="template", seen="It is not applied.", why="W", severity=Severity.WARNING
)
NOTE = Problem(code="W108", option="fp16", seen="Nothing.", why="W", severity=Severity.NOTE)
FINDING = Finding(code="F101", seen="A gradient is nan.", why="W", cause="", fixes=PLAIN.fixes, step=3)


def test_a_problem_has_its_ways_out_as_python_has_them() -> None:
    assert str(ConfigError([FAULT, PLAIN, WARNING, NOTE])) == (
        "2 problems; nothing was started or written.\n"
        "\n"
        "E401 output_dir: runs/a already holds a run.\n"
        "  cause  It was started before.\n"
        "  type   output_dir='runs/b'\n"
        "         use another directory\n"
        "  or     overwrite_output_dir=True\n"
        "         delete that run\n"
        "  or     leave out top_p, or `covey explain E401 --lang zh`\n"
        "\n"
        "E102 top_p: top_p is 1.\n"
        "  do     drop top_p\n"
        "\n"
        "Warnings, which did not stop it:\n"
        "W109 template: It is not applied.\n"
        "\n"
        "More: covey explain E401 E102"
    )
    assert str(ConfigError([PLAIN])).startswith("1 problem; ")


def test_a_guard_says_what_was_saved() -> None:
    stop = GuardStop(FINDING)
    assert str(stop) == str(RunFailed(FINDING)) == "F101 at step 3: A gradient is nan.\n  do     drop top_p"
    stop.checkpoint = Path("run/checkpoint-2")
    assert str(stop).splitlines()[2:] == [
        "",
        "The run was saved in run/checkpoint-2.",
        "To continue, call train again with the same arguments and resume_from_checkpoint=True.",
    ]


def test_it_speaks_the_language_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_LANG", "zh")
    with pytest.raises(ConfigError) as failed:
        plan(model="quickstart", dataset="quickstart#64", reward_funcs="accuracy", temperature=0)
    assert "改为" in str(failed.value) and "temperature=1.0" in str(failed.value)
