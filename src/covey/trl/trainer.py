"""`GRPOTrainer` of TRL over the options and the job of `covey train`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.api import evaluate, train_with
from covey.config.adapters import ADAPTER_CONFIG
from covey.texts import tr
from covey.texts.language import spoken
from covey.trl.accelerator import Accelerator
from covey.trl.arguments import Given, evaluation_of_trainer, options_of_trainer, refuse_overrides
from covey.trl.card import write_card
from covey.trl.config import GRPOConfig
from covey.trl.events import Events
from covey.trl.models import (
    copy_model,
    is_peft_model,
    named_model,
    named_tokenizer,
    save_start,
    take_adapter,
    trained_model,
    without_adapter,
    write_model,
)
from covey.trl.state import TrainerControl, TrainerState, TrainOutput

if TYPE_CHECKING:
    from covey.training.job import Job
    from covey.training.run import Outcome


class GRPOTrainer:
    """Trains as `covey train` does with the options that the arguments mean.

    The arguments are those of TRL 1.16; one that covey cannot honour is refused by its name when `train`
    begins, together with all other problems (ConfigError). `state`, `control` and `args` are what callbacks
    are given. A model that is an object is trained itself.
    """

    # A script asks before it gathers the weights of ranks; checkpoints have the whole model in any case.
    is_fsdp_enabled = is_deepspeed_enabled = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls, GRPOTrainer)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Mapping[str, Any]] | None = None,
        environment_factory: Any = None,
    ) -> None:
        self.base_name = str(model if isinstance(model, str) else getattr(model.config, "name_or_path", ""))
        if args is None:
            args = GRPOConfig(f"{self.base_name.rstrip('/').split('/')[-1] or 'model'}-GRPO")
        self.args, self.hub_model_id = args, args.hub_model_id
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.given = Given(
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.state, self.control = TrainerState(), TrainerControl()
        self.callbacks: list[Any] = []
        for callback in callbacks or ():
            self.add_callback(callback)
        self.accelerator = Accelerator(self)
        self.train_metrics: dict[str, float] = {}
        self.job: Job | None = None
        self.outcome: Outcome | None = None
        self.rollout: Any = None
        self._processing_class = processing_class
        self._events = Events(self)
        self._set_state()
        self._events.call("on_init_end")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, and return the steps taken, their mean loss and the speed.

        True resumes from the newest checkpoint in output_dir. A run that output_dir holds already is put into
        a directory earlier-N in it. Raises ConfigError with every problem, and GuardStop where a guard ends
        the run.
        """
        resume = (
            self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        )
        if self.outcome is not None and not resume:
            # Training goes on from the trained weights, as with a model that is an object.
            self.given.model = self.model
        self.state, self.control = TrainerState(), TrainerControl()
        self._set_state()
        self.outcome = None
        with options_of_trainer(self, resume=resume) as options:
            if is_peft_model(self.given.model):
                options["model"] = without_adapter(self.given.model)
                rank = self.args.process_index
                start = save_start(self.given.model, self._output_dir, rank=rank, resumes=bool(resume))
                options["adapters"] = str(start)
            try:
                self.outcome = train_with(options, self._events)
            finally:
                self.job = None
        self._take_best(self.outcome)
        return TrainOutput(self.outcome.step, self.train_metrics["train_loss"], dict(self.train_metrics))

    def _take_best(self, outcome: Outcome) -> None:
        """Have the model that was given hold what the run has left: its adapter, or the weights of its best
        checkpoint where that is not the last one, whose weights the model has."""
        model, is_last = self.given.model, outcome.checkpoint.name == f"checkpoint-{outcome.step}"
        if is_peft_model(model):
            take_adapter(model, outcome.checkpoint)
        elif not isinstance(model, str) and not is_last and not _is_adapter(outcome.checkpoint):
            model.load_state_dict(named_model(str(outcome.checkpoint)).state_dict())

    @property
    def model(self) -> Any:
        """Return the model: the one in training; behind it the trained one, which is loaded when it is first
        asked for; before it the one that was given, or that its name means, which is then trained itself."""
        if self.rollout is not None:
            return self.rollout.model
        if self.job is not None:
            return self.job.backend.policy.model
        given = self.given.model
        if self.outcome is None:
            if isinstance(given, str):
                self.given.model = named_model(given, self._revision)
            return self.given.model
        if isinstance(given, str) or (_is_adapter(self.outcome.checkpoint) and not is_peft_model(given)):
            self.given.model = trained_model(self.outcome.checkpoint, given)
        return self.given.model

    @property
    def processing_class(self) -> Any:
        """Return the tokenizer or processor that was given, or the tokenizer of the model."""
        if self._processing_class is None:
            given = self.given.model
            name = given if isinstance(given, str) else given.config.name_or_path
            self._processing_class = named_tokenizer(name, self._revision)
        return self._processing_class

    @property
    def num_generations(self) -> int:
        """Return how many completions a prompt has: of an evaluation in a rollout function of one."""
        return int(self.args.num_generations or 0) if self.rollout is None else self.rollout.num_generations

    def generate(self, prompts: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
        """Sample a completion behind each prompt with the engine of the run; only a rollout function may.

        Returns dicts of `prompt_ids`, `completion_ids`, `logprobs` and `text`
        (covey.rollout.function_context.RolloutContext.generate).
        """
        if self.rollout is None:
            raise RuntimeError(spoken(tr("trainer.generate samples only within a rollout function.")))
        return list(self.rollout.generate(prompts, **options))

    @property
    def vllm_generation(self) -> Any:
        """Refuse: engines are behind `generate`."""
        words = tr(
            "covey.trl has no vllm_generation: sample with trainer.generate(prompts, max_tokens=N), or with "
            "covey.trl.experimental.openenv.generate_rollout_completions."
        )
        raise NotImplementedError(spoken(words))

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write the model, or the adapter, and the tokenizer to a directory. During training every rank calls
        this; behind it the last checkpoint is copied, or the best one with load_best_model_at_end."""
        target = Path(output_dir or self._output_dir)
        if self.job is not None:
            write_model(self.job, target)
        elif not self.accelerator.is_main_process:
            return
        elif self.outcome is not None:
            copy_model(self.outcome.checkpoint, target)
        else:
            self.model.save_pretrained(target)
            self.processing_class.save_pretrained(target)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample and score eval_dataset with the model as it is now, and return and log the metrics.

        During training every rank calls this. Before and behind it each rank evaluates by itself, with the
        same result. ConfigError says what is wrong with the arguments.
        """
        if self.job is not None:
            if eval_dataset is not None:
                words = tr("During training evaluate takes the eval_dataset of the trainer alone.")
                raise ValueError(spoken(words))
            found = self.job.evaluations.run(self.state.global_step)[0]
        else:
            held_out = self.eval_dataset if eval_dataset is None else eval_dataset
            with evaluation_of_trainer(self, held_out) as options:
                found = evaluate(options.pop("model"), **options).metrics
        self._events.evaluated(found, self.state.global_step)
        values = {name: metric.value for name, metric in found.items() if metric.value is not None}
        return {f"{metric_key_prefix}{n[4:]}" if n[:5] == "eval_" else n: v for n, v in values.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add metrics to the logs of this step, and tell callbacks of them."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control.should_log = False
        self._events.call("on_log", logs=logs)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or one of a class of them."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback, or the first of a class, away and return it; None where there is none."""
        for one in self.callbacks:
            if one is callback or (isinstance(callback, type) and isinstance(one, callback)):
                self.callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: Any) -> None:
        """Take a callback, or the first of a class, away."""
        self.pop_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first process."""
        return self.accelerator.is_main_process

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        return self.accelerator.is_local_main_process

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics in the first process."""
        if self.accelerator.is_main_process:
            width = max(map(len, metrics), default=0)
            self.accelerator.print(f"***** {split} metrics *****")
            for name in sorted(metrics):
                self.accelerator.print(f"  {name:{width}} = {metrics[name]}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to <split>_results.json, and beside those of others to all_results.json."""
        if not self.accelerator.is_main_process:
            return
        directory = self._output_dir
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{split}_results.json").write_text(json.dumps(metrics, indent=4, sort_keys=True))
        path = directory / "all_results.json"
        if combined:
            known = json.loads(path.read_text()) if isfile(path) else {}
            path.write_text(json.dumps({**known, **metrics}, indent=4, sort_keys=True))

    def save_state(self) -> None:
        """Write the state to trainer_state.json."""
        if self.accelerator.is_main_process:
            self.state.save_to_json(self._output_dir / "trainer_state.json")

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write README.md to the output directory: the base model, the data set and the tags."""
        if self.accelerator.is_main_process:
            write_card(self, model_name, dataset_name, tags)

    def predict(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: there are no labels to predict."""
        raise NotImplementedError(
            spoken(tr("predict has no meaning for GRPO: evaluate samples and scores a data set."))
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: covey uploads nothing."""
        words = tr("covey uploads nothing: run `hf upload REPO {directory}`.", directory=self.args.output_dir)
        raise NotImplementedError(spoken(words))

    def end(self) -> None:
        """Do nothing: `train` ends all that it began."""

    @property
    def _revision(self) -> str | None:
        given = self.args.model_init_kwargs
        return given.get("revision") if isinstance(given, dict) else None

    @property
    def _output_dir(self) -> Path:
        return Path(str(self.args.output_dir))

    def _set_state(self) -> None:
        self.state.logging_steps, self.state.save_steps = self.args.logging_steps, self.args.save_steps
        self.state.eval_steps = self.args.eval_steps
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.is_world_process_zero = self.accelerator.is_main_process
        self.state.is_local_process_zero = self.accelerator.is_local_main_process


def _is_adapter(checkpoint: Path) -> bool:
    return isfile(checkpoint / ADAPTER_CONFIG)
