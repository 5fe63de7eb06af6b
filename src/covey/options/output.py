"""Evaluations, and what a run writes."""

from __future__ import annotations

from typing import Literal

from covey.options.declare import Options, PathKind, only_with, option


class EvaluationOptions(Options):
    """Evaluation."""

    eval_strategy: Literal["no", "steps", "epoch", "asked"] = option(
        ...,
        "When to evaluate: never, every eval_steps optimizer steps, or after each epoch; the last step is "
        "then evaluated too. asked: only where a callback of covey.trl asks for it.",
        rule="steps if there is data for evaluation, else no",
        trl="no",
        swift="save_strategy",
        words={"false": "no", "none": "no", "epochs": "epoch"},
        names=("evaluation_strategy",),
        resume="free",
    )
    eval_steps: int = option(
        ...,
        "Optimizer steps between evaluations.",
        rule="save_steps",
        ge=1,
        why="It is a number of steps.",
        usual=100,
        trl="logging_steps",
        swift="save_steps",
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    eval_on_start: bool = option(
        True,
        "Also evaluate before the first step.",
        trl="false",
        swift="false",
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    num_generations_eval: int = option(
        1,
        "Number of completions per prompt; above 1 pass@k is reported as well as the mean.",
        ge=1,
        why="Each prompt needs at least one completion.",
        trl="num_generations",
        swift="num_generations",
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    eval_temperature: float = option(
        ...,
        "Sampling temperature of evaluations; 0 takes the most likely token.",
        rule="temperature",
        ge=0,
        why="At 0 the most likely token is taken; a temperature cannot be negative.",
        usual=1.0,
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    eval_top_p: float = option(
        ...,
        "top_p of evaluations. Nothing is filtered at eval_temperature 0.",
        rule="top_p",
        gt=0,
        le=1,
        why="top_p 0.9 samples from the most probable tokens that together have a probability of 0.9; 1 "
        "turns it off.",
        usual=1.0,
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    eval_top_k: int = option(
        ...,
        "top_k of evaluations.",
        rule="top_k",
        ge=0,
        also=(-1,),
        why="top_k 50 samples from the 50 most probable tokens; 0 or -1 turns it off.",
        usual=0,
        words={"-1": 0},
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    eval_min_p: float = option(
        ...,
        "min_p of evaluations.",
        rule="min_p",
        ge=0,
        le=1,
        why="min_p 0.1 leaves out tokens less than a tenth as probable as the most probable one; 0 turns it "
        "off.",
        usual=0.0,
        resume="free",
        read_if=only_with("eval_strategy", "steps", "epoch"),
    )
    load_best_model_at_end: bool = option(
        False,
        "Keep the best checkpoint, and report it as the result of the run.",
        trl="false",
        swift="false",
        resume="free",
    )
    metric_for_best_model: str = option(
        "eval_reward",
        "The evaluation metric that decides which checkpoint is best.",
        trl="loss",
        swift="reward",
        resume="free",
    )
    greater_is_better: bool = option(
        ...,
        "Whether a larger value of metric_for_best_model is better.",
        rule="true; false for losses, lengths and shares of cut completions",
        trl="from the metric",
        swift="from the metric",
        resume="free",
    )
    early_stopping_patience: int | None = option(
        None,
        "End the run after this many evaluations in a row without a better value of metric_for_best_model.",
        ge=1,
        why="It is a number of evaluations.",
        swift="not set",
        names=("early_stop_interval",),
        resume="free",
    )


class OutputOptions(Options):
    """Output, saving and resuming."""

    output_dir: str = option(
        ...,
        "Directory of the run: configuration, metrics, rollouts and checkpoints.",
        rule=(
            "runs/<model>-<dataset>-001, or the next free number; when resuming, the directory of the "
            "resumed run"
        ),
        trl="trainer_output",
        swift="output/MODEL/vN-DATE",
        hints=("out",),
        resume="free",
        path=PathKind("E403"),
    )
    overwrite_output_dir: Literal["false", "true", "aside"] = option(
        "false",
        "What to do with a run that output_dir already holds. true: delete it; aside: move its files into a "
        "directory earlier-N beside the new ones, as the trainer of covey.trl does; false: refuse to start.",
        words={"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"},
        alone="true",
        resume="free",
    )
    resume_from_checkpoint: str | None = option(
        None,
        "Continue from a checkpoint: latest (or true), the newest one in output_dir; auto, latest if "
        "there is one, otherwise a new run; or a checkpoint directory.",
        trl="not set",
        swift="not set",
        hints=("resume",),
        words={"true": "latest", "latest": "latest", "auto": "auto", "false": None},
        alone="latest",
        resume="free",
        path=PathKind("E404"),
    )
    allow_changes: bool = option(
        False,
        "Resume even if options that affect samples, gradients or learning rates have changed.",
        resume="free",
    )
    save_steps: int = option(
        100,
        "Optimizer steps between checkpoints; a checkpoint is always saved at the last step.",
        ge=1,
        why="It is a number of steps; the last one is always saved.",
        trl="500",
        swift="500",
        resume="free",
    )
    save_total_limit: int = option(
        2,
        "Number of checkpoints to keep; older ones are deleted after the new one has been verified.",
        ge=1,
        why="The last checkpoint holds the trained model, so at least one has to be kept.",
        trl="all",
        swift="all",
        resume="free",
    )
    save_only_model: bool = option(
        False,
        "Save weights only: this takes little space, but a run cannot resume from such a checkpoint.",
        trl="false",
        swift="false",
        resume="free",
    )
    keep_trainer_state: int = option(
        1,
        "How many of the newest checkpoints keep the optimizer state; older ones keep the weights only.",
        ge=0,
        why="It is a number of checkpoints; 0 keeps nothing to resume from.",
        resume="free",
    )
    logging_steps: int = option(
        1,
        "Optimizer steps between lines on the terminal and records in trackers; the files contain every "
        "step.",
        ge=1,
        why="It is a number of steps.",
        trl="10",
        swift="5",
        resume="free",
    )
    report_to: list[Literal["none", "tensorboard", "wandb", "swanlab", "mlflow", "trackio"]] = option(
        ["none"],
        "Trackers that get the metrics in addition to the files, one or several; all: every installed one.",
        trl="none",
        swift="tensorboard",
        words={"null": "none", "false": "none"},
        resume="free",
    )
    run_name: str | None = option(
        None,
        "Name of the run in trackers. Not set: the last part of output_dir.",
        trl="not set",
        swift="not set",
        resume="free",
    )
    log_completions: int = option(
        0,
        "Number of completions that trackers show as a table at each logged step. true means 8.",
        ge=0,
        why="It is a number of completions; 0 sends none.",
        trl="false",
        swift="false",
        words={"true": 8, "false": 0},
        alone="true",
        resume="free",
    )
    rollout_log: str | int = option(
        "all",
        "Which rollouts are written to files: all, none, or a number N for every N-th rollout.",
        ge=1,
        also=("all", "none"),
        why="A number N means that every N-th rollout is written, so it starts at 1.",
        words={"true": "all", "all": "all", "false": "none", "none": "none"},
        resume="free",
    )
    rollout_log_max_gb: float = option(
        10.0,
        "Total size in GB above which the oldest written rollouts are deleted.",
        gt=0,
        why="No written rollout would be kept; `--rollout_log none` writes none at all.",
        resume="free",
    )
    replay_rollouts: str | None = option(
        None,
        "Train on the rollouts in this directory instead of sampling.",
        path=PathKind("E406"),
    )
