"""Every name of TRL 1.16, transformers 5.23 and ms-swift 4.6 meets an answer, and their defaults no error.

`other_tools.json` has the arguments of GRPOTrainer, the fields of GRPOConfig and of the classes of `trl grpo`
with their defaults, and the arguments of `swift rlhf`.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from covey.config import from_dict, parse
from covey.config.foreign import INSTEAD, MOOT, REFUSED, REFUSED_PREFIXES
from covey.config.names import HINTS, look_up, nearest_option
from covey.config.resolve import faulty_options
from covey.config.take import take_mapping
from covey.options.schema import OPTIONS
from covey.types import Problem, Severity

NAMES = json.loads(Path(__file__).with_name("other_tools.json").read_text())
DEFAULTS = {**NAMES["config"], **NAMES["script"]}
# What a Python program may name beside: covey.train pops it where it is an object.
BESIDE = ("tokenizer", "compute_loss_func", "compute_metrics", "data_collator", "lr_scheduler", "no_cuda")
RUN = {"model": "m", "dataset": "d.jsonl", "reward_funcs": "accuracy"}


def of_python(**options: Any) -> list[Problem]:
    return list(take_mapping(options, "argument").problems)


@pytest.mark.parametrize("name", [*NAMES["trainer"], *DEFAULTS, *NAMES["ms_swift"], *BESIDE])
def test_every_name_has_an_answer(name: str) -> None:
    known = look_up(name)
    if known.option is None and known.moot is None and known.refused is None:
        # Of another method, and most likely the option of this meaning.
        assert name in HINTS and HINTS[name] in OPTIONS, name
        return
    assert known.option or (known.moot.words if known.moot else known.refused)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_default_of_trl_is_no_error(name: str, tmp_path: Path) -> None:
    value = DEFAULTS[name]
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({name: value}))
    for problems in (of_python(**{name: value}), parse([str(file)]).problems):
        assert all(p.code == "W108" and p.severity is Severity.NOTE for p in problems), problems
    if value is None and (look_up(name).option is None or name in ("save_total_limit", "eval_steps")):
        assert not problems and not parse([str(file)]).typed


@pytest.mark.parametrize("name", sorted({*MOOT, *REFUSED, *(f"{p}zzz" for p in REFUSED_PREFIXES)}))
def test_a_name_of_another_tool_that_is_null_says_nothing(name: str) -> None:
    assert of_python(**{name: None}) == [] and of_python(**{name: [None, None]}) == []
    assert parse([f"--{name}=none"]).problems == ()


class Strategy(Enum):
    """Like transformers' IntervalStrategy."""

    STEPS = "steps"
    NO = "no"


def whole(**changes: Any) -> dict[str, Any]:
    """What `vars(GRPOConfig(...))` has: each field, and what the class has computed."""
    computed = {
        "logging_strategy": Strategy.STEPS,
        "save_strategy": Strategy.STEPS,
        "eval_strategy": Strategy.NO,
        "output_dir": "runs/a",
        "bf16": True,
        "steps_per_generation": 1,
        "generation_batch_size": 8,
        "accelerator_config": SimpleNamespace(split_batches=False),
        "distributed_state": object(),
        "debug": [],
        "report_to": [],
        "hub_token": "<HUB_TOKEN>",
        "_n_gpu": 1,
        "_setup_devices": "cuda:0",
    }
    return {**NAMES["config"], **computed, **changes}


def test_a_whole_config_of_trl() -> None:
    resolved = from_dict({**RUN, **whole()})
    assert resolved.problems == ()
    config = resolved.config
    assert (config.num_train_epochs, config.lr_scheduler_type, config.max_completion_length) == (
        3.0,
        "linear",
        512,
    )
    assert (config.epsilon, config.epsilon_high, config.gradient_checkpointing) == (0.2, 0.2, "true")
    # What TRL does not read without vLLM is not read here either.
    assert config.rollout_servers == [] and config.vllm_importance_sampling_mode is None
    assert not [name for name in resolved.typed_names if name.startswith("vllm_")]
    assert "eval_on_start" not in resolved.typed_names
    # Where nothing is uploaded, nobody reads where to.
    hub = {"hub_model_id": "me/it", "hub_private_repo": True, "hub_always_push": True}
    assert from_dict({**RUN, **whole(**hub)}).problems == ()
    assert {p.option for p in from_dict({**RUN, **whole(**hub, push_to_hub=True)}).problems} >= {
        "push_to_hub"
    }
    # Completions without a limit are something that it asks for.
    (problem,) = from_dict({**RUN, **whole(max_completion_length=None)}).problems
    assert (problem.code, problem.option) == ("E103", "max_completion_length")
    # A field that asks for something is not lost.
    problems = from_dict({**RUN, **whole(num_beams=4, neftune_noise_alpha=5)}).problems
    assert [(p.code, p.option) for p in problems] == [
        ("E102", "neftune_noise_alpha"), ("E102", "num_beams"),
    ]  # fmt: skip


