"""Evaluation: when, on what, under which names; the best checkpoint; the same numbers from `covey eval`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import covey as package
from covey.errors import ConfigError, GuardStop
from covey.training import standalone
from covey.types import Completion
from journeys.helpers import (
    covey,
    events,
    flags,
    metrics,
    own_model,
    read_lines,
    rollouts,
    rows,
    small,
    succeed,
    timeless,
    write_jsonl,
)
from support.engines import CopyEngine
from support.models import save_padded


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", rows(20))
    write_jsonl(tmp_path / "held.jsonl", rows(7, start=100))
    write_jsonl(tmp_path / "other.jsonl", rows(3, start=200))


def evals(line: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the evaluation among those of a step, or of eval.json."""
    return {k: v for k, v in line.items() if k.startswith("eval_")}


def steps_with(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run) if evals(line)]


STAGED = """
def staged(completions, trainer_state, **kwargs):
    return [{best}.get(trainer_state.global_step, 0.25)] * len(completions)
"""


def staged(best: dict[int, float]) -> str:
    """A reward that depends on the step alone: no advantage, so no weight moves."""
    Path("staged.py").write_text(STAGED.format(best=best))
    return "staged.py:staged"


def test_when_and_under_which_names(tmp_path: Path) -> None:
    options = small(
        "train.jsonl", "run", val_dataset=["held.jsonl"], eval_steps=2, max_steps=5, num_generations_eval=4
    )
    done = succeed("train", *flags(options))
    run = tmp_path / "run"
    (start,) = events(run, "evaluated")
    assert start["step"] == 0 and 0 <= start["eval_reward"] <= 2
    # Every second step, and the last one.
    assert steps_with(run) == [2, 4, 5]
    assert done.out.count("eval      step") == 4 and "eval      step 5: eval_reward" in done.out
    line = metrics(run)[1]
    names = {"reward", "reward_std", "pass@1", "pass@2", "pass@4", "completions/mean_length"}
    names |= {f"rewards/{n}/{k}" for n in ("accuracy", "format") for k in ("mean", "std")}
    assert {f"eval_{n}" for n in names} <= evals(line).keys()
    # Seven prompts of four completions, whatever size the batches of training have.
    assert line["n"]["eval_reward"] == 28 and line["n"]["eval_pass@1"] == 7
    assert line["eval_pass@1"] == pytest.approx(line["eval_rewards/accuracy/mean"], rel=1e-12)
    assert line["eval_pass@1"] <= line["eval_pass@2"] <= line["eval_pass@4"]
    # The completions of an evaluation are nobody's training data.
    assert {r["split"] for found in rollouts(run) for r in found} == {"train"}


def test_several_sets_each_under_its_name(tmp_path: Path) -> None:
    options = small(
        "train.jsonl",
        "run",
        val_dataset=["hard=held.jsonl", "other.jsonl"],
        split_dataset_ratio=0.1,
        eval_on_start=False,
        eval_strategy="epoch",
        max_steps=10,
        dataset=["train.jsonl#10"],
    )
    succeed("train", *flags(options))
    run = tmp_path / "run"
    # 9 rows are left to train on, 2 a step: an epoch has 4 steps.
    assert steps_with(run) == [4, 8, 10]
    assert events(run, "evaluated") == []
    line = metrics(run)[3]
    assert [line["n"][f"eval_{n}_reward"] for n in ("hard", "other", "split")] == [7, 3, 1]
    assert line["n"]["eval_reward"] == 11
    parts = [7 * line["eval_hard_reward"], 3 * line["eval_other_reward"], line["eval_split_reward"]]
    assert line["eval_reward"] == pytest.approx(sum(parts) / 11, rel=1e-12)
    trained = {r["columns"]["answer"] + r["prompt"] for found in rollouts(run) for r in found}
    assert len(trained) == 9
    assert not any("pass@" in name for name in line)


