"""The command line and the YAML file: spellings, lists, switches, aliases, and ways to get them wrong."""

from pathlib import Path
from typing import Any

import pytest

from covey.config import Parsed, parse
from covey.types import Problem, Severity


def values(*argv: str) -> dict[str, Any]:
    parsed = parse(argv)
    assert parsed.problems == ()
    return {name: typed.value for name, typed in parsed.typed.items()}


def one(parsed: Parsed) -> Problem:
    (problem,) = parsed.problems
    return problem


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--reward_funcs accuracy format", {"reward_funcs": ["accuracy", "format"]}),
        ("--reward-funcs accuracy", {"reward_funcs": ["accuracy"]}),
        ("--Reward_Weights 1 0.5", {"reward_weights": [1.0, 0.5]}),
        ("--reward_funcs=accuracy format", {"reward_funcs": ["accuracy", "format"]}),
        ("--seed 1 --seed 2", {"seed": 2}),
        ("--dataset a.csv b.csv --dataset c.csv", {"dataset": ["c.csv"]}),
        ("--max_steps -1", {"max_steps": -1}),
        ("--beta -.5e-3", {"beta": -0.0005}),
        ("--max_steps=-1", {"max_steps": -1}),
        ("--learning_rate 1e-6", {"learning_rate": 1e-6}),
        ("--max_steps 1e3", {"max_steps": 1000}),
        ("--disable_dropout", {"disable_dropout": True}),
        ("--disable_dropout false", {"disable_dropout": False}),
        ("--no_disable_dropout", {"disable_dropout": False}),
        ("--gradient_checkpointing", {"gradient_checkpointing": "true"}),
        ("--no_gradient_checkpointing", {"gradient_checkpointing": "false"}),
        ("--gradient_checkpointing False", {"gradient_checkpointing": "false"}),
        ("--gradient-checkpointing=selective", {"gradient_checkpointing": "selective"}),
        ("--use_liger_kernel", {"use_liger_kernel": "true"}),
        ("--attn_implementation flash_attention_2", {"attn_impl": "flash_attn"}),
        ("--attn_impl flash_attention_3", {"attn_impl": "flash_attn"}),
        ("--attn_implementation flex_attention", {"attn_impl": "flex"}),
        ("--attn_impl SDPA", {"attn_impl": "sdpa"}),
        ("--no-dataset-shuffle --seed 3", {"dataset_shuffle": False, "seed": 3}),
        ("--save_only_model --seed 3", {"save_only_model": True, "seed": 3}),
        ("--scale_rewards true", {"scale_rewards": "group"}),
        ("--scale_rewards False", {"scale_rewards": "none"}),
        ("--loss_type DAPO", {"loss_type": "dapo"}),
        ("--rollout_log 5", {"rollout_log": 5}),
        ("--rollout_log none", {"rollout_log": "none"}),
        ("--resume_from_checkpoint", {"resume_from_checkpoint": "latest"}),
        ("--resume_from_checkpoint true", {"resume_from_checkpoint": "latest"}),
        ("--resume_from_checkpoint auto", {"resume_from_checkpoint": "auto"}),
        ("--resume_from_checkpoint Runs/A", {"resume_from_checkpoint": "Runs/A"}),
        ("--max_length none", {"max_length": None}),
        ("--delta null", {"delta": None}),
        # names of TRL and ms-swift
        ("--model_name_or_path m", {"model": "m"}),
        ("--dtype fp32", {"torch_dtype": "float32"}),
        ("--torch_dtype bf16", {"torch_dtype": "bfloat16"}),
        ("--torch_dtype torch.bfloat16", {"torch_dtype": "bfloat16"}),
        ("--bf16", {"torch_dtype": "bfloat16"}),
        ("--bf16 true", {"torch_dtype": "bfloat16"}),
        ("--bf16 false", {"torch_dtype": "float32"}),
        ("--no_bf16", {"torch_dtype": "float32"}),
        ("--dataset_name a.jsonl b.jsonl", {"dataset": ["a.jsonl", "b.jsonl"]}),
        ("--max_prompt_length 512", {"max_length": 512}),
        ("--max_new_tokens 64", {"max_completion_length": 64}),
        ("--overlong_filter true", {"mask_truncated_completions": True}),
        ("--shuffle_dataset false", {"dataset_shuffle": False}),
        ("--train_type full", {"tuner_type": "full"}),
        ("--sft_type lora", {"tuner_type": "lora"}),
        ("--use_peft", {"tuner_type": "lora"}),
        ("--no_use_peft", {"tuner_type": "full"}),
        ("--lora_r 4", {"lora_rank": 4}),
        ("--lora_target_modules q_proj v_proj", {"target_modules": ["q_proj", "v_proj"]}),
        ("--log_completions", {"log_completions": 8}),
        ("--log_completions 3", {"log_completions": 3}),
        ("--report_to wandb swanlab", {"report_to": ["wandb", "swanlab"]}),
        ("--enable_thinking false", {"enable_thinking": False}),
        ("--eval_strategy no", {"eval_strategy": "no"}),
    ],
)
def test_spellings(words: str, expected: dict[str, Any]) -> None:
    assert values(*words.split()) == expected


