"""The optimizer, and how long and where a run goes."""

from __future__ import annotations

from typing import Any, Literal

from covey.options.declare import Options, only_with, option


class OptimizerOptions(Options):
    """Optimizer."""

    learning_rate: float = option(
        ...,
        "Peak learning rate of AdamW.",
        rule="1e-6, or 1e-5 with tuner_type lora",
        ge=0,
        why="A negative learning rate makes good completions less likely.",
        usual=1e-06,
        trl="1e-6",
        swift="1e-4 lora, 1e-5 full",
        hints=("lr",),
    )
    vit_lr: float | None = option(
        None,
        "Peak learning rate of the vision tower of a vision language model, under the same schedule. Not "
        "set: learning_rate.",
        gt=0,
        why="With vit_lr 0 the vision tower does not learn. freeze_vit does the same with less memory.",
        swift="learning_rate",
    )
    aligner_lr: float | None = option(
        None,
        "Peak learning rate of what joins the vision tower of a vision language model to its language "
        "model, under the same schedule. Not set: learning_rate.",
        gt=0,
        why="With aligner_lr 0 the aligner does not learn. freeze_aligner does the same with less memory.",
        swift="learning_rate",
    )
    lr_scheduler_type: Literal[
        "constant", "linear", "cosine", "constant_with_warmup", "cosine_with_min_lr"
    ] = option(
        "constant",
        "Learning rate schedule. Only with a constant learning rate can a finished run be extended "
        "without changing what its earlier steps would have been.",
        trl="linear",
        swift="cosine",
        rlhf="cosine",
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None,
        "Where the schedule cosine_with_min_lr ends, as JSON: min_lr, a learning rate, or min_lr_rate, a "
        "share of learning_rate.",
        trl="not set",
        swift="not set",
        read_if=only_with("lr_scheduler_type", "cosine_with_min_lr"),
    )
    warmup_steps: int = option(
        0,
        "Optimizer steps over which the learning rate rises from 0.",
        ge=0,
        why="It is a number of steps.",
        trl="0",
        swift="0",
    )
    warmup_ratio: float = option(
        0.0,
        "warmup_steps as a share of all steps, 0 to 1. Give only one of the two.",
        ge=0,
        le=1,
        why="It is a share of all steps.",
        trl="0",
        swift="0",
    )
    optim: Literal["adamw_torch", "adamw_8bit"] = option(
        "adamw_torch",
        "AdamW with 32-bit moments, or with the 8-bit moments of bitsandbytes (pip install "
        "'covey[8bit]'): 2 bytes a weight instead of 8, at the cost of rounding. Paged optimizers are not "
        "available; use adamw_8bit with offload_optimizer instead.",
        trl="adamw_torch_fused",
        swift="adamw_torch_fused",
        words={"adamw": "adamw_torch", "adamw_torch_fused": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit"},
    )
    adam_beta1: float = option(
        0.9,
        "Decay of AdamW's mean of gradients.",
        ge=0,
        lt=1,
        why="It is the decay rate of a running average.",
        trl="0.9",
        swift="0.9",
    )
    adam_beta2: float = option(
        0.999,
        "Decay of AdamW's mean of squared gradients.",
        ge=0,
        lt=1,
        why="It is the decay rate of a running average.",
        trl="0.999",
        swift="0.95",
        rlhf=0.95,
    )
    adam_epsilon: float = option(
        1e-8,
        "Number added to AdamW's denominator.",
        gt=0,
        why="At 0 a gradient of 0 would be divided by 0.",
        trl="1e-8",
        swift="1e-8",
    )
    weight_decay: float = option(
        0.0,
        "Decoupled weight decay of the matrices; biases and norms do not decay.",
        ge=0,
        why="A negative weight decay would make the weights grow with every step.",
        trl="0",
        swift="0.1",
        rlhf=0.1,
    )
    max_grad_norm: float = option(
        1.0,
        "Gradients with a larger norm are scaled down to this norm. 0: no clipping.",
        ge=0,
        why="It is the largest gradient norm; 0 turns clipping off.",
        trl="1",
        swift="1",
    )

    @property
    def betas(self) -> tuple[float, float]:
        """Return AdamW's two decays."""
        return self.adam_beta1, self.adam_beta2


class RunOptions(Options):
    """Run."""

    num_train_epochs: float = option(
        1.0,
        "Passes over the data set, rounded down to whole rollouts.",
        gt=0,
        why="The run would take no optimizer step.",
        trl="3",
        swift="3",
        rlhf=3.0,
        names=("max_epochs",),
        hints=("epochs",),
        resume="length",
    )
    max_steps: int = option(
        -1,
        "Number of optimizer steps; replaces num_train_epochs. -1: not set.",
        ge=1,
        also=(-1,),
        why="The run would take no optimizer step.",
        trl="-1",
        swift="-1",
        hints=("steps",),
        resume="length",
    )
    stop_after_steps: int | None = option(
        None,
        "End and save after this optimizer step; schedules still use the length of the full run.",
        ge=1,
        why="The run would take no optimizer step.",
        resume="free",
    )
    max_minutes: float | None = option(
        None,
        "End and save after this many minutes, between two optimizer steps.",
        gt=0,
        why="The run would take no optimizer step.",
        resume="free",
    )
    seed: int = option(
        42,
        "Seed of sampling and of all other randomness except the data order.",
        ge=0,
        lt=2**63,
        why="A seed is a whole number from 0 to 2^63 - 1.",
        trl="42",
        swift="42",
    )
    data_seed: int = option(
        ...,
        "Seed of the data order.",
        rule="seed",
        ge=0,
        lt=2**63,
        why="A seed is a whole number from 0 to 2^63 - 1.",
        usual=42,
        trl="seed",
        swift="42",
        names=("dataset_seed",),
    )
    nproc_per_node: int = option(
        1,
        "Number of training processes on this machine, one per GPU.",
        ge=1,
        why="At least one process has to train.",
        trl="given to accelerate",
        swift="NPROC_PER_NODE",
        hints=("nproc", "num_processes"),
        resume="split",
    )
    max_restarts: int = option(
        0,
        "How often the processes are restarted after one of them was killed or failed; the run then "
        "continues from its newest checkpoint.",
        ge=0,
        why="It is a number of restarts; 0 means no restart.",
        trl="given to torchrun",
        swift="given to torchrun",
        resume="free",
    )
    launcher: Literal["torchrun", "ray"] = option(
        "torchrun",
        "What starts the processes. torchrun: on this machine; ray: each process is a Ray actor. covey "
        "uses the Ray of RAY_ADDRESS, else one started here by `ray start`, else it starts one for this "
        "run (docs/ray.md).",
        resume="free",
    )
    ignore_memory_forecast: bool = option(
        False,
        "Start even if the forecast says that memory (E211) or the disk (E407) is too small.",
        resume="free",
    )
    guards: bool = option(
        True,
        "Stop a run that breaks an invariant of training (docs/guards.md). false: steps and rollouts are "
        "not checked, and a faulty run continues.",
        resume="free",
    )
    watchdog: bool = option(
        True,
        "End a run that makes no progress (F301, docs/hangs.md). false: a hung run stays until somebody "
        "ends it.",
        resume="free",
    )
