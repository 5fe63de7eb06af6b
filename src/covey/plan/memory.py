"""The memory of each phase of a run in one process: what is held, what is worked with, which phase binds.

Bytes beyond what Python and its libraries take. Weights are held in the dtype that is computed in, with
float32 masters beside them where that is lower; gradients and AdamW's moments are float32. Every completion
is counted at its longest, so a run whose completions end earlier takes less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from covey.config.schema import Config
from covey.environment import KEPT_KERNELS
from covey.plan.activations import (
    CLOSED_FORM,
    FLOAT,
    PassSize,
    Training,
    head_block,
    kept_bytes,
    layer_bytes,
    mask_bytes,
    pass_sizes,
    working_bytes,
)
from covey.plan.disk import size
from covey.plan.facts import Facts, ModelSizes, RewardModelFacts
from covey.plan.layout import Layout
from covey.plan.memory_rollout import planned_layout, rollout_parts
from covey.plan.recompute import IN_WORDS, KINDS, Recompute, choose_recompute

LIBRARIES = 500_000_000
"""Python, torch and transformers in one process."""

TIGHT = 0.9
"""The share of free memory that a run may take without a word."""

_LOW, _MOMENTS = 2, 2 * FLOAT
_HEAD_BLOCKS = 3
# What torch and oneDNN load and set aside on a CPU once they compute.
_AT_WORK = 90_000_000
# On a CPU, oneDNN compiles a bfloat16 product for each shape, keeps some of them, and a decoding step has two
# of new shapes. Of those that it does not keep, up to 1,024 in all, a share stays with the heap (measured on
# models of 58 and 119 M weights).
_KERNEL_BYTES, _KERNELS_PER_STEP, _MAX_KERNELS, _LEFT = 550_000, 2, 1024, 0.4
# Of the activations of all layers, what the C library's heap keeps of blocks freed between them: glibc before
# 2.38 seldom fits aligned blocks, as torch asks for, into freed ones. Measured with 2.36 on models of 58 and
# 119 M weights; what an adapter adds is freed at once, hence the more. Later passes find fewer of its sizes.
_FRAGMENTED_FULL: dict[Recompute, float] = {"none": 0.6, "selective": 0.5, "full": 0.7}
_FRAGMENTED_LORA: dict[Recompute, float] = {"none": 0.85, "selective": 0.5, "full": 0.5}
_FRAGMENTED_LATER = 0.3
# DeepSpeed's reduce_bucket_size, twice, since the next one fills while one is reduced; and what NCCL and
# cuBLAS set aside, which with LIBRARIES makes the 1.5 GB at which reports begin.
_BUCKET, _BUCKETS, _COMMUNICATION = 500_000_000, 2, 1_000_000_000
_SHOWN = 0.02
# The phases between a rollout and the next one.
_AFTER = ("annotate", "update", "step", "save")
# Of a reward model's forward pass: its tokens (`covey.rewards.apart`), and the outputs of one layer that are
# there at a time, as wide as the model and as its MLP.
_REWARD_TOKENS, _WIDTHS, _MLP_WIDTHS = 8192, 6, 3
# What goes with the weights where these are offloaded.
_OFFLOADED = ("weights", "adapters", "reference", "reference in float32", "reference adapter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The bytes that a phase holds at its fullest, by part."""

    name: str
    parts: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The phases of a run in one process; none where model or prompts are not known.

    `needed_bytes` are those of all processes that share the memory of which `free_bytes` are free: one on a
    GPU, all of them on a CPU, each with its libraries. `recompute` says which activations are computed again.
    `is_exact` is False for a family of models whose layers are not known by the line; its activations are
    counted twice. `host_bytes` are what all processes keep in the machine's memory under the facts' layout.
    `rests` says that the engine lets its cache go after each rollout.
    """

    phases: tuple[Phase, ...]
    needed_bytes: int
    free_bytes: int | None
    recompute: Recompute
    is_exact: bool
    host_bytes: int = 0
    rests: bool = False

    @property
    def binding(self) -> Phase:
        """The phase with the most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def share(self) -> float:
        """What is needed of what is free; 0 where either is not known."""
        return self.needed_bytes / self.free_bytes if self.phases and self.free_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "phases": {p.name: {"bytes": p.num_bytes, "parts": dict(p.parts)} for p in self.phases},
            "binding": self.binding.name if self.phases else None,
            "peak_bytes": self.binding.num_bytes if self.phases else None,
            "needed_bytes": self.needed_bytes if self.phases else None,
            "free_bytes": self.free_bytes,
            "recompute": self.recompute,
            "is_exact": self.is_exact,
            "host_bytes": self.host_bytes,
            "engine_rests": self.rests,
        }

    def in_words(self) -> list[str]:
        """Return the numbers as lines for people."""
        if not self.phases:
            return []
        binding = self.binding
        phases = ", ".join(f"{p.name} {size(p.num_bytes) if p.num_bytes else 'nothing'}" for p in self.phases)
        large = {n: b for n, b in binding.parts.items() if b >= _SHOWN * binding.num_bytes}
        parts = " + ".join(
            f"{name} {size(b)}" for name, b in sorted(large.items(), key=lambda part: -part[1])
        )
        again = [] if self.recompute == "none" else [IN_WORDS[self.recompute]]
        rests = ["the KV cache is let go before each update, which needs its memory"] if self.rests else []
        return [phases, f"the most in {binding.name}: {parts}", *again, *rests, self.total_in_words()]

    def total_in_words(self) -> str:
        """Return the peak, and what is free, as one line."""
        about = "about" if self.is_exact else "at most, for a model of an unknown family, about"
        free = "" if self.free_bytes is None else f"; {size(self.free_bytes)} are free"
        return f"{about} {size(self.needed_bytes)} with Python and its libraries{free}"


