"""The memory of each phase of a run in one process: what is held, what is worked with, which phase binds.

Bytes beyond what Python and its libraries take. Weights are held in the dtype that is computed in, with
float32 masters beside them where that is lower; gradients and AdamW's moments are float32. Every completion
is counted at its longest, so a run whose completions end earlier takes less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.activations import FLOAT, Training, fullest_pass
from covey.plan.disk import size
from covey.plan.facts import Facts, RewardModelFacts
from covey.plan.layout import computes_low
from covey.plan.levers import REFERENCE, parts_away
from covey.plan.memory_gathered import (
    LOW,
    bucket_parts,
    computing_parts,
    gathering_of,
    loading_parts,
    publish_parts,
)
from covey.plan.memory_kept import pass_set_parts, rollout_set_bytes, rollout_set_parts, set_bytes
from covey.plan.memory_rollout import least_parts, planned_layout, rollout_parts
from covey.plan.memory_training import (
    annotation_parts,
    copies_of_deepspeed,
    has_kl,
    held_parts,
    host_bytes_of,
    joining_bytes,
    lever_bytes,
    step_parts,
    update_parts,
    weights_of,
)
from covey.plan.memory_vision import seeing_parts
from covey.plan.recompute import IN_WORDS, KINDS, Recompute, choose_recompute
from covey.texts import joined, tr

LIBRARIES = 500_000_000
"""Python, torch and transformers in one process."""

STATES = (
    *("weights", "gathered weights", "adapters", "masters", "moments", "gradients", "copy while loading"),
    *("optimizer state of some layers", *REFERENCE),
)
"""Parts that a run holds whatever its batch and its lengths are."""

PARTS: Mapping[str, str] = {
    str(text): text
    for text in (
        *(tr("weights"), tr("gathered weights"), tr("adapters"), tr("masters"), tr("moments")),
        *(tr("gradients"), tr("optimizer state of some layers"), tr("reference"), tr("reference adapter")),
        *(tr("reference in float32"), tr("gathered layers"), tr("gathered tensor")),
        *(tr("KV cache"), tr("KV cache of one row"), tr("sampling"), tr("merged weights"), tr("engine")),
        *(tr("communication"), tr("copies in CPU memory"), tr("activations"), tr("gradient of the head")),
        *(tr("forward pass"), tr("DDP buckets"), tr("reduce buckets"), tr("reduced layer")),
        *(tr("reward models"), tr("copy while loading"), tr("images")),
        *(tr("filters of sampling"), tr("kept sets"), tr("kept sets of a pass")),
    )
}
"""The parts of all phases, as people are told of them."""

TIGHT = 0.9
"""The share of free memory that a run may take without a word."""

# What NCCL and cuBLAS set aside, which with LIBRARIES makes the 1.5 GB at which reports begin.
_COMMUNICATION = 1_000_000_000
_SHOWN = 0.02
# The phases between a rollout and the next one.
_AFTER = ("annotate", "update", "step")
# Of a reward model's forward pass: its tokens (`covey.rewards.apart`), and the outputs of one layer that are
# there at a time, as wide as the model and as its MLP.
_REWARD_TOKENS, _WIDTHS, _MLP_WIDTHS = 8192, 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The bytes that a phase holds at its fullest, by part; `at_least` are those that an engine holds however
    few completions it samples."""

    name: str
    parts: Mapping[str, int]
    at_least: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def states(self) -> Mapping[str, int]:
        """The parts that depend on no batch, with what an engine holds at the least."""
        return {**{name: num for name, num in self.parts.items() if name in STATES}, **self.at_least}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The phases of a run in one process; none where model or prompts are not known.

    `needed_bytes` are those of all processes that share the memory of which `free_bytes` are free: one on a
    GPU, all of them on a CPU, each with its libraries; `limit_bytes` is what a run may take of the free ones
    without a word. `recompute` says which activations are computed again.
    `host_bytes` are what all processes keep in the machine's memory under the facts' layout, and
    `load_host_bytes` what those of a machine take of it while they load.
    `rests` says that the engine lets its cache go after each rollout. `set_bytes` are those of a token's kept
    set at the most, and `rollout_set_bytes` of all sets of a rollout, in the machine's memory.
    """

    phases: tuple[Phase, ...]
    needed_bytes: int
    free_bytes: int | None
    recompute: Recompute
    limit_bytes: int | None = None
    host_bytes: int = 0
    load_host_bytes: int = 0
    rests: bool = False
    set_bytes: int = 0
    rollout_set_bytes: int = 0

    @property
    def binding(self) -> Phase:
        """The phase with the most."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def fits(self) -> bool:
        """Whether the run takes no more than its limit; False where either is not known."""
        return bool(self.phases) and self.limit_bytes is not None and self.needed_bytes <= self.limit_bytes

    @property
    def largest_states(self) -> Phase:
        """The phase whose states take the most."""
        return max(self.phases, key=lambda phase: sum(phase.states.values()))

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
            "host_bytes": self.host_bytes,
            "load_host_bytes": self.load_host_bytes,
            "engine_rests": self.rests,
            "kept_set_bytes": self.rollout_set_bytes,
        }

    def in_words(self) -> list[str]:
        """Return the numbers as lines for people."""
        if not self.phases:
            return []
        binding = self.binding
        phases = joined(
            ", ",
            [
                tr("{name} {size}", name=p.name, size=size(p.num_bytes) if p.num_bytes else tr("nothing"))
                for p in self.phases
            ],
        )
        large = {n: b for n, b in binding.parts.items() if b >= _SHOWN * binding.num_bytes}
        by_size = sorted(large.items(), key=lambda part: -part[1])
        parts = joined(" + ", [tr("{name} {size}", name=PARTS[name], size=size(b)) for name, b in by_size])
        again = [] if self.recompute == "none" else [IN_WORDS[self.recompute]]
        loading = [] if not self.load_host_bytes else [self._loading()]
        rests = [tr("the KV cache is freed before each update, which needs its memory")] if self.rests else []
        return [
            phases,
            tr("the largest phase is {name}: {parts}", name=binding.name, parts=parts),
            *again,
            *rests,
            *([self._kept()] if self.set_bytes else []),
            *loading,
            self.total_in_words(),
        ]

    def _kept(self) -> str:
        return tr(
            "the tokens that filters keep take at most {each:,} bytes for a sampled token, {size} of the "
            "machine's memory for a rollout of a process",
            each=self.set_bytes,
            size=size(self.rollout_set_bytes),
        )

    def _loading(self) -> str:
        return tr(
            "the files hold experts one by one: while it loads, each process joins the whole model in "
            "float32, together {size} of a machine's memory",
            size=size(self.load_host_bytes),
        )

    def total_in_words(self) -> str:
        """Return the peak, and what is free, as one line."""
        free = "" if self.free_bytes is None else tr("; {size} are free", size=size(self.free_bytes))
        return tr("about {size} with Python and its libraries{free}", size=size(self.needed_bytes), free=free)


