"""The trainer of TRL's scripts: what it trains, tells callbacks and leaves behind."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import covey
from covey.errors import ConfigError
from covey.quickstart.built_in import BUILT_IN
from covey.trl import GRPOConfig, GRPOTrainer

NAMES = json.loads(Path(__file__).parents[1].joinpath("config", "other_tools.json").read_text())
MODEL = str(BUILT_IN["quickstart"].model_dir)
ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {n}+1?"}], "solution": str(n + 1)}
    for n in range(10, 26)
]
DATA = Dataset.from_list(ROWS)


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def config(output_dir: Path, **changes: Any) -> GRPOConfig:
    usual = {"per_device_train_batch_size": 16, "max_completion_length": 8, "max_steps": 3}
    return GRPOConfig(str(output_dir), **{**usual, "learning_rate": 1e-3, "logging_steps": 1, **changes})


def trainer(output_dir: Path, model: Any = MODEL, callbacks: Any = None, **changes: Any) -> GRPOTrainer:
    given = {k: changes.pop(k) for k in ("eval_dataset", "peft_config", "processing_class") if k in changes}
    args = config(output_dir, **changes)
    return GRPOTrainer(model, length, args, DATA, callbacks=callbacks, **given)


def loaded() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


class Told(transformers.TrainerCallback):
    """Keeps the events that it is told of, with the step; `does` has what to do at some of them."""

    def __init__(self, **does: Any) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.does = does

    def told(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append((event, state.global_step))
        if "logs" in kwargs:
            self.logs.append(kwargs["logs"])
        if event in self.does:
            self.does[event](state, control)


EVENTS = [n for n in dir(transformers.TrainerCallback) if n.startswith("on_")]
for _name in EVENTS:
    setattr(Told, _name, lambda self, *args, _name=_name, **kwargs: self.told(_name, *args, **kwargs))


def test_the_arguments_are_those_of_trl() -> None:
    assert list(inspect.signature(GRPOTrainer).parameters) == NAMES["trainer"]


def test_it_trains_as_the_same_options_do(tmp_path: Path) -> None:
    ran = trainer(tmp_path / "a").train()
    assert ran.global_step == 3 and ran.metrics["train_loss"] == ran.training_loss
    outcome = covey.train(
        model=MODEL,
        dataset=DATA,
        reward_funcs=length,
        output_dir=str(tmp_path / "b"),
        per_device_train_batch_size=16,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-3,
        # What TRL does and covey does not, where nobody says it.
        lr_scheduler_type="linear",
        disable_dropout=False,
        epsilon_high=0.2,
    )
    own = load_file(tmp_path / "a" / "checkpoint-3" / "model.safetensors")
    assert same(own, load_file(outcome.checkpoint / "model.safetensors"))
    assert not same(own, load_file(Path(MODEL) / "model.safetensors"))


def events_of_transformers(tmp_path: Path, told: Told, **options: Any) -> list[tuple[str, int]]:
    """The events of transformers' own trainer, in a run of as many steps and epochs."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 16
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, **options
    )
    transformers.Trainer(loaded(), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[told]).train()
    return told.events


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 3, "logging_steps": 2, "save_steps": 2},
        {
            **{"max_steps": -1, "num_train_epochs": 1.5, "logging_steps": 3, "logging_first_step": True},
            **{"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True},
        },
    ],
)
def test_events_come_as_in_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    told = Told()
    sizes = {"num_generations": 2, "per_device_train_batch_size": 4, **options}
    trainer(tmp_path / "a", callbacks=[told], eval_dataset=DATA.select(range(2)), **sizes).train()
    theirs = events_of_transformers(tmp_path / "b", Told(), **options)
    # Batches are cut in other ways here, and there is no prediction.
    assert told.events == [e for e in theirs if e[0] not in ("on_substep_end", "on_prediction_step")]


