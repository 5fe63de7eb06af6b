"""Layouts: what each GPU holds of weights, gradients and optimizer state under ZeRO or FSDP, and of vLLM.

P parameters, N GPUs. Shares of a tensor's bytes on one GPU, from the paper (arXiv:1910.02054, section 5) and
DeepSpeed's page on memory: stage 1 splits the optimizer state into N parts, stage 2 gradients too, stage 3
weights too. Offloading the optimizer moves its state, and from stage 2 on the gradients, to CPU memory;
offloading parameters, which only stage 3 has, moves the weights too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from covey.options.schema import Config
from covey.plan.ahead import samples_apart
from covey.texts import joined, tr

Offload = Literal["none", "optimizer", "params"]
Engine = Literal["own", "colocate", "server"]
Held = Literal["weights", "gradients", "optimizer"]

STAGES = (0, 1, 2, 3)

PRESETS: Mapping[str, tuple[int, Offload]] = {
    "zero0": (0, "none"),
    "zero1": (1, "none"),
    "zero2": (2, "none"),
    "zero3": (3, "none"),
    "zero2_offload": (2, "optimizer"),
    "zero3_offload": (3, "params"),
}
"""ms-swift's names of its DeepSpeed configurations."""

OFFLOAD_BLOCKS: Mapping[Offload, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("offload_optimizer",),
    "params": ("offload_optimizer", "offload_param"),
}
"""The blocks of a DeepSpeed file that offload as much."""

_FIRST_STAGE: dict[Held, int] = {"optimizer": 1, "gradients": 2, "weights": 3}
# What FSDP calls a stage, over all GPUs and over those of a machine.
_OF_FSDP = {0: ("off", "off"), 2: ("shard_grad_op", "hybrid_shard_zero2"), 3: ("full_shard", "hybrid_shard")}
_OFFLOADED: dict[Offload, tuple[Held, ...]] = {
    "none": (),
    "optimizer": ("optimizer", "gradients"),
    "params": ("optimizer", "gradients", "weights"),
}

WEIGHT_BYTES, OPTIMIZER_BYTES = 2, 12
"""A parameter in bfloat16; its float32 master and AdamW's two moments."""

ENGINE_SHARE = 0.3
"""What vLLM takes of a GPU where nobody types it and the model is not known."""

