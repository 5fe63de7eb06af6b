"""Turns the arguments of `GRPOTrainer` into options of `covey.train`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checks.objects.look import named_directory
from covey.data.errors import ModelError
from covey.data.live import is_stream
from covey.errors import ProgramError
from covey.text_files import own_template
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.trl.config import options_of
from covey.trl.models import is_peft_model, merged_copy

if TYPE_CHECKING:
    from covey.trl.trainer import GRPOTrainer

# Methods of TRL's trainer, and of transformers', that nothing here calls.
_NEVER_CALLED = (
    *("compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies", "get_high_entropy_mask"),
    *("_generate", "_generate_single_turn", "_generate_and_score_completions", "_tool_call_loop"),
    *(
        "_tokenize_prompts",
        "_calculate_rewards",
        "_prepare_inputs",
        "get_off_policy_mask",
        "get_gamma_weights",
    ),
    *("training_step", "prediction_step", "evaluation_loop", "compute_loss_context_manager"),
    *("get_train_dataloader", "get_eval_dataloader", "_get_train_sampler", "_get_eval_sampler"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names"),
    *("_save_checkpoint", "_save", "_load_best_model", "_inner_training_loop", "_maybe_log_save_evaluate"),
    *("create_accelerator_and_postprocess", "floating_point_ops", "num_examples", "optimizer_step"),
)


def refuse_overrides(cls: type, base: type) -> None:
    """Raise TypeError where a subclass has a method that a trainer of TRL would call, and this one does
    not."""
    ours = {name for kind in cls.__mro__ if kind is not base and kind is not object for name in vars(kind)}
    lost = sorted(ours.intersection(_NEVER_CALLED))
    if lost:
        words = tr(
            "{name} overrides {lost}, which covey never calls: losses, batches and sampling are options "
            "there (--loss_type, --rollout_func, --environment_factory).",
            name=cls.__name__,
            lost=joined(", ", lost),
        )
        raise TypeError(spoken(words))


@dataclass(kw_only=True)
class Given:
    """Holds the arguments of a trainer."""

    model: Any
    reward_funcs: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    reward_processing_classes: Any
    optimizers: Any
    quantization_config: Any
    peft_config: Any
    tools: Any
    rollout_func: Callable[..., Any] | None
    environment_factory: Any


@contextmanager
def options_of_trainer(trainer: GRPOTrainer, *, resume: Any = None) -> Iterator[dict[str, Any]]:
    """The options of a run, or of one that resumes from a checkpoint (True: the newest one)."""
    args, given = trainer.args, trainer.given
    options = options_of(args)
    own = {one.name: getattr(given, one.name) for one in fields(given)}
    options |= {name: value for name, value in own.items() if value is not None}
    options |= _nested_quantization(options)
    if given.train_dataset is None and callable(given.environment_factory):
        options["train_dataset"] = _empty_prompts(args)
    if is_stream(given.train_dataset):
        options["streaming"] = True
    if all(one is None for one in given.optimizers or ()):
        options.pop("optimizers", None)
    if given.rollout_func is not None:
        options["rollout_func"] = _with_trainer(given.rollout_func, trainer)
    if args.eval_strategy == "no":
        options.pop("eval_dataset", None)
        if given.eval_dataset is not None and trainer.callbacks:
            options |= {"eval_dataset": given.eval_dataset, "eval_strategy": "asked"}
    template = _other_template(given)
    if template is not None:
        options["chat_template"] = str(_written(template, Path(str(args.output_dir))))
    if resume:
        options["resume_from_checkpoint"] = "latest" if resume is True else str(resume)
    else:
        options["overwrite_output_dir"] = "aside"
    with _tracker_settings(options):
        yield options


def _empty_prompts(args: Any) -> list[dict[str, Any]]:
    """The rows of a run whose environment says what to do: those of one rollout, again and again."""
    if args.max_steps <= 0:
        words = tr("Without a train_dataset max_steps says how long to train; it is not set.")
        raise ValueError(spoken(words))
    message = {"role": "user", "content": ""}
    return [{"prompt": [message]}] * max(1, args.generation_batch_size // (args.num_generations or 1))


def _other_template(given: Given) -> str | None:
    """The chat template of a tokenizer that was given beside the name of a model, where it is not that of the
    model."""
    template = getattr(given.processing_class, "chat_template", None)
    if not isinstance(given.model, str) or not isinstance(template, str):
        return None
    try:
        own = own_template(named_directory(given.model, offline=False))
    except ModelError:
        # What is wrong with the model is said of the model.
        return None
    return None if template == own else template


def _written(text: str, directory: Path) -> Path:
    """A file with a text, which its name is made from, so that every rank may write it at once."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    target, own = directory / f"chat_template-{digest}.jinja", directory / f".template-{os.getpid()}"
    directory.mkdir(parents=True, exist_ok=True)
    own.write_text(text, encoding="utf-8")
    own.replace(target)
    return target


def _nested_quantization(options: Mapping[str, Any]) -> dict[str, Any]:
    """The argument of `from_pretrained` that is one of the trainer too."""
    inner = options.get("model_init_kwargs")
    if not isinstance(inner, Mapping) or inner.get("quantization_config") is None:
        return {}
    rest = {name: value for name, value in inner.items() if name != "quantization_config"}
    return {"model_init_kwargs": rest, "quantization_config": inner["quantization_config"]}


@contextmanager
def _tracker_settings(options: dict[str, Any]) -> Iterator[None]:
    """Have trackers find in the environment what a script gives as fields."""
    settings = {"trackio_space_id": "TRACKIO_SPACE_ID", "project": "TRACKIO_PROJECT"}
    given = {variable: options.pop(name, None) for name, variable in settings.items()}
    new = {v: str(value) for v, value in given.items() if value not in (None, "huggingface")}
    before = {variable: os.environ.get(variable) for variable in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


@contextmanager
def evaluation_of_trainer(trainer: GRPOTrainer, held_out: Any) -> Iterator[dict[str, Any]]:
    """The options by which the model of a trainer is evaluated on a data set: the checkpoint that its run has
    left, or the model that it was given."""
    is_trained, given = trainer.outcome is not None, trainer.given.model
    with options_of_trainer(trainer) as options:
        for name in ("train_dataset", "eval_dataset", "overwrite_output_dir"):
            options.pop(name, None)
        if trainer.outcome is not None and isinstance(given, str):
            options["model"] = trainer.outcome.checkpoint
            options.pop("processing_class", None)
        elif is_peft_model(given) or (is_trained and is_peft_model(trainer.model)):
            options["model"] = merged_copy(trainer.model)
            options.setdefault("processing_class", trainer.processing_class)
        name = f"step-{trainer.state.global_step}"
        rank = f"-rank-{trainer.args.process_index}" if trainer.args.process_index else ""
        directory = Path(str(trainer.args.output_dir)) / "evaluations" / f"{name}{rank}"
        yield {**options, "eval_dataset": held_out, "eval_strategy": "steps", "output_dir": str(directory)}


def _with_trainer(function: Callable[..., Any], trainer: GRPOTrainer) -> Callable[..., Any]:
    """The function of a script, called with the trainer, which passes on what it asks of the rollout."""

    def rollout_func(prompts: list[Any], context: Any) -> Any:
        trainer.rollout = context
        try:
            return function(prompts, trainer)
        except (Exception, SystemExit) as error:
            raise ProgramError from error
        finally:
            trainer.rollout = None

    return rollout_func