def memory_plan(config: Config, facts: Facts) -> MemoryPlan:
    """Return what the phases of a configuration take."""
    recompute, rests = recompute_of(config, facts), engine_rests(config, facts)
    adds_up = facts.layout.fsdp and not reduces_each(config, facts)
    how = training_of(config, facts, recompute)
    phases = _phases(config, facts, how, rests=rests, adds_up=adds_up)
    return MemoryPlan(
        phases=phases,
        needed_bytes=_needed(facts, max(p.num_bytes for p in phases)) if phases else 0,
        free_bytes=facts.machine.free_memory_bytes,
        recompute=recompute,
        limit_bytes=limit_of(facts),
        host_bytes=host_bytes_of(config, facts, how),
        load_host_bytes=joining_bytes(facts),
        rests=rests,
        **_sets(config, facts),
    )


def _sets(config: Config, facts: Facts) -> dict[str, int]:
    """The bytes of kept sets, where the model is known."""
    model = facts.model.sizes
    if model is None:
        return {}
    return {"set_bytes": set_bytes(config, model), "rollout_set_bytes": rollout_set_bytes(config, model)}


def recompute_of(config: Config, facts: Facts) -> Recompute:
    """Return which activations a run computes again: what the plan counts on, and what the run does.

    `gradient_checkpointing` auto goes by the phase `update` beside the memory that is free.
    """
    needed: dict[Recompute, int] = {}
    for kind in KINDS:
        for phase in _phases(config, facts, training_of(config, facts, kind)):
            if phase.name == "update":
                needed[kind] = _needed(facts, phase.num_bytes)
    return choose_recompute(config.gradient_checkpointing, needed or None, limit_of(facts))


