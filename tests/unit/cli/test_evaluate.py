"""`covey eval`: whose options hold, which model is read, what is refused and what is printed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config import Resolved
from covey.config.filters import evaluated_alone
from covey.plan.check_filters import filter_problems
from covey.plan.facts import Facts
from covey.quickstart.task import MODEL_DIR
from covey.types import Metric
from support.checks import GOOD
from support.verbs import Survey, codes_in, stand_in

WORDS = ["--val_dataset", "v.jsonl", "--reward_funcs", "accuracy"]


@dataclass(frozen=True)
class Evaluated:
    metrics: dict[str, Metric]
    output_dir: Path


class Evaluation:
    """Stands in for what samples and scores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.got: list[tuple[Resolved, Path]] = []
        self.order: list[str] = []
        self.metrics = {"eval_reward": Metric(value=0.5, count=4)}
        stand_in(monkeypatch, "covey.training.standalone", evaluate=self._run)

    def without_facts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in(
            monkeypatch,
            "covey.checks.evaluation.look",
            survey_checked=lambda resolved, directory: Survey(Facts(), self.order),
        )

    def _run(self, resolved: Resolved, found: Any, directory: Path) -> Evaluated:
        self.order.append("run")
        self.got.append((resolved, directory))
        return Evaluated(self.metrics, Path("runs/eval"))


@pytest.fixture
def evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Evaluation:
    return Evaluation(monkeypatch)


