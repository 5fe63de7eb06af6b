"""The options of a run.

One flat, frozen class. The description of a field is its `--help` text; its group is its heading there and
its section in config.yaml. A `rule` says what an option becomes when nobody types it and its value follows
from others; such an option has no default here, so a `Config` always holds the values that the run uses.
"""

from __future__ import annotations

from typing import Any, Literal

from covey.config.algorithm import AlgorithmOptions
from covey.config.inputs import option

GROUPS: dict[str, str] = {
    "model": "Model",
    "tuner": "Adapters",
    "data": "Data",
    "reward": "Rewards",
    "batch": "Batch: every number counts completions, not prompts",
    "sampling": "Sampling",
    "algorithm": "Algorithm",
    "optimizer": "Optimizer",
    "run": "Run",
    "evaluation": "Evaluation",
    "output": "Output, saving and resuming",
}
"""The sections of config.yaml and of `--help`, in order, each with its heading."""


class Config(AlgorithmOptions):
    """Every option of a run, resolved; `covey.config.from_dict` and `resolve` build one.

    Unknown names are refused. Lengths are tokens, batch sizes are completions, sizes on disk are GB (1e9
    bytes).
    """

    # -- optimizer
    learning_rate: float = option(
        "optimizer", ..., "Peak learning rate of AdamW.", "1e-6, or 1e-5 with tuner_type lora"
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = option(
        "optimizer",
        "constant",
        "Schedule of the learning rate. Only a constant one lets a finished run be lengthened without a "
        "change.",
    )
    warmup_steps: int = option("optimizer", 0, "Optimizer steps over which the learning rate rises from 0.")
    warmup_ratio: float = option(
        "optimizer", 0.0, "The same as a share of all steps, 0 to 1; type one of the two."
    )
    adam_beta1: float = option("optimizer", 0.9, "Decay of AdamW's mean of gradients.")
    adam_beta2: float = option("optimizer", 0.999, "Decay of AdamW's mean of squared gradients.")
    adam_epsilon: float = option("optimizer", 1e-8, "Added to AdamW's denominator.")
    weight_decay: float = option(
        "optimizer", 0.0, "Decoupled weight decay of the matrices; biases and norms are spared."
    )
    max_grad_norm: float = option(
        "optimizer", 1.0, "Longer gradients are scaled to this norm. 0: no clipping."
    )

    # -- run
    num_train_epochs: float = option("run", 1.0, "Passes over the data set, rounded down to whole rollouts.")
    max_steps: int = option("run", -1, "Optimizer steps; takes the place of num_train_epochs. -1: not set.")
    stop_after_steps: int | None = option(
        "run",
        None,
        "End after this optimizer step and save, while schedules keep the length of the full run.",
    )
    max_minutes: float | None = option(
        "run", None, "End and save after this many minutes, between two optimizer steps."
    )
    seed: int = option(
        "run", 42, "Seed of sampling and of everything else that is random but the data order."
    )
    data_seed: int = option("run", ..., "Seed of the data order.", "seed")
    nproc_per_node: int = option("run", 1, "Training processes on this machine, one per GPU.")
    ignore_memory_forecast: bool = option(
        "run",
        False,
        "Start although the forecast says that memory (E211) or the disk (E407) is too small.",
    )

    # -- evaluation
    eval_strategy: Literal["no", "steps", "epoch"] = option(
        "evaluation",
        ...,
        "When to evaluate: never, every eval_steps optimizer steps, or after each epoch. The last step "
        "always evaluates, unless it is no.",
        "steps once there is something to evaluate on, else no",
    )
    eval_steps: int = option("evaluation", ..., "Optimizer steps between evaluations.", "save_steps")
    eval_on_start: bool = option("evaluation", True, "Evaluate before the first step too.")
    num_generations_eval: int = option(
        "evaluation", 1, "Completions sampled per prompt; above 1 there is pass@k beside the mean."
    )
    eval_temperature: float = option(
        "evaluation", ..., "Sampling temperature; 0 takes the likeliest token.", "temperature"
    )
    load_best_model_at_end: bool = option(
        "evaluation", False, "Keep the best checkpoint, and name it as the result of the run."
    )
    metric_for_best_model: str = option(
        "evaluation", "eval_reward", "What best means: a metric of the evaluation."
    )
    greater_is_better: bool = option(
        "evaluation",
        ...,
        "Whether a larger value of that metric is the better one.",
        "true, or false for losses, lengths and ratios of cut completions",
    )
    early_stopping_patience: int | None = option(
        "evaluation", None, "End after this many evaluations in a row without a better value of that metric."
    )

    # -- output
    output_dir: str = option(
        "output",
        ...,
        "Directory of the run: configuration, metrics, rollouts and checkpoints.",
        "runs/<model>-<dataset>-001, counted up to the first free number; when resuming, the run that is "
        "resumed",
    )
    overwrite_output_dir: bool = option(
        "output", False, "Delete the run that output_dir holds and start anew."
    )
    resume_from_checkpoint: str | None = option(
        "output",
        None,
        "Go on from a checkpoint: latest (or true) in output_dir, auto (latest, or a new run where there "
        "is none), or a checkpoint directory.",
    )
    allow_changes: bool = option(
        "output",
        False,
        "Resume although options that alter samples, gradients or learning rates have changed.",
    )
    save_steps: int = option(
        "output", 100, "Optimizer steps between checkpoints; the last step always saves one."
    )
    save_total_limit: int = option(
        "output", 2, "Checkpoints kept; older ones are deleted once the new one verifies."
    )
    save_only_model: bool = option("output", False, "Save weights only: small, but nothing to resume from.")
    keep_trainer_state: int = option(
        "output",
        1,
        "How many of the newest checkpoints keep the optimizer state; older ones keep the weights only.",
    )
    logging_steps: int = option(
        "output",
        1,
        "Optimizer steps between lines on the terminal and records in trackers; files get every step.",
    )
    report_to: list[Literal["none", "tensorboard", "wandb", "swanlab", "mlflow", "trackio"]] = option(
        "output",
        ["none"],
        "Trackers that get the metrics beside the files, one or several; all: those that are installed.",
    )
    run_name: str | None = option(
        "output", None, "Name of the run in the trackers. Not set: the last part of output_dir."
    )
    log_completions: int = option(
        "output", 0, "Completions shown as a table in the trackers at each logged step. true means 8."
    )
    rollout_log: str | int = option(
        "output", "all", "Which rollouts are written whole: all, none, or a number N for every N-th."
    )
    rollout_log_max_gb: float = option(
        "output", 10.0, "Size at which the oldest written rollouts are deleted, in GB."
    )
    replay_rollouts: str | None = option(
        "output", None, "Train on the rollouts written in this directory and sample nothing."
    )


OPTIONS: tuple[str, ...] = tuple(Config.model_fields)
"""Every option name, in the order of the groups."""

REQUIRED: tuple[str, ...] = ("model", "dataset", "reward_funcs")
"""What has neither a default nor a rule."""

DERIVED: tuple[str, ...] = tuple(
    name for name, field in Config.model_fields.items() if field.is_required() and name not in REQUIRED
)
"""What follows from other options when it is not typed."""


def _extra(name: str) -> dict[str, Any]:
    extra = Config.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def group_of(name: str) -> str:
    """Return the group that an option is shown and written under."""
    return str(_extra(name)["group"])


def rule_of(name: str) -> str:
    """Return the words for how an option follows from others; empty where it has a plain default."""
    return str(_extra(name)["rule"])


def doc_of(name: str) -> str:
    """Return the help text of an option."""
    return Config.model_fields[name].description or ""


def default_of(name: str) -> Any:
    """Return the default of an option; None for those that are required or derived."""
    field = Config.model_fields[name]
    return None if field.is_required() else field.default
