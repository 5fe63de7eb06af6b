"""An option is added by its declaration alone: whatever else speaks of options is made from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import covey

ADDED = """
    snow_depth: float = option(
        0.5,
        "How deep the snow is.",
        gt=0,
        le=2,
        why="Snow is that deep.",
        trl="0.7",
        swift="0.9",
        rlhf=0.9,
        names=("snow_height",),
        hints=("ice",),
        words={"deep": 2.0},
        resume="free",
        read_if=only_with("engine", "generate"),
    )
"""

SAID = r"""
import json, sys
from pathlib import Path
from covey.cli.help import help_text
from covey.cli.options import read
from covey.config.file import read_file
from covey.config.flags import parse
from covey.config.names import look_up
from covey.config.reference import markdown
from covey.options.schema import Config, group_of
from covey.checks.effect import unread
from covey.checks.run.judge import protected_changes
from covey.checks.values import value_problems

Path("run.yaml").write_text("sampling:\n  snow_depth: 1.25\n")
run = ["--model", "quickstart", "--dataset", "quickstart", "--reward_funcs", "accuracy"]


def typed(*words):
    parsed = parse([*run, *words])
    assert not parsed.problems, parsed.problems
    return parsed.typed["snow_depth"].value


def config(verb, *words):
    return read(verb, [*run, *words])[0].config


json.dump({
    "flag": [typed("--snow-depth", "1"), typed("--SNOW_height=1.5"), typed("--snow_depth", "deep")],
    "yaml": read_file("run.yaml").typed["snow_depth"].value,
    "hint": look_up("ice").nearest,
    "group": group_of("snow_depth"),
    "help": "\n".join(l for l in help_text("train").splitlines() if "snow" in l),
    "docs": [l for l in markdown().splitlines() if "snow" in l],
    "default": [config("train").snow_depth, config("rlhf").snow_depth],
    "range": [
        (p.code, p.seen, [f.edits for f in p.fixes])
        for p in value_problems(config("train", "--snow_depth", "3"))
    ],
    "resume": len(protected_changes(config("train"), [("snow_depth", 0.5, 1.0)])),
    "unread": list(unread(config("train", "--snow_depth", "1"), {"snow_depth"})),
    "read": list(unread(config("train", "--snow_depth", "1", "--engine", "generate"), {"snow_depth"})),
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a copy of covey with one more option says of it."""
    folder = tmp_path_factory.mktemp("copy")
    copy = folder / "src" / "covey"
    shutil.copytree(Path(covey.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    group = copy / "options" / "rollout.py"
    text = group.read_text(encoding="utf-8").rstrip()
    text = text.replace("import Options,", "import only_with, Options,", 1)
    group.write_text(text + "\n" + ADDED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", SAID],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_flags_and_files_take_it_under_all_its_names(said):
    assert said["flag"] == [1.0, 1.5, 2.0] and said["yaml"] == 1.25
    assert said["hint"] == "snow_depth" and said["group"] == "sampling"


def test_help_and_the_page_of_options_have_it(said):
    assert "--snow_depth" in said["help"] and "snow_height" in said["help"]
    assert said["docs"] == [
        "| `snow_depth` | 0.5 | 0.7 | **0.9** | How deep the snow is. |",
        "| `snow_height` | `snow_depth` |",
        "| `snow_depth` | `deep` | 2 |",
    ]


def test_both_commands_have_its_default(said):
    assert said["default"] == [0.5, 0.9]


def test_its_range_its_rule_for_a_resume_and_its_condition_hold(said):
    ((code, seen, edits),) = said["range"]
    assert code == "E109" and "above 0 and at most 2" in seen and edits == [{"snow_depth": 0.5}]
    assert said["resume"] == 0
    assert said["unread"] == ["snow_depth"] and said["read"] == []
