"""Derived values, where each value came from, and the default directory."""

from pathlib import Path
from typing import Any

import pytest

from covey.config import Resolved, from_dict, parse, resolve, to_yaml
from covey.config.quickstart import QUICKSTART, quickstart_typed

BASE: dict[str, Any] = {"model": "models/tiny", "dataset": "data/sums.jsonl", "reward_funcs": "accuracy"}


def resolved(world_size: int = 1, **options: Any) -> Resolved:
    return from_dict({**BASE, **options}, world_size)


@pytest.mark.parametrize(
    ("world_size", "options", "expected"),
    [
        (1, {}, (8, 8, 8, 64)),
        (2, {}, (8, 4, 4, 64)),
        (3, {}, (8, 2, 2, 48)),
        (16, {}, (8, 1, 1, 128)),
        (1, {"num_generations": 4}, (8, 8, 8, 64)),
        (1, {"per_device_train_batch_size": 4}, (4, 1, 1, 4)),
        (2, {"per_device_train_batch_size": 4}, (4, 1, 1, 8)),
        (1, {"gradient_accumulation_steps": 2}, (8, 2, 2, 16)),
        (1, {"steps_per_generation": 4}, (8, 1, 4, 32)),
        (2, {"generation_batch_size": 64}, (8, 1, 4, 64)),
        (1, {"generation_batch_size": 64, "gradient_accumulation_steps": 2}, (8, 2, 8, 64)),
        (1, {"generation_batch_size": 50}, (8, 1, 6, 50)),
        (1, {"generation_batch_size": 64, "steps_per_generation": 8}, (8, 1, 8, 64)),
    ],
)
def test_batch(world_size: int, options: dict[str, int], expected: tuple[int, ...]) -> None:
    config = resolved(world_size, **options).config
    assert expected == (
        config.per_device_train_batch_size, config.gradient_accumulation_steps, config.steps_per_generation,
        config.generation_batch_size,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "high"),
    [
        ({}, 0.28),
        ({"epsilon": 0.1}, 0.1),
        ({"epsilon": 0.2}, 0.2),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, 0.3),
    ],
)
def test_epsilon_high(options: dict[str, float], high: float) -> None:
    assert resolved(**options).config.epsilon_high == high


GYM: dict[str, Any] = {"multi_turn_scheduler": "gym_scheduler"}
OWN: dict[str, Any] = {"multi_turn_scheduler": "doubts"}


@pytest.mark.parametrize(
    ("options", "rewards"),
    [
        (OWN, ["accuracy"]),
        (GYM, ["accuracy", "environment"]),
        ({**OWN, "gym_env": "lake"}, ["accuracy", "environment"]),
        ({**OWN, "use_gym_env": True}, ["accuracy", "environment"]),
        ({**GYM, "use_gym_env": False}, ["accuracy"]),
        ({"multi_turn_scheduler": "openenv_scheduler"}, ["accuracy", "environment"]),
        ({**GYM, "reward_funcs": ["environment", "format"]}, ["environment", "format"]),
        ({"gym_env": "lake", "use_gym_env": True}, ["accuracy"]),
    ],
)
def test_a_scheduler_brings_its_reward(options: dict[str, Any], rewards: list[str]) -> None:
    """Behind the others; its weight is 1 where none is typed."""
    found = resolved(**options)
    assert found.config.reward_funcs == rewards
    assert found.config.weights == [1.0] * len(rewards)
    is_added = "environment" in rewards and "reward_funcs" not in options
    assert (found.sources["reward_funcs"] == "with the reward of the scheduler") is is_added


def test_a_scheduler_may_be_the_only_reward() -> None:
    found = from_dict({"model": "m", "dataset": "d.jsonl", **GYM})
    assert (found.config.reward_funcs, found.problems) == (["environment"], ())