def test_noise_of_its_own_and_the_same_each_time(tmp_path: Path) -> None:
    """With weights that do not move every evaluation says the same, and not what training drew."""
    options = small(
        "train.jsonl",
        "run",
        reward_funcs=[staged({})],
        val_dataset=["train.jsonl"],
        eval_steps=1,
        max_steps=3,
        num_generations_eval=4,
    )
    succeed("train", *flags(options))
    run = tmp_path / "run"
    found = [evals(line) for line in metrics(run)]
    assert found[0] == found[1] == found[2]
    (start,) = events(run, "evaluated")
    assert evals(start) == found[0]
    succeed("eval", "run/checkpoint-3")
    drawn = {r["prompt_id"]: set() for r in read_lines(run / "evaluations/checkpoint-3/train.jsonl")}
    for record in read_lines(run / "evaluations/checkpoint-3/train.jsonl"):
        drawn[record["prompt_id"]].add(tuple(record["completion_ids"]))
    trained = [r for found in rollouts(run) for r in found]
    new = [tuple(r["completion_ids"]) not in drawn[r["prompt_id"]] for r in trained]
    assert sum(new) > len(new) / 4


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"tuner_type": "lora"},
    "dora, bfloat16": {"tuner_type": "lora", "use_dora": True, "torch_dtype": "bfloat16"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_covey_eval_gives_the_numbers_of_training(kind: str, tmp_path: Path) -> None:
    options = small(
        "train.jsonl",
        "run",
        **KINDS[kind],
        learning_rate=1e-3,
        val_dataset=["hard=held.jsonl", "other.jsonl"],
        num_generations_eval=4,
        eval_temperature=0.8,
        eval_steps=2,
        save_steps=2,
        max_steps=4,
    )
    succeed("train", *flags(options))
    run = tmp_path / "run"
    lines = {line["step"]: line for line in metrics(run)}
    assert evals(lines[2]) != evals(lines[4])
    for step in (2, 4):
        done = succeed("eval", f"run/checkpoint-{step}")
        found = json.loads((run / f"evaluations/checkpoint-{step}/eval.json").read_text())
        assert evals(found) == evals(lines[step])
        assert evals(found["n"]) == evals(lines[step]["n"])
        assert f"written to run/evaluations/checkpoint-{step}" in done.out
    groups = read_lines(run / "evaluations/checkpoint-4/hard.jsonl")
    assert {r["split"] for r in groups} == {"eval/hard"} and {r["temperature"] for r in groups} == {0.8}
    for k in (1, 2, 4):
        assert lines[4][f"eval_hard_pass@{k}"] == pytest.approx(by_choice(groups, k), rel=1e-12)
    if kind != "lora":
        return
    again = package.evaluate("run/checkpoint-4", output_dir="again", num_generations_eval=2)
    assert again.metrics["eval_reward"].count == 20


def by_choice(records: list[dict[str, Any]], k: int) -> float:
    """pass@k by trying every choice of k completions of every prompt."""
    prompts: dict[int, list[float]] = {}
    for record in records:
        value = next(p["value"] for p in record["parts"] if p["name"] == "accuracy")
        prompts.setdefault(record["prompt_id"], []).append(value)
    assert len(prompts) == 7
    return fmean(fmean(max(c) for c in itertools.combinations(v, k)) for v in prompts.values())


def test_covey_eval_of_any_model(tmp_path: Path) -> None:
    """A model that no run made: the numbers are those of a run's first evaluation."""
    own_model(tmp_path / "model")
    words = ["--val_dataset", "held.jsonl", "--reward_funcs", "accuracy", "format"]
    words += ["--max_completion_length", "16", "--num_generations_eval", "2"]
    done = succeed("eval", "model", *words, "--output_dir", "scores")
    found = json.loads((tmp_path / "scores" / "eval.json").read_text())
    assert found["n"]["eval_reward"] == 14 and "eval_pass@2" in found
    assert "eval_reward" in done.out and "n 14" in done.out
    options = small(
        "train.jsonl",
        "run",
        model="model",
        val_dataset=["held.jsonl"],
        num_generations_eval=2,
        max_steps=1,
    )
    succeed("train", *flags(options))
    (start,) = events(tmp_path / "run", "evaluated")
    assert evals(start) == evals(found)
    done = covey("eval", "model", "--reward_funcs", "accuracy")
    assert done.code == 2 and "--val_dataset" in done.err


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    outcome = package.train(
        **small(
            "train.jsonl",
            "run",
            reward_funcs=["accuracy", staged({2: 0.75, 4: 0.5})],
            val_dataset=["held.jsonl"],
            eval_steps=1,
            save_steps=1,
            save_total_limit=1,
            max_steps=5,
            load_best_model_at_end=True,
            metric_for_best_model="eval_rewards/staged/mean",
        )
    )
    run = tmp_path / "run"
    assert [line["eval_rewards/staged/mean"] for line in metrics(run)] == [0.25, 0.75, 0.25, 0.5, 0.25]
    assert {p.name for p in run.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-5"}
    assert outcome.checkpoint.resolve() == run / "checkpoint-2"
    assert (outcome.exit_code, outcome.step) == (0, 5)
    # The best is weights alone, the last one can be resumed.
    assert not (run / "checkpoint-2" / "trainer").exists()
    assert (run / "checkpoint-5" / "trainer").is_dir()


def test_the_best_between_two_saves_is_kept_too(tmp_path: Path) -> None:
    options = small(
        "train.jsonl",
        "run",
        reward_funcs=[staged({3: 0.75})],
        val_dataset=["held.jsonl"],
        eval_steps=1,
        save_steps=2,
        save_total_limit=1,
        max_steps=6,
        load_best_model_at_end=True,
        eval_on_start=False,
    )
    done = succeed("train", *flags(options))
    names = {p.name for p in (tmp_path / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-3", "checkpoint-6"}
    assert "best      eval_reward 0.75 at step 3: run/checkpoint-3" in done.out
    assert "the model is run/checkpoint-3" in done.out


def test_early_stopping(tmp_path: Path) -> None:
    options = small(
        "train.jsonl",
        "run",
        reward_funcs=[staged({2: 0.75, 7: 1.0})],
        val_dataset=["held.jsonl"],
        eval_steps=1,
        max_steps=8,
        early_stopping_patience=2,
    )
    done = succeed("train", *flags(options))
    run = tmp_path / "run"
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert "stopped   at step 4 of 8" in done.out
    assert "2 evaluations without a better eval_reward than 0.75 of step 2" in done.out
    assert "covey train run/config.yaml --resume_from_checkpoint latest" in done.out
    assert (run / "checkpoint-4" / "trainer").is_dir()
    resume = ("--resume_from_checkpoint", "latest")
    # What is said to do goes on, if only to the next evaluation.
    succeed("train", "run/config.yaml", *resume)
    assert metrics(run)[-1]["step"] >= 5
    done = succeed("train", "run/config.yaml", *resume, "--early_stopping_patience", "9")
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))
    assert "best      eval_reward 1 at step 7" in done.out
    assert "done      8 steps" in done.out


def test_a_metric_that_no_evaluation_gives(tmp_path: Path) -> None:
    options = small(
        "train.jsonl",
        "run",
        val_dataset=["held.jsonl"],
        load_best_model_at_end=True,
        metric_for_best_model="eval_rewards/acuracy/mean",
    )
    done = covey("train", *flags(options))
    assert done.code == 2 and "E104" in done.err
    assert "--metric_for_best_model eval_rewards/accuracy/mean" in done.err
    # One completion a prompt gives no pass@4.
    done = covey("train", *flags(options | {"metric_for_best_model": "eval_pass@4"}))
    assert done.code == 2 and "E104" in done.err
    assert not (tmp_path / "run").exists()
    options["metric_for_best_model"] = "eval_rewards/accuracy/mean"
    succeed("train", *flags(options))
    assert timeless(metrics(tmp_path / "run")[-1])["eval_rewards/accuracy/mean"] is not None


def test_a_stream_has_no_epochs(tmp_path: Path) -> None:
    options = small("train.jsonl", "run", val_dataset=["held.jsonl"], streaming=True, eval_strategy="epoch")
    done = covey("train", *flags(options))
    assert done.code == 2 and "eval_strategy" in done.err


class _Shifted(CopyEngine):
    """Its logprobs are not its weights'."""

    def results(self) -> Iterator[Completion]:
        for done in super().results():
            yield replace(done, logprobs=tuple(x - 0.02 for x in done.logprobs))


def test_an_engine_with_a_copy_is_held_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"val_dataset": ["held.jsonl"], "reward_funcs": ["accuracy"]}
    given |= {"max_completion_length": 8, "num_generations_eval": 1}
    monkeypatch.setattr(standalone, "engine_for", lambda config, facts, policy, *more: CopyEngine(policy))
    assert package.evaluate("quickstart", output_dir="one", **given).metrics["eval_reward"].count == 7
    monkeypatch.setattr(standalone, "engine_for", lambda config, facts, policy, *more: _Shifted(policy))
    with pytest.raises(GuardStop, match=r"F152.*: publish of version 0 to the engine: its log-prob"):
        package.evaluate("quickstart", output_dir="two", **given)


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    given = {"val_dataset": "quickstart#4", "reward_funcs": "accuracy", "max_completion_length": 8}
    with pytest.raises(ConfigError, match="file cannot be written: it is a file"):
        package.evaluate("quickstart", output_dir="file", **given)


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_ids_that_the_tokenizer_does_not_have_are_said(engine: str, tmp_path: Path) -> None:
    save_padded(tmp_path / "padded")
    options = {**small("train.jsonl", "run"), "engine": engine, "max_steps": 1}
    done = succeed("train", *flags({**options, "model": "padded", "val_dataset": ["held.jsonl"]}))
    name = "completions/unknown_ids_ratio"
    ids = [i for lines in rollouts(Path("run")) for line in lines for i in line["completion_ids"]]
    (step,) = metrics(Path("run"))
    assert step[name] == sum(i >= 320 for i in ids) / len(ids) > 0.001
    assert step[f"eval_{name}"] > 0.001
    assert "F233" in done.err + done.out
    report = covey("doctor", "run")
    assert "F233" in report.out and "ids that the tokenizer does not have" in " ".join(report.out.split())
    done = succeed("train", *flags({**options, "output_dir": "other"}))
    assert metrics(Path("other"))[0][name] == 0.0 and "F233" not in done.err + done.out
