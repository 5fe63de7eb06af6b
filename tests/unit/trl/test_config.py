"""GRPOConfig has TRL's fields and defaults, is completed as there, and is taken whole by covey."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from covey.config import from_dict
from covey.trl import GRPOConfig
from covey.trl.config import options_of
from covey.trl.fields import OTHER_DEFAULTS, Fields

TRL = json.loads(Path(__file__).parents[1].joinpath("config", "other_tools.json").read_text())["config"]
RUN = {"model": "m", "dataset": "d.jsonl", "reward_funcs": "accuracy"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, of: int, here: int) -> None:
    said = {"WORLD_SIZE": of, "RANK": rank, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
    for name, value in {**said, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


def parsed(*words: str, kind: Any = GRPOConfig) -> Any:
    return HfArgumentParser(kind).parse_args_into_dataclasses(list(words), look_for_args_file=False)[0]


def test_the_fields_are_those_of_trl_with_its_defaults() -> None:
    defaults = {
        one.name: [] if one.default_factory is list else one.default for one in dataclasses.fields(Fields)
    }
    assert defaults.keys() == TRL.keys()
    others = {name: value for name, value in defaults.items() if value != TRL[name]}
    assert others == {
        "gradient_checkpointing": None,
        "use_liger_kernel": None,
        "vllm_server_host": "127.0.0.1",
    }
    assert others.keys() <= OTHER_DEFAULTS.keys() <= TRL.keys()
    assert dataclasses.fields(GRPOConfig)[0].name == "output_dir"


def test_defaults_are_taken_by_covey_without_a_word() -> None:
    resolved = from_dict({**RUN, **vars(GRPOConfig("runs/a"))})
    assert resolved.problems == ()
    config = resolved.config
    assert config.output_dir == "runs/a" and config.generation_batch_size == 8
    assert (config.num_train_epochs, config.lr_scheduler_type, config.epsilon_high) == (3.0, "linear", 0.2)
    assert config.steps_per_generation == config.gradient_accumulation_steps == 1
    # Nobody has typed these: covey's own.
    assert config.gradient_checkpointing == config.torch_dtype == config.use_liger_kernel == "auto"
    assert from_dict({**RUN, **vars(GRPOConfig())}).config.output_dir == "trainer_output"


def test_a_mistake_is_a_problem_of_covey_and_an_unknown_field_an_error() -> None:
    config = GRPOConfig(num_generations=0, loss_type="x")
    problems = from_dict({**RUN, **vars(config)}).problems
    assert {problem.option for problem in problems} == {"loss_type"}
    with pytest.raises(TypeError, match="num_generatoins"):
        GRPOConfig(num_generatoins=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "rollout"),
    [
        ({}, (1, 8)),
        ({"gradient_accumulation_steps": 4}, (4, 32)),
        ({"steps_per_generation": 2}, (2, 16)),
        ({"generation_batch_size": 24}, (3, 24)),
        # No whole number of passes: what is wrong is said by covey.
        ({"generation_batch_size": 12}, (1, 12)),
        ({"generation_batch_size": 32, "steps_per_generation": 4}, (4, 32)),
    ],
)
def test_what_a_rollout_samples(given: dict[str, int], rollout: tuple[int, int]) -> None:
    config = GRPOConfig(**given)
    assert (config.steps_per_generation, config.generation_batch_size) == rollout


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GRPOConfig(per_device_train_batch_size=4, log_level="info")
    assert (config.world_size, config.process_index, config.local_process_index) == (1, 0, 0)
    assert config.should_save and config.should_log and config.get_process_log_level() == logging.INFO
    assert config.train_batch_size == 4 and config.device.type == ("cuda" if config.n_gpu else "cpu")
    with config.main_process_first():
        pass
    launched(monkeypatch, rank=2, of=4, here=2)
    config = GRPOConfig(per_device_train_batch_size=4, local_rank=0, log_level="info")
    assert (config.world_size, config.process_index, config.local_process_index) == (4, 2, 0)
    assert config.generation_batch_size == 16 and config.should_log and not config.should_save
    # A launcher that passes --local_rank says the same in LOCAL_RANK.
    assert "local_rank" not in options_of(config) and options_of(GRPOConfig())["local_rank"] == -1
    launched(monkeypatch, rank=3, of=4, here=2)
    assert config.get_process_log_level() == logging.WARNING


class Strategy(Enum):
    """Like transformers' IntervalStrategy."""

    STEPS = "steps"