@pytest.mark.parametrize(
    ("options", "scope"),
    [
        (GYM, "total"),
        ({**GYM, "max_turns": 3}, "per_round"),
        ({**GYM, "max_turns": 3, "completion_length_limit_scope": "total"}, "total"),
        ({"tools": ["t.py:add"], "max_turns": 3}, "total"),
    ],
)
def test_a_scheduler_with_a_limit_of_turns_limits_each(options: dict[str, Any], scope: str) -> None:
    """As ms-swift does; without a limit of turns an episode could go on for ever."""
    config = resolved(**options).config
    assert config.completion_length_limit_scope == scope
    assert config.is_limited_by_turn is (scope == "per_round")


def test_seeds_weights_and_sources() -> None:
    found = resolved(seed=7, reward_funcs=["accuracy", "format"], dtype="bf16")
    assert found.config.data_seed == 7
    assert found.config.reward_weights == [1.0, 1.0]
    assert found.config.torch_dtype == "bfloat16"
    assert found.sources["seed"] == "argument"
    assert found.sources["data_seed"] == "derived from seed"
    assert found.sources["beta"] == "default"
    assert found.sources["steps_per_generation"] == "derived from gradient_accumulation_steps"
    assert found.sources["output_dir"] == "derived from model and dataset"
    assert found.typed_names == {"model", "dataset", "reward_funcs", "seed", "torch_dtype"}
    assert found.problems == ()
    assert list(found.sources) == list(type(found.config).model_fields)


def test_the_default_directory_counts_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved().config.output_dir == "runs/tiny-sums-001"
    (tmp_path / "runs/tiny-sums-001").mkdir(parents=True)
    (tmp_path / "runs/tiny-sums-002").mkdir()
    assert resolved().config.output_dir == "runs/tiny-sums-003"
    assert resolved(model="quickstart", dataset="quickstart").config.output_dir == "runs/quickstart-001"
    assert resolved(resume_from_checkpoint=True).config.output_dir == "runs/tiny-sums-002"
    assert resolved(model="other", resume_from_checkpoint="auto").config.output_dir == "runs/other-sums-001"
    assert resolved(resume_from_checkpoint="a/b/checkpoint-40/").config.output_dir == "a/b"
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tiny-sums-001", "tiny-sums-002"]


def test_missing_and_faulty_options_leave_a_configuration_to_check() -> None:
    found = from_dict({"num_generations": "many", "temperatur": 1, "model": "m"}, 1)
    assert {p.code: p.option for p in found.problems} == {
        "E103": "num_generations", "E101": "temperatur", "E105": "reward_funcs",
    }  # fmt: skip
    assert [p.option for p in found.problems if p.code == "E105"] == ["dataset", "reward_funcs"]
    assert (found.config.num_generations, found.config.dataset) == (8, [])


def test_an_option_without_a_value_is_not_also_missing() -> None:
    parsed = parse(["--model", "--dataset", "a.csv", "--reward_funcs", "accuracy"])
    assert [p.code for p in resolve(parsed.typed, 1, parsed.problems).problems] == ["E103"]


def test_quickstart_is_under_what_is_typed() -> None:
    parsed = parse(["--learning_rate", "1e-3"])
    found = resolve(quickstart_typed(parsed.typed), 1)
    assert found.problems == ()
    assert found.config.learning_rate == 1e-3
    assert found.sources["learning_rate"] == "flag --learning_rate"
    assert found.sources["max_steps"] == "quickstart"
    assert found.config.generation_batch_size == 64
    assert {name: getattr(found.config, name) for name in QUICKSTART if name != "learning_rate"} == {
        name: value for name, value in QUICKSTART.items() if name != "learning_rate"
    }


