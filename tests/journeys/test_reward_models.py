"""Rewards that are models: a run's scores are those of a plain forward pass, a resumed run is the run never
stopped, and what a model pays for is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.quickstart import task
from journeys.helpers import (
    assert_same_run,
    covey,
    flags,
    metrics,
    own_model,
    plan_of,
    rollouts,
    rows,
    small,
    succeed,
    write_jsonl,
)
from support.reward_models import plain_reward, write_lover_of, write_reward_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_reward_model(folder / "rm-a"), write_reward_model(folder / "rm-b", "qwen2", seed=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", rows(32))


def both(models: tuple[Path, Path], data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A function, a model among the functions, and a model by its own option."""
    first, second = models
    usual = {
        "reward_funcs": ["format", first],
        "reward_model": [second],
        "reward_weights": [1, 0.5, -0.25],
    }
    return small(data, output, **{**usual, **changes})


def talk(record: dict[str, Any]) -> list[dict[str, str]]:
    question = record["prompt"].partition("user\n")[2].partition("<|im_end|>")[0]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": record["text"]}]


def assert_scored(record: dict[str, Any], models: tuple[Path, Path]) -> None:
    """The parts are the logits of each row alone, and the total their weighted sum."""
    first, second = (plain_reward(model, talk(record)) for model in models)
    values = {part["name"]: part["value"] for part in record["parts"]}
    assert list(values) == ["format", "rm-a", "rm-b"]
    assert (values["rm-a"], values["rm-b"]) == (
        pytest.approx(first, abs=1e-5),
        pytest.approx(second, abs=1e-5),
    )
    total = values["format"] + 0.5 * values["rm-a"] - 0.25 * values["rm-b"]
    assert record["reward"] == pytest.approx(total)


def test_a_function_and_two_models_with_weights(
    models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    options = both(models, data, tmp_path / "run", val_dataset=[data], eval_on_start=False, max_steps=1)
    planned = plan_of(*flags(options))
    assert any(
        "reward model rm-a: 0.11 M parameters, context 512 tokens" in line for line in planned["lines"]
    )
    assert planned["memory"]["phases"]["update"]["parts"]["reward models"] > 1e9
    succeed("train", *flags(options))
    first = rollouts(tmp_path / "run")[0]
    for record in first[:3]:
        assert_scored(record, models)
    (line,) = metrics(tmp_path / "run")
    assert line["rewards/rm-a/mean"] == pytest.approx(
        sum(part["value"] for r in first for part in r["parts"] if part["name"] == "rm-a") / len(first)
    )
    assert "eval_rewards/rm-b/mean" in (tmp_path / "run" / "events.jsonl").read_text() + json.dumps(line)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_never_stopped(
    models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeed("train", *flags(both(models, data, whole)))
    succeed("train", *flags(both(models, data, parts)), "--stop_after_steps", "1")
    succeed("train", *flags(both(models, data, parts)), "--resume_from_checkpoint", "latest")
    assert_same_run(parts, whole, 2)


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_have_a_model_each(models: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    options = both(
        models, data, tmp_path / "run", max_steps=1, per_device_train_batch_size=4, nproc_per_node=2
    )
    succeed("train", *flags(options))
    records = rollouts(tmp_path / "run")[0]
    assert len(records) == 8
    for record in (records[0], records[-1]):
        assert_scored(record, models)


@pytest.mark.slow
def test_what_a_model_pays_for_is_learnt(data: Path, tmp_path: Path) -> None:
    """A model that pays for the share of the digit 1: the policy writes more of it."""
    tokenizer = json.loads((task.MODEL_DIR / "tokenizer.json").read_text())
    lover = write_lover_of(tokenizer["model"]["vocab"]["1"], tmp_path / "lover")
    many = plain_reward(lover, "1" * 9 + "2")
    assert many > plain_reward(lover, "1" + "2" * 9) > plain_reward(lover, "2" * 10)
    options = small(data, tmp_path / "run", reward_model=[lover], num_generations=8, max_steps=40)
    del options["reward_funcs"]
    succeed("train", *flags(options), "--per_device_train_batch_size", "32", "--learning_rate", "1e-3")
    means = [line["rewards/lover/mean"] for line in metrics(tmp_path / "run")]
    assert sum(means[-5:]) / 5 > 1.5 * sum(means[:5]) / 5
    ones = [[r["text"].count("1") for r in records] for records in rollouts(tmp_path / "run")]
    assert sum(ones[-1]) > 1.5 * sum(ones[0])


def test_a_policy_is_refused_as_a_reward_model(data: Path, tmp_path: Path) -> None:
    policy = own_model(tmp_path / "policy")
    done = covey("train", *flags(small(data, tmp_path / "run", reward_model=[policy, "nobody/gone-rm"])))
    assert done.code == 2 and not (tmp_path / "run").exists()
    assert done.err.count("E337 reward_model\n") == 2
    assert "which generates text and does not give a score" in done.err and "nobody/gone-rm" in done.err


def test_names_of_ms_swift(models: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    old = ["--reward_adapters", "x", "--reward_model_plugin", "genrm"]
    done = covey("train", *flags(both(models, data, tmp_path / "run")), *old)
    assert done.code == 2 and "merge_and_unload" in done.err and "--reward_funcs" in done.err
    usual = ["--reward_model_type", "qwen2", "--reward_model_plugin", "default"]
    planned = covey("plan", *flags(both(models, data, tmp_path / "run")), *usual)
    assert planned.code == 0, planned.err