def test_values_are_completed_as_in_trl() -> None:
    config = GRPOConfig(eval_strategy=Strategy.STEPS, logging_steps=5.0, report_to="wandb", debug="a b")  # type: ignore[arg-type]
    assert (config.eval_strategy, config.do_eval) == ("steps", True)
    assert repr(config.eval_steps) == "5" and config.report_to == ["wandb"] and config.debug == ["a", "b"]
    config = GRPOConfig("~/a", scale_rewards=False, gradient_checkpointing=True)  # type: ignore[arg-type]
    assert config.scale_rewards == "none" and config.activation_checkpointing is True
    assert config.report_to == [] and config.debug == [] and config.output_dir == str(Path.home() / "a")
    # The newer name decides.
    config = GRPOConfig(gradient_checkpointing=True, activation_checkpointing=False)
    assert config.gradient_checkpointing is config.activation_checkpointing is False
    assert GRPOConfig(vllm_importance_sampling_cap=2.0).vllm_importance_sampling_clip_max == 2.0
    config = GRPOConfig(chat_template_kwargs='{"enable_thinking": "false", "n": "2", "x": {"y": "1.5"}}')
    assert config.chat_template_kwargs == {"enable_thinking": False, "n": 2, "x": {"y": 1.5}}
    assert GRPOConfig(deepspeed="ds.json").deepspeed == "ds.json"


def test_as_a_dict() -> None:
    config = GRPOConfig("a", hub_token="secret", model_init_kwargs={"dtype": object})
    assert "secret" not in repr(config) and "secret" not in config.to_json_string()
    assert config.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert json.loads(config.to_json_string())["num_generations"] == 8


@dataclass
class WithBenchmarks(GRPOConfig):
    """As a script extends it."""

    benchmarks: list[str] = field(default_factory=list)


def test_a_subclass_adds_fields() -> None:
    config = WithBenchmarks("a", benchmarks=["gsm8k"], num_generations=4)
    assert config.to_dict()["benchmarks"] == ["gsm8k"] and config.steps_per_generation == 1
    assert "benchmarks" not in options_of(config) and options_of(config)["num_generations"] == 4
    beside = {"covey_options", "max_prompt_length", "warmup_ratio", "evaluation_strategy"}
    assert options_of(config).keys() == TRL.keys() | beside
    assert parsed("--benchmarks", "a", "b", "--beta", "0.04", kind=WithBenchmarks).benchmarks == ["a", "b"]


def test_a_parser_of_transformers_reads_each_field() -> None:
    assert parsed() == GRPOConfig()
    words = "--output_dir a --learning_rate 2e-6 --report_to wandb --reward_weights 1 0.5 --max-steps 7"
    words += " --use_vllm --no_shuffle_dataset --warmup_steps 3 --min_p 0.1 --optim_target_modules q"
    config = parsed(*words.split(), "--chat_template_kwargs", '{"a": 1}', "--bf16", "true")
    assert (config.output_dir, config.learning_rate, config.max_steps) == ("a", 2e-6, 7)
    assert (config.report_to, config.reward_weights) == (["wandb"], [1.0, 0.5])
    assert config.use_vllm is config.bf16 is True and config.shuffle_dataset is False
    assert (config.warmup_steps, config.min_p, config.chat_template_kwargs) == (3, 0.1, {"a": 1})


@pytest.mark.parametrize("name", ["gradient_checkpointing", "use_liger_kernel"])
def test_a_switch_that_is_not_set_has_the_flags_of_one_that_is(name: str) -> None:
    values = {
        (): None,
        (f"--{name}",): True,
        (f"--{name}", "false"): False,
        (f"--{name}=true",): True,
        (f"--no_{name}",): False,
        (f"--no-{name.replace('_', '-')}",): False,
    }
    assert {words: getattr(parsed(*words), name) for words in values} == values


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, covey.trl; covey.trl.GRPOConfig('a')\n"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ImportError):
        from covey.trl import SFTConfig  # type: ignore[attr-defined]  # noqa: F401


def test_options_of_covey_without_a_field() -> None:
    given = {"covey_options": {"environment_starts": "differ", "kernels": "torch"}}
    config = from_dict({**RUN, **vars(GRPOConfig("a", **given))}).config
    assert (config.environment_starts, config.kernels) == ("differ", "torch")
    (problem,) = from_dict({**RUN, **vars(GRPOConfig("a", covey_options={"kernel": "torch"}))}).problems
    assert (problem.code, problem.option) == ("E101", "kernel")


def test_fields_of_older_versions() -> None:
    given = GRPOConfig("a", max_prompt_length=256, warmup_ratio=0.1, evaluation_strategy="steps")
    assert given.eval_strategy == "steps" and given.do_eval
    resolved = from_dict({**RUN, "val_dataset": "e.jsonl", **vars(given)})
    config = resolved.config
    assert resolved.problems == ()
    assert (config.max_length, config.warmup_ratio, config.eval_strategy) == (256, 0.1, "steps")