def again(tmp_path: Path, first: Resolved, *argv: str, world_size: int = 1) -> Resolved:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(first), encoding="utf-8")
    parsed = parse([str(path), *argv])
    return resolve(parsed.typed, world_size, parsed.problems)


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        ("--seed 7", {"seed": 7, "data_seed": 7}),
        ("--epsilon 0.1", {"epsilon": 0.1, "epsilon_high": 0.1}),
        ("--reward_funcs accuracy format",
         {"reward_funcs": ["accuracy", "format"], "reward_weights": [1.0, 1.0]}),
        ("--gradient_accumulation_steps 2",
         {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "generation_batch_size": 16}),
        ("--per_device_train_batch_size 4", {"per_device_train_batch_size": 4, "generation_batch_size": 32}),
        ("--steps_per_generation 16", {"steps_per_generation": 16, "generation_batch_size": 128}),
        ("--generation_batch_size 128", {"steps_per_generation": 16, "generation_batch_size": 128}),
        ("--num_generations 4", {"num_generations": 4}),
        ("--max_completion_length 100",
         {"max_completion_length": 100, "cosine_max_len": 100, "soft_max_length": 100,
          "soft_cache_length": 20}),
        ("--soft_max_length 50", {"soft_max_length": 50, "soft_cache_length": 10}),
        ("--reward_funcs get_cosine_scaled_reward",
         {"reward_funcs": ["get_cosine_scaled_reward"], "cosine_min_len_value_wrong": -1.0,
          "cosine_max_len_value_wrong": -0.5}),
    ],
)  # fmt: skip
def test_flags_over_a_resolved_file_change_what_follows(
    tmp_path: Path, argv: str, changed: dict[str, Any]
) -> None:
    first = resolved()
    second = again(tmp_path, first, *argv.split())
    assert second.problems == ()
    assert second.config == first.config.model_copy(update=changed)


def test_what_a_file_chose_stays(tmp_path: Path) -> None:
    first = resolved(data_seed=3, steps_per_generation=4, gradient_accumulation_steps=2)
    second = again(tmp_path, first, "--seed", "7", "--gradient_accumulation_steps", "4")
    assert (second.config.data_seed, second.config.steps_per_generation) == (3, 4)


def test_other_processes_over_a_resolved_file(tmp_path: Path) -> None:
    second = again(tmp_path, resolved(), "--nproc_per_node", "2", world_size=2)
    assert (second.config.gradient_accumulation_steps, second.config.generation_batch_size) == (8, 128)


@pytest.mark.parametrize(
    ("funcs", "typed", "ends"),
    [
        (["accuracy"], {}, (-0.5, 0.0)),
        (["cosine"], {}, (-0.5, 0.0)),
        (["get_cosine_scaled_reward"], {}, (-1.0, -0.5)),
        (["format", "trl.rewards.get_cosine_scaled_reward"], {}, (-1.0, -0.5)),
        (["cosine", "get_cosine_scaled_reward"], {}, (-0.5, 0.0)),
        (["mine.get_cosine_scaled_reward"], {}, (-0.5, 0.0)),
        (["get_cosine_scaled_reward"], {"cosine_max_len_value_wrong": -0.2}, (-1.0, -0.2)),
    ],
)
def test_wrong_answers_under_the_two_names_of_cosine(
    funcs: list[str], typed: dict[str, float], ends: tuple[float, float]
) -> None:
    """TRL's name has TRL's values."""
    config = resolved(reward_funcs=funcs, **typed).config
    assert (config.cosine_min_len_value_wrong, config.cosine_max_len_value_wrong) == ends
    assert (config.cosine_min_len_value_correct, config.cosine_max_len_value_correct) == (1.0, 0.5)


def test_lengths_of_rewards_follow_from_that_of_a_completion() -> None:
    first = resolved(max_completion_length=20480)
    config = first.config
    # The lengths of DAPO: 20,480 and 4,096.
    assert (config.soft_max_length, config.soft_cache_length, config.cosine_max_len) == (20480, 4096, 20480)
    assert first.sources["soft_cache_length"] == "one fifth of soft_max_length"
    assert resolved(soft_max_length=3).config.soft_cache_length == 1