def test_logs(tmp_path: Path) -> None:
    """Means over the steps since the last log; the history of a resumed run begins at the start."""
    one, two = Told(), Told()
    every = trainer(tmp_path / "a", callbacks=[one], max_steps=4)
    every.train()
    other = trainer(tmp_path / "b", callbacks=[two], max_steps=4, logging_steps=2)
    other.train()
    for name in ("reward", "loss", "completions/mean_length", "entropy"):
        firsts = [log[name] for log in one.logs[:2]]
        assert two.logs[0][name] == pytest.approx(sum(firsts) / 2), name
    assert two.logs[0]["learning_rate"] == one.logs[1]["learning_rate"]
    assert [log["step"] for log in other.state.log_history] == [2, 4, 4]
    assert "train_runtime" in other.state.log_history[-1]
    again = trainer(tmp_path / "a", max_steps=6, lr_scheduler_type="constant")
    with pytest.raises(ConfigError):
        again.train(resume_from_checkpoint=True)  # another schedule
    stopped = trainer(tmp_path / "c", callbacks=[Told(on_step_end=stop_at(2))], max_steps=4)
    stopped.train()
    resumed = trainer(tmp_path / "c", max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert [log["step"] for log in resumed.state.log_history] == [1, 2, 3, 4, 4]
    names = ("reward", "loss", "grad_norm")
    for one_log, other_log in zip(resumed.state.log_history[:4], every.state.log_history, strict=False):
        assert [one_log[n] for n in names] == [other_log[n] for n in names]


def stop_at(step: int) -> Any:
    def stop(state: Any, control: Any) -> None:
        control.should_training_stop |= state.global_step == step

    return stop


def test_what_callbacks_ask_for(tmp_path: Path) -> None:
    def ask(state: Any, control: Any) -> None:
        if state.global_step == 2:
            control.should_save = control.should_evaluate = control.should_log = True

    told = Told(on_step_end=ask, on_save=stop_at(2))
    made = trainer(
        tmp_path, callbacks=[told], eval_dataset=DATA.select(range(2)), max_steps=5, logging_steps=100
    )
    made.train()
    end = [e for e in told.events if e[1] == 2]
    assert [e for e, _ in end] == [
        *("on_step_end", "on_log", "on_log", "on_evaluate", "on_save", "on_epoch_end"),
        *("on_log", "on_train_end"),
    ]
    assert [log for log in made.state.log_history if "eval_reward" in log]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]


def test_an_evaluation_without_data_is_an_error(tmp_path: Path) -> None:
    def ask(state: Any, control: Any) -> None:
        control.should_evaluate = True

    with pytest.raises(ValueError, match="eval_dataset"):
        trainer(tmp_path, callbacks=[Told(on_step_end=ask)]).train()


def test_early_stopping_of_transformers(tmp_path: Path) -> None:
    """It stops where nothing gets better: with a learning rate of 0 nothing does."""
    made = trainer(
        tmp_path,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        eval_dataset=DATA.select(range(2)),
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        learning_rate=0.0,
        max_steps=8,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
    )
    assert made.train().global_step == 3 and made.state.best_global_step == 1
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_an_error_of_a_callback_is_the_program_s(tmp_path: Path) -> None:
    def fail(state: Any, control: Any) -> None:
        raise ZeroDivisionError("of a callback")

    made = trainer(tmp_path, callbacks=[Told(on_log=fail)])
    with pytest.raises(ZeroDivisionError, match="of a callback"):
        made.train()
    assert made.job is None
    made.callbacks.clear()
    assert made.train().global_step == 3