def limit_of(facts: Facts) -> int | None:
    """Return the bytes that a run may take without a word; None where it is not known what is free."""
    free = facts.machine.free_memory_bytes
    return None if free is None else int(TIGHT * free)


def reduces_each(config: Config, facts: Facts) -> bool:
    """Return whether FSDP reduces gradients in each micro-batch: where whole ones, in float32, do not fit
    beside the update until the last."""
    how = training_of(config, facts, recompute_of(config, facts))
    updates = [p.num_bytes for p in _phases(config, facts, how, adds_up=True) if p.name == "update"]
    limit = limit_of(facts)
    return not updates or limit is None or _needed(facts, updates[0]) > limit


def engine_rests(config: Config, facts: Facts) -> bool:
    """Return whether the native engine lets its cache and its recordings go after each rollout: where what
    follows a rollout does not fit beside them, whatever is computed again. They are made anew then."""
    limit = limit_of(facts)
    if config.engine != "native" or planned_layout(facts).engine != "own" or limit is None:
        return False
    how = training_of(config, facts, recompute_of(config, facts))
    kept, rested = (
        max((p.num_bytes for p in _phases(config, facts, how, rests=rests) if p.name in _AFTER), default=0)
        for rests in (False, True)
    )
    return _needed(facts, kept) > limit and kept - rested > _SHOWN * kept


def _needed(facts: Facts, num_bytes: int) -> int:
    """The bytes of all processes that share the memory, with their libraries."""
    return processes_sharing(facts) * (num_bytes + LIBRARIES)


def processes_sharing(facts: Facts) -> int:
    """Return how many processes share the memory that is free: one a GPU, on a CPU all of them."""
    return 1 if facts.machine.cuda else facts.launch.num_processes


def training_of(config: Config, facts: Facts, recompute: Recompute) -> Training:
    """Return what of a configuration decides the bytes of weights and activations; `torch_dtype` auto is
    bfloat16 on a GPU."""
    quantization = quantization_of(config)
    return Training(
        element=LOW if computes_low(config, cuda=bool(facts.machine.cuda)) else FLOAT,
        full=config.tuner_type != "lora",
        recompute=recompute,
        rank=config.lora_rank,
        dora=config.use_dora,
        cuda=bool(facts.machine.cuda),
        offload=config.activation_offloading and bool(facts.machine.cuda),
        absorbs=facts.launch.num_processes == 1 and facts.layout.is_here,
        packed_bits=0.0 if quantization is None else quantization.bits_per_weight,
        frozen_text=facts.model.sizes is not None and facts.model.sizes.frozen_text,
    )