@pytest.fixture
def blind(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    """Without a look at model, data and rewards."""
    evaluation.without_facts(monkeypatch)
    return evaluation


def evaluated(found: Evaluation, *words: str) -> Resolved:
    assert main(["eval", *words]) == 0
    return found.got[-1][0]


def checkpoint(adapter_base: str | None = None, options: str = "") -> Path:
    """A checkpoint of a run with its configuration beside it."""
    directory = Path("runs/a/checkpoint-5")
    directory.mkdir(parents=True)
    (directory.parent / "config.yaml").write_text(
        "model:\n  model: /models/tiny\ndata:\n  dataset: [train.jsonl]\n  val_dataset: [v.jsonl]\n"
        "reward:\n  reward_funcs: [accuracy, format]\nsampling:\n  temperature: 0.7\n"
        f"output:\n  output_dir: runs/a\n{options}"
    )
    if adapter_base is not None:
        (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": adapter_base}))
    return directory


def test_a_model_under_flags(blind: Evaluation) -> None:
    resolved = evaluated(blind, "/models/tiny", *WORDS, "--num_generations_eval", "4")
    config = resolved.config
    assert (config.model, config.val_dataset, config.dataset) == ("/models/tiny", ["v.jsonl"], ["v.jsonl"])
    assert (config.num_generations_eval, config.eval_strategy) == (4, "steps")
    assert resolved.problems == ()
    assert blind.got[0][1] == Path("/models/tiny")
    assert blind.order == ["run", "close"]


def test_only_the_first_of_several_sets_stands_for_the_data(blind: Evaluation) -> None:
    words = ["--val_dataset", "a.jsonl", "b.jsonl", "--reward_funcs", "accuracy"]
    config = evaluated(blind, "m", *words).config
    assert (config.val_dataset, config.dataset) == (["a.jsonl", "b.jsonl"], ["a.jsonl"])


def test_a_checkpoint_brings_the_options_of_its_run(blind: Evaluation) -> None:
    directory = checkpoint()
    config = evaluated(blind, str(directory)).config
    assert config.model == "runs/a/checkpoint-5"
    assert (config.dataset, config.val_dataset) == (["train.jsonl"], ["v.jsonl"])
    assert (config.reward_funcs, config.temperature) == (["accuracy", "format"], 0.7)


def test_flags_override_the_run(blind: Evaluation) -> None:
    directory = checkpoint()
    words = ["--temperature", "0.5", "--val_dataset", "w.jsonl", "--reward_funcs", "accuracy"]
    config = evaluated(blind, str(directory), *words).config
    assert (config.temperature, config.eval_temperature) == (0.5, 0.5)
    assert (config.val_dataset, config.reward_funcs) == (["w.jsonl"], ["accuracy"])
    assert config.reward_weights == [1.0]


def test_a_data_set_that_is_named_is_what_is_evaluated_on(blind: Evaluation) -> None:
    words = ["--dataset", "a.jsonl", "b=b.jsonl", "--reward_funcs", "accuracy"]
    config = evaluated(blind, "m", *words).config
    assert (config.val_dataset, config.split_dataset_ratio) == (["a.jsonl", "b=b.jsonl"], 0.0)
    assert config.eval_strategy == "steps"
    # It takes the place of the sets of the run, and of the share that the run held out.
    directory = checkpoint(options="data:\n  split_dataset_ratio: 0.1\n")
    config = evaluated(blind, str(directory), "--dataset", "a.jsonl").config
    assert (config.val_dataset, config.split_dataset_ratio) == (["a.jsonl"], 0.0)
    # Where sets to evaluate on are named, too, or a share is held out, it is what the rest is learnt from.
    config = evaluated(blind, "m", "--dataset", "a.jsonl", *WORDS).config
    assert (config.dataset, config.val_dataset) == (["a.jsonl"], ["v.jsonl"])
    words = ["--dataset", "a.jsonl", "--split_dataset_ratio", "0.5", "--reward_funcs", "accuracy"]
    config = evaluated(blind, "m", *words).config
    assert (config.dataset, config.val_dataset, config.split_dataset_ratio) == (["a.jsonl"], [], 0.5)


def test_a_run_that_did_not_evaluate_is_evaluated(blind: Evaluation) -> None:
    directory = checkpoint(options="evaluation:\n  eval_strategy: 'no'\n")
    assert evaluated(blind, str(directory)).config.eval_strategy == "steps"


def test_an_adapter_is_read_on_its_base(blind: Evaluation) -> None:
    directory = checkpoint(adapter_base="/models/base")
    assert evaluated(blind, str(directory)).config.model == "/models/base"
    assert blind.got[0][1] == directory


def test_a_configuration_beside_a_model_of_another_name_is_not_its(blind: Evaluation) -> None:
    directory = checkpoint()
    other = directory.rename(directory.with_name("final"))
    config = evaluated(blind, str(other), *WORDS).config
    assert (config.reward_funcs, config.temperature) == (["accuracy"], 1.0)


def test_a_directory_of_ones_own_for_the_results(blind: Evaluation) -> None:
    assert evaluated(blind, "m", *WORDS, "--output_dir", "o").config.output_dir == "o"
    directory = checkpoint()
    assert evaluated(blind, str(directory)).config.output_dir == "runs/a/checkpoint-5"


def test_what_is_printed(blind: Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    blind.metrics = {
        "eval_reward": Metric(value=0.123456, count=40),
        "eval_completions/mean_length": Metric(value=17.0, count=40),
        "eval_pass@4": Metric(value=None, count=0),
    }
    assert main(["eval", "m", *WORDS]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "eval_reward                     0.1235  n 40",
        "eval_completions/mean_length        17  n 40",
        "eval_pass@4                          –  n 0",
        "written to runs/eval",
    ]


TASK = [str(MODEL_DIR), "--val_dataset", "quickstart#8", "--reward_funcs", "accuracy"]


def test_greedy_completions_are_no_fault_of_an_evaluation(evaluation: Evaluation) -> None:
    assert evaluated(evaluation, *TASK, "--eval_temperature", "0").config.eval_temperature == 0
    assert evaluated(evaluation, *TASK, "--temperature", "0").config.eval_temperature == 0


def test_filters_of_a_greedy_evaluation(evaluation: Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the run are its own affair; typed ones are named, with what to type."""
    for words in (["--temperature", "0", "--min_p", "0.1"], ["--eval_temperature", "0", "--eval_top_k", "5"]):
        assert main(["eval", *TASK, *words]) == 2
        assert "E111" in capsys.readouterr().err
        assert evaluated(evaluation, *TASK, *words, "--eval_temperature", "1.0").config.eval_temperature == 1


def test_filters_of_the_run_in_a_greedy_evaluation(blind: Evaluation) -> None:
    """Nothing stands against them, and no engine has to record what they keep."""
    directory = checkpoint(options="evaluation:\n  eval_temperature: 0\n")
    file = directory.parent / "config.yaml"
    text = file.read_text().replace("sampling:", "sampling:\n  top_p: 0.9")
    file.write_text(text.replace("output:", "vllm:\n  use_vllm: true\noutput:"))
    resolved = evaluated(blind, str(directory))
    config = resolved.config
    assert (config.top_p, config.eval_top_p, config.eval_temperature) == (0.9, 0.9, 0)
    assert resolved.problems == ()
    assert filter_problems(evaluated_alone(config), GOOD) == []
    config = evaluated(blind, str(directory), "--eval_temperature", "1").config
    (problem,) = filter_problems(evaluated_alone(config), GOOD)
    assert (problem.code, problem.option) == ("E120", "eval_top_p")


def test_batch_and_learning_rate_are_no_business_of_an_evaluation(evaluation: Evaluation) -> None:
    words = ["--num_generations", "7", "--learning_rate", "0"]
    assert evaluated(evaluation, *TASK, *words).config.num_generations == 7


def test_a_run_with_a_vllm_over_several_processes_is_evaluated_by_one(blind: Evaluation) -> None:
    of_run = "vllm:\n  use_vllm: true\n  vllm_tensor_parallel_size: 2\n  vllm_data_parallel_size: 4\n"
    config = evaluated(blind, str(checkpoint(options=of_run))).config
    assert config.use_vllm
    assert (config.vllm_tensor_parallel_size, config.vllm_data_parallel_size) == (1, 1)


def test_a_vllm_over_several_processes_is_refused(
    evaluation: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *TASK, "--use_vllm", "true", "--vllm_tensor_parallel_size", "2"]) == 2
    said = capsys.readouterr().err
    assert "E214" in codes_in(said) and "--nproc_per_node" not in said


def test_the_built_in_model_is_evaluated_where_it_lies(evaluation: Evaluation) -> None:
    assert main(["eval", "quickstart", *TASK[1:]]) == 0
    assert evaluation.got[0][1] == MODEL_DIR


def test_refusals(evaluation: Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    for words, codes in (
        ([], ["E105"]),
        (["--val_dataset", "v.jsonl"], ["E105"]),
        ([str(MODEL_DIR), "--reward_funcs", "accuracy"], ["E105"]),
        ([str(MODEL_DIR), "--reward_funcs", "accuracy", "--dataset", "./v.jsonl"], ["E302"]),
        ([*TASK, "--num_generation", "3"], ["E101"]),
        ([str(MODEL_DIR), "--val_dataset", "./v.jsonl", "--reward_funcs", "accuracy"], ["E302"]),
        (["./absent", *TASK[1:]], ["E301"]),
        (["runs/checkpoint-5", *TASK[1:]], ["E301"]),
    ):
        assert main(["eval", *words]) == 2, words
        assert codes_in(capsys.readouterr().err) == codes, words
    assert evaluation.got == []


def test_an_adapter_on_its_model_as_ms_swift_names_them(blind: Evaluation) -> None:
    directory = str(checkpoint(adapter_base="/models/base"))
    for flag in ("--adapters", "--ckpt_dir"):
        assert evaluated(blind, flag, directory).config.model == "/models/base"
        moved = evaluated(blind, "--model", "/models/moved", flag, directory, "--temperature", "0.5").config
        assert (moved.model, moved.temperature, moved.adapters) == ("/models/moved", 0.5, None)
    assert {path for _, path in blind.got} == {Path(directory)}
    assert evaluated(blind, "--model", "quickstart", *WORDS).config.model == str(MODEL_DIR)


def test_a_run_in_the_place_of_its_checkpoint(
    evaluation: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint()
    for word in ("runs/a", "runs/a/checkpoint-7"):
        assert main(["eval", word, *WORDS]) == 2
        err = capsys.readouterr().err
        assert codes_in(err) == ["E413"]
        assert "`covey eval runs/a/checkpoint-5 --val_dataset v.jsonl --reward_funcs accuracy`" in err