def test_methods_that_nothing_calls_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match="Mine overrides compute_loss"):

        class Mine(GRPOTrainer):
            def compute_loss(self, *args: Any) -> None: ...

    class Fine(GRPOTrainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            super().log({**logs, "mine": 1.0})


def test_refused_with_all_else(tmp_path: Path) -> None:
    made = GRPOTrainer(MODEL, None, config(tmp_path, push_to_hub=True), DATA, optimizers=(object(), None))
    with pytest.raises(ConfigError) as error:
        made.train()
    assert {"push_to_hub", "optimizers", "reward_funcs"} == {p.option for p in error.value.problems}
    for refused in (made.predict, made.push_to_hub):
        with pytest.raises(NotImplementedError):
            refused()


def test_a_run_begins_beside_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    made = trainer(tmp_path, max_steps=1)
    made.train()
    first = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    made.save_model(tmp_path)
    made.train()
    assert same(first, load_file(tmp_path / "earlier-1" / "checkpoint-1" / "model.safetensors"))
    assert same(first, load_file(tmp_path / "model.safetensors"))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    # A second `train` goes on from the trained weights.
    assert not same(first, load_file(tmp_path / "checkpoint-1" / "model.safetensors"))


def test_a_model_that_is_an_object_is_trained_itself(tmp_path: Path) -> None:
    model = loaded()
    made = trainer(tmp_path, model)
    made.train()
    assert made.model is model
    assert same(dict(model.state_dict()), dict(loaded_from(tmp_path / "checkpoint-3").state_dict()))


def test_an_object_holds_the_best_weights_where_they_are_asked_for(tmp_path: Path) -> None:
    """Rewards fall with the steps, so the first one is the best."""
    model = loaded()

    def falling(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
        return [len(c[0]["content"]) / 100 - trainer_state.global_step for c in completions]

    args = config(tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)
    made = GRPOTrainer(model, falling, args, DATA, eval_dataset=DATA.select(range(2)))
    made.train()
    assert made.state.best_global_step == 1 and made.state.global_step == 3
    assert same(dict(model.state_dict()), dict(loaded_from(tmp_path / "checkpoint-1").state_dict()))


def loaded_from(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def test_a_model_of_peft_is_trained_itself(tmp_path: Path) -> None:
    """Its base stays as it is; its adapter is the one that the run has saved."""
    base = loaded()
    start = {n: p.clone() for n, p in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    made = trainer(tmp_path, model)
    made.train()
    after = {n.replace(".base_layer", ""): p for n, p in base.state_dict().items() if ".lora_" not in n}
    assert made.model is model and same(after, start)
    saved = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    held = {n: p for n, p in model.state_dict().items() if ".lora_" in n}
    assert saved.keys() == {n.replace(".default", "") for n in held}
    assert all(torch.equal(saved[n.replace(".default", "")], p) for n, p in held.items())
    assert any(p.abs().max() > 0 for n, p in held.items() if "lora_B" in n)
    made.save_model(tmp_path / "final")
    again = PeftModel.from_pretrained(loaded(), str(tmp_path / "final"))
    rows = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(rows).logits, model(rows).logits)


def test_an_adapter_beside_an_object(tmp_path: Path) -> None:
    base = loaded()
    start = {n: p.clone() for n, p in base.state_dict().items()}
    made = trainer(tmp_path, base, peft_config=LoraConfig(r=4, target_modules=["q_proj"]))
    made.train()
    assert same(dict(base.state_dict()), start)
    assert isinstance(made.model, PeftModel)
    merged = made.model.merge_and_unload()
    assert not torch.equal(merged.state_dict()["model.layers.0.self_attn.q_proj.weight"], start[Q])


Q = "model.layers.0.self_attn.q_proj.weight"


def test_evaluate_by_hand(tmp_path: Path) -> None:
    """Before and behind the run, and in it, with the weights of the time."""
    found: list[float] = []

    def look(state: Any, control: Any) -> None:
        found.append(made.evaluate()["eval_reward"])

    told = Told(on_step_end=look)
    made = trainer(tmp_path, callbacks=[told], eval_dataset=DATA.select(range(4)), max_steps=2)
    before = made.evaluate()["eval_reward"]
    made.train()
    after = made.evaluate(metric_key_prefix="test")["test_reward"]
    assert len(found) == 2 and found[1] == after != before
    assert [e for e, _ in told.events].count("on_evaluate") == 4


def test_the_model_of_a_name(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=1)
    made.train()
    assert same(dict(made.model.state_dict()), dict(loaded_from(tmp_path / "checkpoint-1").state_dict()))
    assert (
        made.processing_class("a").input_ids
        == transformers.AutoTokenizer.from_pretrained(MODEL)("a").input_ids
    )


def test_a_template_of_the_script(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "Q: {{ messages[0]['content'] }} A:"
    trainer(tmp_path, processing_class=tokenizer, max_steps=1).train()
    record = json.loads(next((tmp_path / "rollouts").glob("*.jsonl")).read_text().splitlines()[0])
    assert record["prompt"].startswith("Q: What is") and record["prompt"].endswith("A:")


def test_a_model_card(tmp_path: Path) -> None:
    made = trainer(tmp_path / "out")
    made.base_name = "Qwen/Qwen3-0.6B"
    made.train()
    made.create_model_card(model_name="mine", dataset_name="me/sums", tags=["sums", "grpo"])
    card = (tmp_path / "out" / "README.md").read_text()
    facts, text = yaml.safe_load(card.split("---")[1]), card.split("---")[2]
    assert facts == {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": "me/sums",
        "library_name": "transformers",
        "model_name": "mine",
        "tags": ["covey", "grpo", "sums"],
    }
    assert "# mine" in text and "for 3 steps" in text and "me/sums" in text
    # A directory is no model of a hub.
    made.base_name = MODEL
    made.create_model_card()
    facts = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---")[1])
    assert "base_model" not in facts and "datasets" not in facts and facts["model_name"] == "out"


class Guess:
    """An environment that has the task and the reward; its tool raises a number."""

    def reset(self, **columns: Any) -> str:
        self.number = 0
        return "Raise the number."

    def get_reward(self) -> float:
        return float(self.number)

    def raise_by(self, step: int) -> int:
        """Raise the number.

        Args:
            step: How much to add.
        """
        self.number += step
        return self.number


def test_an_environment_needs_no_data_set(tmp_path: Path) -> None:
    args = config(tmp_path, num_generations=4, max_steps=1)
    GRPOTrainer("quickstart-tools", args=args, environment_factory=Guess).train()
    records = [json.loads(line) for line in next((tmp_path / "rollouts").glob("*.jsonl")).open()]
    assert len(records) == 16 and all("Raise the number." in record["prompt"] for record in records)
    args = config(tmp_path, max_steps=-1)
    with pytest.raises(ValueError, match="max_steps"):
        GRPOTrainer("quickstart-tools", args=args, environment_factory=Guess).train()
