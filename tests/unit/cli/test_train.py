"""`covey train` and `covey rlhf`: whose defaults hold."""

from pathlib import Path
from typing import Any

from covey.cli.main import main
from covey.config.dialect import MS_SWIFT
from support.verbs import WORDS, Run


def trained(run: Run, *words: str) -> dict[str, Any]:
    run.got.clear()
    assert main([*words]) == 0
    return run.got[0].config.model_dump()


def test_rlhf_has_those_of_ms_swift(run: Run) -> None:
    found = trained(run, "rlhf", *WORDS, "--rlhf_type", "grpo")
    assert {name: found[name] for name in MS_SWIFT} == dict(MS_SWIFT)
    assert (found["learning_rate"], found["epsilon_high"]) == (1e-4, 0.2)
    # These four are covey's.
    assert (found["per_device_train_batch_size"], found["torch_dtype"]) == (8, "auto")
    assert (found["lora_dropout"], found["save_total_limit"]) == (0.0, 2)
    assert run.got[0].sources["beta"] == "default of ms-swift"


def test_what_is_typed_overrides_both(run: Run) -> None:
    typed = ["--tuner_type", "full", "--beta", "0", "--loss_type", "dr_grpo"]
    found = trained(run, "rlhf", *WORDS, *typed)
    assert (found["tuner_type"], found["beta"], found["loss_type"]) == ("full", 0.0, "dr_grpo")
    assert found["learning_rate"] == 1e-5


def test_rlhf_type_makes_train_the_same_command(run: Run) -> None:
    """A command of ms-swift after `covey train` is the same run, also where a file says so."""
    wanted = trained(run, "rlhf", *WORDS)
    assert trained(run, "train", *WORDS, "--rlhf_type", "grpo") == wanted
    Path("c.yaml").write_text("rlhf_type: grpo\n")
    assert trained(run, "train", "c.yaml", *WORDS) == wanted