def memory_plan(config: Config, facts: Facts) -> MemoryPlan:
    """Return what the phases of a configuration take."""
    recompute, rests = recompute_of(config, facts), engine_rests(config, facts)
    phases = _phases(config, facts, training_of(config, facts, recompute), rests=rests)
    return MemoryPlan(
        phases=phases,
        needed_bytes=_needed(facts, max(p.num_bytes for p in phases)) if phases else 0,
        free_bytes=facts.free_memory_bytes,
        recompute=recompute,
        is_exact=facts.model_sizes is None or facts.model_sizes.family in CLOSED_FORM,
        host_bytes=_host_bytes(config, facts, training_of(config, facts, recompute)),
        rests=rests,
    )


def recompute_of(config: Config, facts: Facts) -> Recompute:
    """Return which activations a run computes again: what the plan counts on, and what the run does.

    `gradient_checkpointing` auto goes by the phase `update` beside the memory that is free.
    """
    needed: dict[Recompute, int] = {}
    for kind in KINDS:
        for phase in _phases(config, facts, training_of(config, facts, kind)):
            if phase.name == "update":
                needed[kind] = _needed(facts, phase.num_bytes)
    free = facts.free_memory_bytes
    limit = None if free is None else int(TIGHT * free)
    return choose_recompute(config.gradient_checkpointing, needed or None, limit)


def engine_rests(config: Config, facts: Facts) -> bool:
    """Return whether the native engine lets its cache and its recordings go after each rollout: where what
    follows a rollout does not fit beside them, whatever is computed again. They are made anew then."""
    if config.engine != "native" or planned_layout(facts).engine != "own" or facts.free_memory_bytes is None:
        return False
    how = training_of(config, facts, recompute_of(config, facts))
    kept, rested = (
        max((p.num_bytes for p in _phases(config, facts, how, rests=rests) if p.name in _AFTER), default=0)
        for rests in (False, True)
    )
    is_tight = _needed(facts, kept) > int(TIGHT * facts.free_memory_bytes)
    return is_tight and kept - rested > _SHOWN * kept


def _needed(facts: Facts, num_bytes: int) -> int:
    """The bytes of all processes that share the memory, with their libraries."""
    sharing = 1 if facts.cuda else facts.num_processes
    return sharing * (num_bytes + LIBRARIES)