def _phases(
    config: Config, facts: Facts, how: Training, *, rests: bool = False, adds_up: bool = False
) -> tuple[Phase, ...]:
    """The phases in the order of a run; what one leaves behind is held by those that follow, but for the
    cache of an engine that `rests`. FSDP `adds_up` whole gradients, or reduces them in each pass.
    None where model or prompts are not known."""
    model, prompt = facts.model.sizes, facts.prompts.longest
    if prompt is None and facts.data.num_rows is None:
        prompt = config.max_length
    if model is None or prompt is None:
        return ()
    layout, away = planned_layout(facts), {}
    weights = weights_of(model, how)
    if not how.cuda:
        # What is offloaded from a CPU lies in the same memory.
        away = copies_of_deepspeed(model, how, weights, layout)
        layout = replace(layout, offload="none")
    beside = _beside(facts)
    held = held_parts(config, model, how, weights, layout) | away | beside
    gathering = gathering_of(config, facts, model, how, layout)
    moments = held.pop("moments")
    loaded = loading_parts(gathering, how, held, weights.trained, FLOAT * model.parameters)
    if not facts.layout.is_here and facts.launch.num_processes > 1:
        held["communication"] = _COMMUNICATION
    cache, rollout = rollout_parts(config, facts, how, model, prompt, sum(held.values()))
    if layout.engine == "colocate":
        # vLLM starts once the layout of rows is proven.
        loaded = max(loaded, held | rollout, key=lambda parts: sum(parts.values()))
    phases = [Phase(name="load", parts=loaded)]
    held["moments"] = moments
    copies = 0 if how.cuda else lever_bytes(config, model, how, layout)
    if copies:
        held["copies in CPU memory"] = held.get("copies in CPU memory", 0) + copies

    def add(phase: str, *work: Mapping[str, int]) -> None:
        """Add a phase: what is held and not in CPU memory during it, and what it works with."""
        away = parts_away(config, layout, phase)
        parts = {name: num_bytes for name, num_bytes in held.items() if name not in away}
        for more in (*work, seeing_parts(config, facts, how, phase)):
            parts |= more
        at_least = least_parts(config, how, model, prompt, layout, parts, samples=phase == "rollout")
        phases.append(Phase(name=phase, parts=parts, at_least=at_least))

    held |= rollout_set_parts(config, model, cuda=how.cuda)
    if rollout:
        add("rollout", cache, rollout)
    if (config.engine == "native" and not rests) or layout.engine != "own":
        held |= cache
    gathered = computing_parts(gathering, how)
    fullest = fullest_pass(config, facts, prompt)
    sets = pass_set_parts(config, model, fullest.trained)
    if has_kl(config) or _steps_per_rollout(config) > 1:
        add("annotate", gathered, sets, annotation_parts(model, fullest, how))
    buckets = bucket_parts(gathering, how, weights.trained) if facts.launch.num_processes > 1 else {}
    update = update_parts(model, fullest, how, weights, layout, adds_up=adds_up)
    add("update", gathered, buckets, sets, update)
    add("step", step_parts(config, model, how, held, layout))
    if layout.engine != "own" or not facts.layout.is_here:
        add("publish", publish_parts(gathering, model, how))
    return tuple(phases)


def reward_model_bytes(model: RewardModelFacts, *, cuda: bool) -> int:
    """What the process of a reward model takes: libraries, weights, and its fullest forward pass."""
    # Of a model that is still on a hub the bytes of its files are known, most often of 2 a weight.
    weights = model.file_bytes if cuda else FLOAT * (model.parameters or model.file_bytes // LOW)
    element = weights // max(1, model.parameters)
    width = _WIDTHS * model.hidden + _MLP_WIDTHS * model.intermediate
    return LIBRARIES + weights + _REWARD_TOKENS * width * element


def _beside(facts: Facts) -> dict[str, int]:
    """The processes of reward models, which are there from the trial to the end."""
    each = [
        reward_model_bytes(m, cuda=bool(facts.machine.cuda))
        for m in facts.rewards.models
        if m.problem is None
    ]
    return {"reward models": sum(each)} if each else {}


def _steps_per_rollout(config: Config) -> int:
    return config.num_iterations * config.steps_per_generation // max(1, config.gradient_accumulation_steps)