HOST_MARGIN = 1.5
"""What DeepSpeed's estimator multiplies the machine's memory with, for buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFile:
    """A DeepSpeed configuration that a layout was read from: its JSON, and the numbers of its batch; None is
    "auto", or a number that it leaves out."""

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None

    @property
    def has_rows(self) -> bool:
        """Whether it says how many rows a forward pass has, or how many passes a step."""
        return self.train_micro_batch_size_per_gpu is not None or self.gradient_accumulation_steps is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Where weights, gradients and optimizer state are: the stage of ZeRO, what is offloaded, and the file
    that says so. With `fsdp`, FSDP splits as much as the stage says, if `is_hybrid` over one machine only."""

    stage: int = 0
    offload: Offload = "none"
    file: DeepSpeedFile | None = None
    fsdp: bool = False
    is_hybrid: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Devices of one kind, and how a model and an engine are placed on them. A number of 0 could not be read.

    is_here          whether they are this machine's; of them the memory that is free now is known, and their
                     number is that of the processes
    engine           own, that of the training process; colocate, vLLM on the same GPUs; server, on servers
    engine_share     of a GPU's memory that vLLM takes
    engine_parallel  GPUs that one vLLM spans
    engine_sleeps    whether it gives its memory back while the model trains
    file             the DeepSpeed file that says stage and offloading; None where it is the command
    fsdp             whether FSDP splits the model; else DeepSpeed does, from stage 1 on
    shard_gpus       GPUs over which it is split; 0 for all of them
    machine_gpus     GPUs of a machine; 0 for all of them
    """

    num_gpus: int
    gpu_bytes: int
    is_here: bool = False
    zero_stage: int = 0
    offload: Offload = "none"
    engine: Engine = "own"
    engine_share: float = ENGINE_SHARE
    engine_parallel: int = 1
    engine_sleeps: bool = False
    file: DeepSpeedFile | None = None
    fsdp: bool = False
    shard_gpus: int = 0
    machine_gpus: int = 0

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed holds the states; in stage 0 each process holds a whole model, without it."""
        return self.zero_stage > 0 and not self.fsdp

    @property
    def num_machines(self) -> int:
        """Machines that the GPUs make; 1 where they do not make whole ones."""
        each = self.machine_gpus or self.num_gpus
        return self.num_gpus // each if self.num_gpus % each == 0 else 1

    @property
    def is_known(self) -> bool:
        """Whether there is a machine to plan for."""
        return self.num_gpus > 0 and self.gpu_bytes > 0

    def on_gpu(self, num_bytes: int, held: Held) -> int:
        """What one GPU holds of so many bytes."""
        if self.is_offloaded(held):
            return 0
        # FSDP splits the weights in stage 2 as well, and gathers them for as long as a step computes.
        sharded = self.zero_stage >= (2 if self.fsdp and held == "weights" else _FIRST_STAGE[held])
        return math.ceil(num_bytes * Fraction(1, (self.shard_gpus or self.num_gpus) if sharded else 1))

    def is_offloaded(self, held: Held) -> bool:
        """Whether it lies in the machine's memory; the gradients of stage 1 stay, since they are whole."""
        if held == "gradients" and self.zero_stage < 2:
            return False
        return held in _OFFLOADED[self.offload]

    @property
    def engine_bytes(self) -> int:
        """What vLLM takes of a GPU while it samples."""
        return int(self.engine_share * self.gpu_bytes) if self.engine == "colocate" else 0

    def states_in_words(self) -> str:
        """How the model lies on the GPUs: `ZeRO-3, optimizer and weights offloaded`."""
        words = {
            "none": "",
            "optimizer": tr(", optimizer offloaded"),
            "params": tr(", optimizer and weights offloaded"),
        }
        stage = f"ZeRO-{self.zero_stage}" if self.zero_stage else "DDP (ZeRO-0)"
        if self.fsdp:
            stage = tr("FSDP over {gpus} GPUs", gpus=self.shard_gpus) if self.shard_gpus else "FSDP"
            stage += "" if self.zero_stage == 3 else tr(", weights kept from forward to backward")
        return joined("", [stage, words[self.offload]])

    def in_words(self) -> str:
        """The layout without its machine: states and engine."""
        sleeps = tr(", asleep while the model trains") if self.engine_sleeps else ""
        spans = (
            tr(" over {engine_parallel} GPUs", engine_parallel=self.engine_parallel)
            if self.engine_parallel > 1
            else ""
        )
        engine = {
            "own": "",
            "colocate": tr(
                "; vLLM on {engine_share:g} of each GPU{spans}{sleeps}",
                engine_share=self.engine_share,
                spans=spans,
                sleeps=sleeps,
            ),
            "server": tr("; sampling runs on servers, which use none of these GPUs"),
        }
        return joined("", [self.states_in_words(), engine[self.engine]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs that a plan is for in the place of this machine's, 0 where they could not be read."""

    num_gpus: int
    gpu_bytes: int = 0


def layout_of(
    config: Config,
    num_gpus: int,
    gpu_bytes: int,
    states: States,
    *,
    is_here: bool,
    gpus_of_a_machine: int = 0,
) -> Layout:
    """Return how a configuration lies on so many GPUs, of which a machine has some (0: all)."""
    num_shards = gpus_of_a_machine if states.is_hybrid and gpus_of_a_machine < num_gpus else 0
    return Layout(
        num_gpus=num_gpus,
        gpu_bytes=gpu_bytes,
        is_here=is_here,
        zero_stage=states.stage,
        offload=states.offload,
        file=states.file,
        fsdp=states.fsdp,
        shard_gpus=num_shards,
        machine_gpus=gpus_of_a_machine if gpus_of_a_machine < num_gpus else 0,
        engine="server"
        if config.rollout_servers or samples_apart(config)
        else config.vllm_mode
        if config.use_vllm
        else "own",
        engine_share=config.vllm_gpu_memory_utilization or ENGINE_SHARE,
        engine_parallel=config.vllm_tensor_parallel_size,
        engine_sleeps=config.vllm_enable_sleep_mode,
    )


GPUS_OF_A_MACHINE = 8
"""Of each of the machines that are planned, where there are more GPUs."""

THIS_MACHINE = Layout(num_gpus=1, gpu_bytes=0, is_here=True)
"""One process with the whole model."""


def states_typed(layout: Layout, stage: int, offload: Offload) -> dict[str, Any]:
    """Return the options that give a layout another stage or offloading; none for its own, and none where
    FSDP has no word for it."""
    if (stage, offload) == (layout.zero_stage, layout.offload):
        return {}
    if layout.fsdp:
        words = _OF_FSDP.get(stage)
        if words is None or offload == "optimizer" or (stage == 0 and offload != "none"):
            return {}
        edits: dict[str, Any] = {}
        if stage != layout.zero_stage:
            edits["fsdp"] = words[bool(layout.shard_gpus)]
        return edits | ({} if offload == layout.offload else {"fsdp_offload": offload == "params"})
    return {"deepspeed": deepspeed_word(stage, offload)}


def computes_low(config: Config, *, cuda: bool) -> bool:
    """Return whether the forward pass computes in bfloat16, which auto is on a GPU."""
    return config.torch_dtype == "bfloat16" or (config.torch_dtype == "auto" and cuda)


def deepspeed_word(stage: int, offload: Offload) -> str | None:
    """Return what `deepspeed` is for a stage and an offloading: a name, or JSON; None for stage 0."""
    if (stage, offload) == (0, "none"):
        return None
    names = [name for name, states in PRESETS.items() if states == (stage, offload)]
    zero = {"stage": stage} | {name: {"device": "cpu"} for name in OFFLOAD_BLOCKS[offload]}
    return names[0] if names else json.dumps({"zero_optimization": zero})


def state_bytes(parameters: int, layout: Layout, gradient_bytes: int) -> int:
    """What one GPU holds of the states of a model that is trained whole: weights, gradients, optimizer.

    DeepSpeed's own estimate has gradients of 2 bytes; covey sums them in 4.
    """
    return (
        layout.on_gpu(WEIGHT_BYTES * parameters, "weights")
        + layout.on_gpu(gradient_bytes * parameters, "gradients")
        + layout.on_gpu(OPTIMIZER_BYTES * parameters, "optimizer")
    )
