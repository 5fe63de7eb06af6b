"""`covey plan`: what would be trained, in text and as one object, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.cli.options import read
from support.verbs import WORDS, Run, codes_in

TASK = ["--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "accuracy"]
RATE = ["--learning_rate", "1e-4"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, dict)
    return content


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TASK, *RATE]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("model     quickstart: 0.83 M parameters, context 2048 tokens")
    assert "data      64 rows, 64 prompts used, the longest of " in "\n".join(out)
    assert "          1 epoch = 64 prompts = 8 rollouts = 8 optimizer steps; 0 prompts left over" in out


def test_warnings_and_notes_follow_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TASK, "--learning_rate", "0", "--packing"]) == 0
    out = capsys.readouterr().out
    assert codes_in(out) == ["W108", "W103"]
    assert out.index("batch     ") < out.index("W103      ")
    assert "          --learning_rate 1e-06: use the default" in out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    content = planned(capsys, *TASK, *RATE, "--val_dataset", "quickstart#8")
    assert content["options"] == read("train", [*TASK, *RATE, "--val_dataset", "quickstart#8"])[
        0
    ].config.model_dump(mode="json")
    assert content["batch"]["total_steps"] == 8
    assert content["facts"]["num_prompts"] == 64
    assert content["facts"]["eval_sets"] == [{"name": "quickstart", "num_prompts": 8}]
    assert content["notes"] == []


def test_each_built_in_task_is_read_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    name = "quickstart-tools"
    words = ["--model", name, "--dataset", f"{name}#64", "--val_dataset", f"{name}#8", *TASK[4:], *RATE]
    facts = planned(capsys, *words)["facts"]
    assert (facts["num_parameters"], facts["num_prompts"]) == (489_088, 64)
    assert facts["eval_sets"] == [{"name": name, "num_prompts": 8}]


@pytest.mark.parametrize(
    ("words", "tuner"),
    [
        ([], "full"),
        (["train"], "full"),
        (["rlhf"], "lora"),
        (["--rlhf_type", "grpo"], "lora"),
        (["--rlhf-type=grpo"], "lora"),
        (["train", "--rlhf_type", "grpo"], "lora"),
        (["rlhf", "--rlhf_type", "grpo"], "lora"),
    ],
)
def test_whose_defaults(capsys: pytest.CaptureFixture[str], words: list[str], tuner: str) -> None:
    content = planned(capsys, *words, *TASK)
    assert content["options"]["tuner_type"] == tuner
    assert ("W113" in [note["code"] for note in content["notes"]]) == (tuner == "lora")


def test_the_plan_is_of_the_run_that_train_would_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["rlhf", *TASK, "--max_steps", "5"]
    content = planned(capsys, *words)
    run = Run(monkeypatch)
    assert main(words) == 0
    assert run.got[0].config.model_dump(mode="json") == content["options"]


def test_facts_are_gathered_offline_and_closed_and_nothing_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch)
    assert main(["plan", *WORDS, "--nproc_per_node", "2"]) == 0
    assert run.order == ["facts offline", "close"]
    assert run.gathered == [2]
    assert "2 processes x 8 completions" in capsys.readouterr().out


def test_nothing_is_written_and_torch_is_not_imported(tmp_path: Path) -> None:
    program = (
        f"import sys; from covey.cli.main import main; code = main({['plan', *TASK]!r}); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