@pytest.mark.parametrize(
    ("typed", "nearest", "edits"),
    [
        ("--num_generation", "num_generations", {"num_generations": 4}),
        ("--num-genrations", "num_generations", {"num_generations": 4}),
        ("--lr", "learning_rate", {"learning_rate": 4.0}),
        ("--maxsteps", "max_steps", {"max_steps": 4}),
        ("--batch_size", "per_device_train_batch_size", {"per_device_train_batch_size": 4}),
        ("--model_nam_or_path", "model", {"model": "4"}),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(typed: str, nearest: str, edits: dict[str, Any]) -> None:
    problem = one(parse([typed, "4"]))
    assert problem.code == "E101"
    assert nearest in problem.cause
    assert problem.fixes[0].edits == edits


@pytest.mark.parametrize(
    "words",
    [
        "--dataloader_num_workers 4",
        "--torch_compile false",
        "--no_push_to_hub",
        "--padding_free",
        "--gc_collect_after_offload true",
        "--ddp_backend nccl",
        "--num_beams 1",
    ],
)
def test_names_that_say_what_is_done_anyway_are_a_note(words: str) -> None:
    problem = one(parse(words.split()))
    assert (problem.code, problem.severity) == ("W108", Severity.NOTE)
    assert problem.why


def test_json_options() -> None:
    parsed = parse(["--columns", '{"q": "question"}', "--chat_template_kwargs", '{"depth": 2}'])
    assert parsed.typed["columns"].value == {"q": "question"}
    assert parsed.typed["chat_template_kwargs"].value == {"depth": 2}
    for words in ("{q: question", "[1]", '{"q": 3}'):
        assert one(parse(["--columns", words])).code == "E103"


@pytest.mark.parametrize(
    ("words", "code", "option"),
    [
        ("--num_generations abc", "E103", "num_generations"),
        ("--num_generations 2.5", "E103", "num_generations"),
        ("--learning_rate nan", "E103", "learning_rate"),
        ("--learning_rate inf", "E103", "learning_rate"),
        ("--seed", "E103", "seed"),
        ("--max_length", "E103", "max_length"),
        ("--reward_funcs", "E103", "reward_funcs"),
        ("--disable_dropout maybe", "E103", "disable_dropout"),
        ("--reward_weights 1 x", "E103", "reward_weights"),
        ("--rollout_log some", "E103", "rollout_log"),
        ("--loss_type dapp", "E104", "loss_type"),
        ("--fp16", "E102", "fp16"),
        ("--torch_dtype int8", "E104", "torch_dtype"),
        ("--seed 1 2", "E108", "--seed"),
        ("--save_only_model a.yaml", "E108", "--save_only_model"),
        ("--no_save_only_model x", "E108", "--no_save_only_model"),
        ("--dtype bf16 --torch_dtype fp32", "E106", "torch_dtype"),
        ("absent.yaml", "E107", "config file"),
        ("-x 3", "E101", "x"),
    ],
)
def test_faults(words: str, code: str, option: str) -> None:
    problem = one(parse(words.split()))
    assert (problem.code, problem.option) == (code, option)
    assert problem.seen and problem.why and problem.fixes


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_grouped_or_flat_and_flags_over_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml", "seed: 1\nmodel:\n  model: m\n  dtype: bf16\noptimizer:\n  learning-rate: 1e-6\n"
    )
    parsed = parse([path, "--seed", "7"])
    assert parsed.problems == ()
    assert {name: (t.value, t.source) for name, t in parsed.typed.items()} == {
        "seed": (7, "flag --seed"),
        "model": ("m", f"{path}: model.model"),
        "torch_dtype": ("bfloat16", f"{path}: model.dtype"),
        "learning_rate": (1e-6, f"{path}: optimizer.learning-rate"),
    }


def test_null_in_a_file_is_not_typed(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "seed: ~\nreward_weights:\nmax_length: ~\nmin_p: ~\ncallbacks: []\n")
    assert values(path) == {"max_length": None}


def test_a_file_can_also_be_a_flag(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml", "model: m\nreward_funcs: accuracy\nresume_from_checkpoint: true\nrun:\n"
    )
    assert values("--seed", "7", "--config", path) == {
        "model": "m", "reward_funcs": ["accuracy"], "resume_from_checkpoint": "latest", "seed": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("seed: 1\nseed: 2\n", "E107", "appears twice"),
        ("- seed\n", "E107", "not a mapping"),
        ("seed: [1\n", "E107", "line 2"),
        ("run:\n  seed: 1\nseed: 2\n", "E106", "seed has two values: 1"),
        ("optimiser:\n  seed: 1\n", "E101", "optimiser"),
        ("run:\n  sed: 1\n", "E101", "sed"),
        ("vllm_server_dtype: h\n", "E102", "vllm_server_dtype"),
        ("seed: true\n", "E103", "True"),
        ("seed: {a: 1}\n", "E103", "seed"),
    ],
)
def test_faults_of_a_file(tmp_path: Path, text: str, code: str, words: str) -> None:
    problem = one(parse([write(tmp_path / "c.yaml", text)]))
    assert problem.code == code
    assert words in problem.seen