def test_vllm_of_a_whole_config() -> None:
    typed = take_mapping(whole(use_vllm=True), "argument").typed
    assert typed["vllm_mode"].value == "colocate" and "vllm_server_host" not in typed
    assert typed["vllm_importance_sampling_mode"].value == "sequence_mask"
    typed = take_mapping(whole(use_vllm=True, vllm_mode="server"), "argument").typed
    assert typed["vllm_server_host"].value == ["0.0.0.0"] and typed["vllm_server_port"].value == [8000]
    # The modes of a correction that is off say nothing.
    typed = take_mapping(whole(use_vllm=True, vllm_importance_sampling_correction=False), "argument").typed
    assert not [name for name in typed if name.startswith("vllm_importance")]
    masked = whole(use_vllm=True, vllm_importance_sampling_mode="token_mask")
    assert take_mapping(masked, "argument").typed["vllm_importance_sampling_mode"].value == "token_mask"
    # A bound has an older name.
    for cap, bound in ((None, 3.0), (1.5, 1.5)):
        resolved = from_dict({**RUN, **whole(use_vllm=True, vllm_importance_sampling_cap=cap)})
        assert not resolved.problems and resolved.config.vllm_importance_sampling_clip_max == bound
    # Alone they mean what they say.
    assert take_mapping({"vllm_server_host": "0.0.0.0"}, "argument").typed


def test_values_of_a_whole_config_that_mean_something_else() -> None:
    typed = take_mapping(whole(warmup_steps=0.1, eval_strategy="steps", eval_steps=5), "argument").typed
    assert (typed["warmup_steps"].value, typed["warmup_ratio"].value) == (0, 0.1)
    assert typed["num_generations_eval"].value == 8
    typed = take_mapping(whole(warmup_steps=3.0, eval_strategy="epoch", num_generations_eval=2), "a").typed
    assert typed["warmup_steps"].value == 3 and "warmup_ratio" not in typed
    assert typed["num_generations_eval"].value == 2
    assert "num_generations_eval" not in take_mapping(whole(), "argument").typed
    # Alone, cispo has covey's own upper end.
    assert from_dict({**RUN, **whole(loss_type="cispo")}).config.epsilon_high == 0.2
    assert from_dict({**RUN, "loss_type": "cispo"}).config.epsilon_high == 5.0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--save_strategy no", "W108"),
        ("--save_strategy steps", "W108"),
        ("--save_strategy epoch", "E102"),
        ("--gradient_checkpointing_kwargs {'use_reentrant':false}", "W108"),
        ("--gradient_checkpointing_kwargs {'preserve_rng_state':false}", "E102"),
        ("--dataset_train_split train", "W108"),
        ("--dataset_train_split test", "E102"),
        ("--dataset_test_split validation", "E102"),
        ("--use_cpu false", "W108"),
        ("--use_cpu", "E102"),
        ("--full_determinism false", "W108"),
        ("--full_determinism true", "E102"),
        ("--log_level info", "W108"),
        ("--torch_empty_cache_steps 4", "W108"),
        ("--bf16_full_eval", "W108"),
        ("--label_smoothing_factor 0.0", "W108"),
        ("--label_smoothing_factor 0.1", "E102"),
        ("--optimizer muon", "E102"),
        ("--is_binary_loss_scale true", "E102"),
        ("--galore_rank 8", "E102"),
        ("--peft_config x", "E102"),
    ],
)
def test_answers(words: str, code: str) -> None:
    (problem,) = parse(words.replace("'", '"').split()).problems
    assert problem.code == code and problem.why
    assert problem.severity is Severity.NOTE or problem.fixes[0].text.startswith("leave out --")


@pytest.mark.parametrize("name", ["save_strategy", "use_cpu", "args", "callbacks", "peft_config", "datasets"])
def test_what_to_type_instead(name: str) -> None:
    (problem,) = of_python(**{name: "x"})
    assert problem.code == "E102" and str(INSTEAD[name]) in problem.fixes[0].text


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("learning_rat", "learning_rate"),
        ("lerning_raet", "learning_rate"),
        ("steps_max", "max_steps"),
        ("size_per_device_train_batch", "per_device_train_batch_size"),
        ("num_generatoins", "num_generations"),
        ("sed", "seed"),
        # Two letters of five would be another word.
        ("beard", None),
        ("num_gpus", None),
        ("guard_everything", None),
        ("truncation", None),
        ("optimal_device", None),
        ("x", None),
        ("", None),
    ],
)
def test_only_a_close_name_is_suggested(typed: str, near: str | None) -> None:
    assert nearest_option(typed) == near


def test_nothing_is_said_about_an_option_that_a_misspelled_name_means() -> None:
    problems = from_dict({"model": "m", "datset": "d.jsonl", "reward_fnucs": "accuracy"}).problems
    assert [(p.code, p.option) for p in problems] == [("E101", "datset"), ("E101", "reward_fnucs")]
    assert {"dataset", "reward_funcs"} <= faulty_options(problems, ())
    assert "dataset" not in faulty_options(problems, ["dataset"])


def test_train_dataset_is_a_name_of_dataset() -> None:
    assert parse(["--train_dataset", "d.jsonl"]).typed["dataset"].value == ["d.jsonl"]
    (problem,) = of_python(dataset="a.jsonl", train_dataset="b.jsonl")
    assert problem.code == "E106" and "(argument train_dataset)" in problem.seen