def training_of(config: Config, facts: Facts, recompute: Recompute) -> Training:
    """Return what of a configuration decides the bytes of weights and activations; `torch_dtype` auto is
    bfloat16 on a GPU."""
    is_low = config.torch_dtype == "bfloat16" or (config.torch_dtype == "auto" and bool(facts.cuda))
    return Training(
        element=_LOW if is_low else FLOAT,
        full=config.tuner_type != "lora",
        recompute=recompute,
        rank=config.lora_rank,
        dora=config.use_dora,
        cuda=bool(facts.cuda),
        offload=config.activation_offloading and bool(facts.cuda),
        absorbs=facts.num_processes == 1 and facts.layout is None,
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    """Counts of what is trained: `low` in a lower dtype with masters beside it, `single` in float32 alone."""

    low: int
    single: int

    @property
    def trained(self) -> int:
        return self.low + self.single


def _phases(config: Config, facts: Facts, how: Training, *, rests: bool = False) -> tuple[Phase, ...]:
    """The phases in the order of a run; what one leaves behind is held by those that follow, but for the
    cache of an engine that `rests`. None where model or prompts are not known."""
    model, prompt = facts.model_sizes, facts.longest_prompt
    if prompt is None and facts.num_rows is None:
        prompt = config.max_length
    if model is None or prompt is None:
        return ()
    layout = planned_layout(facts)
    weights = _weights(model, how)
    beside = _beside(facts)
    held = _held(config, model, how, weights, layout) | beside
    phases = [Phase(name="load", parts=_load(model, how, held, layout) | beside)]
    if facts.layout is not None and facts.num_processes > 1:
        held["communication"] = _COMMUNICATION
    cache, rollout = rollout_parts(config, facts, how, model, prompt, sum(held.values()))
    held["moments"] = layout.on_gpu(_MOMENTS * weights.trained, "optimizer")
    if not how.cuda:
        held["libraries at work"] = _AT_WORK
    if rollout and how.element != FLOAT and not facts.cuda:
        num_kernels = min(_MAX_KERNELS, _KERNELS_PER_STEP * config.max_completion_length)
        kept = min(KEPT_KERNELS, num_kernels)
        held["compiled kernels"] = int(_KERNEL_BYTES * (kept + _LEFT * (num_kernels - kept)))
    if rollout:
        phases.append(Phase(name="rollout", parts=held | cache | rollout))
    if (config.engine == "native" and not rests) or layout.engine != "own":
        held |= cache
    gathered = _gathered_layer(model, how, layout)
    passes = pass_sizes(config, facts, prompt)
    if _has_kl(config) or _steps_per_rollout(config) > 1:
        work = max((_annotation(model, p, how) for p in passes), key=lambda parts: sum(parts.values()))
        phases.append(Phase(name="annotate", parts=held | gathered | work))
    if facts.num_processes > 1:
        held |= _buckets(how, weights, layout)
    works = [_update(model, p, how, weights, layout) for p in passes]
    fullest = max(works, key=lambda parts: sum(parts.values()))
    phases.append(Phase(name="update", parts=held | gathered | fullest))
    gradients = {"gradients": layout.on_gpu(FLOAT * weights.trained, "gradients")}
    phases.append(Phase(name="step", parts=held | gradients))
    if facts.layout is not None:
        phases.append(Phase(name="publish", parts=held | _publish(model, how, layout)))
    whole = {"gathered tensor": FLOAT * model.vocabulary * model.hidden} if layout.zero_stage else {}
    phases.append(Phase(name="save", parts=held | whole))
    return tuple(phases)


def reward_model_bytes(model: RewardModelFacts, *, cuda: bool) -> int:
    """What the process of a reward model takes: libraries, weights, and its fullest forward pass."""
    # Of a model that is still on a hub the bytes of its files are known, most often of 2 a weight.
    weights = model.file_bytes if cuda else FLOAT * (model.parameters or model.file_bytes // _LOW)
    element = weights // max(1, model.parameters)
    width = _WIDTHS * model.hidden + _MLP_WIDTHS * model.intermediate
    return LIBRARIES + weights + _REWARD_TOKENS * width * element


def _beside(facts: Facts) -> dict[str, int]:
    """The processes of reward models, which are there from the trial to the end."""
    each = [reward_model_bytes(m, cuda=bool(facts.cuda)) for m in facts.reward_models if m.problem is None]
    return {"reward models": sum(each)} if each else {}


def _load(model: ModelSizes, how: Training, held: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """The fullest moment of the load: the model as it was saved beside its copies, which DeepSpeed makes part
    by part; of the rows that prove the layout the head alone gets a gradient."""
    if layout.zero_stage:
        return {name: held[name] for name in ("weights", "masters", "reference") if name in held}
    start = {"weights in float32": FLOAT * model.parameters, "probe": _of_head(model, how, how.element)}
    if not how.full:
        # The base of an adapter is cast tensor by tensor, in the machine's memory, before it goes to a GPU.
        return dict(held) | {"probe": start["probe"]} if how.cuda else start | {"adapters": held["adapters"]}
    if "reference" in held:
        start["reference in float32"] = FLOAT * model.parameters
    if how.element != FLOAT:
        start["weights"] = how.element * model.parameters
    return start


def _gathered_layer(model: ModelSizes, how: Training, layout: Layout) -> dict[str, int]:
    """The layer that stage 3 puts together to compute it, with its gradient: the largest one."""
    if layout.zero_stage < 3:
        return {}
    ends = model.vocabulary * model.hidden
    inner = (model.parameters - ends * (1 if model.tied else 2)) // model.layers
    return {"gathered layer": 2 * how.element * max(ends, inner)}


def _buckets(how: Training, weights: _Weights, layout: Layout) -> dict[str, int]:
    """What gradients travel between the processes in."""
    if not layout.zero_stage:
        return {"DDP buckets": how.element * weights.low + FLOAT * weights.single}
    return {"reduce buckets": _BUCKETS * how.element * min(_BUCKET, weights.trained)}


def _publish(model: ModelSizes, how: Training, layout: Layout) -> dict[str, int]:
    """What brings new weights to the engine: vLLM gets one tensor after the other, and is awake for it."""
    if layout.engine == "own":
        return {}
    parts = {"gathered tensor": how.element * model.vocabulary * model.hidden}
    if layout.engine_sleeps:
        parts["engine"] = _LOW * model.parameters // layout.engine_parallel
    return parts


def _host_bytes(config: Config, facts: Facts, how: Training) -> int:
    """What offloading keeps in the machine's memory, of all processes together."""
    model, layout = facts.model_sizes, planned_layout(facts)
    if model is None:
        return 0
    weights = _weights(model, how)
    held = _held(config, model, how, weights, replace(layout, offload="none", zero_stage=0))
    num_bytes = 0
    if layout.is_offloaded("weights"):
        num_bytes += sum(held.get(name, 0) for name in _OFFLOADED)
    if layout.is_offloaded("gradients"):
        num_bytes += FLOAT * weights.trained
    if layout.is_offloaded("optimizer"):
        num_bytes += _MOMENTS * weights.trained + held.get("masters", 0)
    return num_bytes


def _weights(model: ModelSizes, how: Training) -> _Weights:
    low, full = (model.parameters, 0) if how.full else (model.saved_parameters, model.adapter_parameters)
    return _Weights(0, low + full) if how.element == FLOAT else _Weights(low, full)


def _held(
    config: Config, model: ModelSizes, how: Training, weights: _Weights, layout: Layout
) -> dict[str, int]:
    """What stays from the load to the end, but for the moments."""
    held = {"weights": layout.on_gpu(how.element * model.parameters, "weights")}
    if not how.full:
        adapters = FLOAT * model.adapter_parameters + how.element * model.saved_parameters
        held["adapters"] = layout.on_gpu(adapters, "weights")
    if weights.low:
        held["masters"] = layout.on_gpu(FLOAT * weights.low, "optimizer")
    # A policy with an adapter is its own reference, unless that follows the policy: then it has an adapter.
    if _has_kl(config) and how.full:
        held["reference"] = layout.on_gpu(how.element * model.parameters, "weights")
    if config.sync_ref_model and _has_kl(config):
        held |= _moving(how, weights, layout)
    return held


def _has_kl(config: Config) -> bool:
    return bool(config.beta or config.beta_end)


def _moving(how: Training, weights: _Weights, layout: Layout) -> dict[str, int]:
    """What a reference that follows the policy keeps: float32 of all that is trained, which in full training
    in float32 the reference is."""
    if how.full:
        low = FLOAT * weights.low
        return {"reference in float32": layout.on_gpu(low, "weights")} if low else {}
    adapters = FLOAT * weights.trained + how.element * weights.low
    return {"reference adapter": layout.on_gpu(adapters, "weights")}


def _steps_per_rollout(config: Config) -> int:
    return config.num_iterations * config.steps_per_generation // max(1, config.gradient_accumulation_steps)


def _annotation(model: ModelSizes, size: PassSize, how: Training) -> dict[str, int]:
    """A forward pass of which nothing is kept."""
    block = head_block(model, size.trained, cuda=how.cuda)
    work = max(working_bytes(model, size, how), _HEAD_BLOCKS * block.num_bytes)
    return {"forward pass": mask_bytes(size, how) + work}


def _update(
    model: ModelSizes, size: PassSize, how: Training, weights: _Weights, layout: Layout
) -> dict[str, int]:
    """The fullest moment of a backward pass: at its start all activations are held, at its end all
    gradients."""
    before = layout.on_gpu(FLOAT * weights.trained, "gradients") if size.later else 0
    of_head = _of_head(model, how, how.element)
    kept = kept_bytes(model, size, how)
    layer = working_bytes(model, size, how)
    if how.recompute != "none":
        layer += layer_bytes(model, size, how)
    if how.offload:
        layer += mask_bytes(size, how)
    start = {"gradients": before, "activations": kept, "head": of_head + _head(model, size, how)}
    inside = {"gradients": before + of_head, "activations": kept + layer}
    end = {"gradients": _gradients(how, weights, layout)}
    # Of a tied head the gradient waits for that of the embedding, and both are added to that of a master.
    adding = model.vocabulary * model.hidden * FLOAT if weights.low else 0
    end["head"] = of_head * (2 if before and not weights.low else 1) + adding
    fullest = max((start, inside, end), key=lambda parts: sum(parts.values()))
    if not how.cuda:
        share = (_FRAGMENTED_FULL if how.full else _FRAGMENTED_LORA)[how.recompute]
        if size.later and how.recompute == "none":
            share += _FRAGMENTED_LATER
        fullest["fragmentation"] = round(share * model.layers * layer_bytes(model, size, how))
    return fullest


def _gradients(how: Training, weights: _Weights, layout: Layout) -> int:
    """What is held of gradients at the end of a backward pass: float32 sums, and those of lower precision
    that come to them, unless these go at once: in one process, and from stage 2 on when they are reduced."""
    lower = how.element * weights.low if layout.zero_stage < 2 and not how.absorbs else 0
    return layout.on_gpu(FLOAT * weights.trained, "gradients") + lower


def _head(model: ModelSizes, size: PassSize, how: Training) -> int:
    """The head's backward pass: blocks of logits, the gradient of the hidden states, and of its own a block
    as it comes and as a sum."""
    block = head_block(model, size.trained, cuda=how.cuda)
    low = how.element if how.element != FLOAT else 0
    num_bytes = _HEAD_BLOCKS * block.num_bytes + size.trained * model.hidden * (FLOAT + low)
    if _trains_head(model, how):
        num_bytes += block.words * model.hidden * (FLOAT + how.element)
    return num_bytes


def _trains_head(model: ModelSizes, how: Training) -> bool:
    return how.full or (bool(model.saved_parameters) and not model.tied)


def _of_head(model: ModelSizes, how: Training, element: int) -> int:
    """The gradient of the head."""
    return model.vocabulary * model.hidden * element if _trains_head(model, how) else 0
