"""TrlParser reads a command line over a file, sets variables, and names what it does not know."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from covey.trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, ScriptArguments, TrlParser

KINDS = (ScriptArguments, GRPOConfig, ModelConfig)


@pytest.fixture(autouse=True)
def no_args_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parser reads a file beside the script, `script.args`, where there is one."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py")])


def yaml_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return str(file)


def test_the_command_line_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVEY_TEST_NUMBER", raising=False)
    text = "env:\n  COVEY_TEST_NUMBER: 5\noutput_dir: of/file\nlearning_rate: 2e-6\nbeta: 0.1\n"
    text += "use_peft: true\ngradient_checkpointing: false\nreward_weights: [1, 0.5]\n"
    text += "lora_target_modules: [q_proj, v_proj]\nchat_template_kwargs: {enable_thinking: false}\n"
    file = yaml_file(tmp_path, text)
    words = ["--dataset_name", "d", "--beta", "0.2", "--config", file, "--num-generations", "4"]
    script, config, model = TrlParser(KINDS).parse_args_and_config(words)
    assert (script.dataset_name, config.output_dir, config.learning_rate) == ("d", "of/file", 2e-6)
    assert (config.beta, config.num_generations, config.reward_weights) == (0.2, 4, [1, 0.5])
    assert config.gradient_checkpointing is False and config.chat_template_kwargs == {
        "enable_thinking": False
    }
    assert model.use_peft is True and model.lora_target_modules == ["q_proj", "v_proj"]
    assert os.environ.pop("COVEY_TEST_NUMBER") == "5"
    (again,) = TrlParser(GRPOConfig).parse_args_and_config([f"--config={yaml_file(tmp_path, 'beta: 0.3')}"])
    assert again.beta == 0.3 and again.use_liger_kernel is None


def test_words_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py"), "--beta", "0.4"])
    assert TrlParser(GRPOConfig).parse_args_and_config()[0].beta == 0.4
    with pytest.raises(SystemExit):
        TrlParser(GRPOConfig).parse_args_and_config(["--beta", "much"])


def test_what_nobody_knows(tmp_path: Path) -> None:
    words = ["--config", yaml_file(tmp_path, "beta: 0.1\nbeto: 0.2\n")]
    with pytest.raises(ValueError, match=r"config\.yaml has keys .*: beto\."):
        TrlParser(KINDS).parse_args_and_config(words)
    assert TrlParser(KINDS).parse_args_and_config(words, fail_with_unknown_args=False)[1].beta == 0.1
    with pytest.raises(ValueError, match="--gamma"):
        TrlParser(KINDS).parse_args_and_config(["--gamma", "1"])
    words += ["--gamma", "1"]
    *parsed, rest = TrlParser(KINDS).parse_args_and_config(words, return_remaining_strings=True)
    assert len(parsed) == 3 and rest == ["--beto", "0.2", "--gamma", "1"]
    *_, of_file, typed = TrlParser(KINDS).parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, typed) == (["--beto", "0.2"], ["--gamma", "1"])
    for text in ("- 1", "env: 3", ""):
        with pytest.raises(ValueError, match="no mapping"):
            TrlParser(KINDS).parse_args_and_config(["--config", yaml_file(tmp_path, text)])


@dataclass
class Own:
    """A class of the script, with a field that has to be given."""

    system: str
    numbers: list[int] = field(default_factory=list, metadata={"help": "Some numbers."})


@dataclass
class Reserved:
    """Its field would hide the file's name."""

    config: str = ""


def test_classes_of_the_script(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "system: be brief\nnumbers: [1, 2]\n")
    own, config = TrlParser((Own, GRPOConfig)).parse_args_and_config(["--config", file])
    assert own == Own("be brief", [1, 2]) and config == GRPOConfig()
    with pytest.raises(ValueError, match="Reserved"):
        TrlParser(Reserved)
    parser = TrlParser()
    below: Any = parser.add_subparsers().add_parser("grpo")
    below.add_argument("--x", type=int, required=True)
    assert parser.set_defaults_with_config(x=3, y=4) == ["--y", "4"]
    assert parser.parse_args(["grpo"]).x == 3


def test_a_mixture_of_a_file(tmp_path: Path) -> None:
    text = "datasets:\n  - path: json\n    data_files: a.jsonl\n  - path: b\ntest_split_size: 0.1\n"
    words = ["--config", yaml_file(tmp_path, text)]
    (mixture,) = TrlParser(DatasetMixtureConfig).parse_args_and_config(words)
    assert [part.path for part in mixture.datasets] == ["json", "b"] and mixture.test_split_size == 0.1


def test_the_help_says_what_covey_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        TrlParser((Own, *KINDS)).parse_args_and_config(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Recompute activations in the backward pass to save memory." in text
    assert "Number of completions per prompt" in text and "(default: 8)" in text and "Some numbers." in text
    # What has no effect says why, and a field of the script's own class keeps its own words.
    assert "Only the first process prints and writes the metrics." in text
    assert [a.help for a in TrlParser((Own,))._actions if a.dest == "system"] == [None]
