"""Layouts that work where the planned one does not, each tried by the checks of a run and typed as a command.

Two are looked for: one that samples with covey's own engine, and one with vLLM. What is typed stays where it
can. States are tried in the ladder's order of cost, those of the tool that was typed first; then smaller
forward passes; last LoRA, which is another run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from covey.config.resolve import not_built_yet
from covey.options.schema import DERIVED, FACTS, OPTIONS, Config, default_of, group_of
from covey.plan.check_layout import layout_problems
from covey.plan.checks import checks
from covey.plan.deepspeed import states_of
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.ladder import Edits, smaller_passes
from covey.plan.layout import Layout, States, layout_of
from covey.plan.memory import MemoryPlan, memory_plan
from covey.plan.words import flags
from covey.texts import tr
from covey.types import Problem, Severity

_WHOLE: Edits = {"deepspeed": None, "fsdp": None, "fsdp_offload": False, "fsdp_config": None}
_ZERO: tuple[Edits, ...] = tuple(
    {"deepspeed": word} for word in ("zero2", "zero3", "zero2_offload", "zero3_offload")
)
_FSDP: tuple[Edits, ...] = ({"fsdp": "full_shard"}, {"fsdp": "full_shard", "fsdp_offload": True})
_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingLayout:
    """A layout that fits: the options that change, the whole command, and its forecast."""

    edits: Edits
    command: str
    plan: MemoryPlan

    def as_dict(self) -> dict[str, Any]:
        """Return the layout as `covey plan --json` prints it."""
        return {"edits": self.edits, "command": self.command, "needed_bytes": self.plan.needed_bytes}

    def in_words(self) -> str:
        """Return the peak of a GPU, and what lies in the machine's memory."""
        host = (
            tr("; {size} of the machine's memory", size=size(self.plan.host_bytes))
            if self.plan.host_bytes
            else ""
        )
        peak = tr("{size} in {name}", size=size(self.plan.needed_bytes), name=self.plan.binding.name)
        return tr("{peak}, {share:.0%} of a GPU{host}", peak=peak, share=self.plan.share, host=host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """What `covey train` can run instead of a plan, with covey's own engine and with vLLM. None: nothing that
    was tried fits, or vLLM was neither asked for nor needed."""

    today: FittingLayout | None
    with_vllm: FittingLayout | None

    def as_dict(self) -> dict[str, Any]:
        """Return the layouts as `covey plan --json` prints them."""
        layouts = {"today": self.today, "with_vllm": self.with_vllm}
        return {name: None if layout is None else layout.as_dict() for name, layout in layouts.items()}

    def in_words(self) -> list[str]:
        """Return the layouts as lines."""
        lines: list[str] = []
        if self.today is None and self.with_vllm is None:
            lines.append(
                tr(
                    "nothing that was tried (layouts, smaller micro-batches, LoRA) makes this fit "
                    "`covey train`"
                )
            )
        if self.today is not None:
            words = self.today.in_words()
            lines += [tr("`covey train` can run this: {in_words}", in_words=words), self.today.command]
        if self.with_vllm is not None:
            words = self.with_vllm.in_words()
            lines += [
                tr("`covey train` can run this with vLLM: {words}", words=words),
                self.with_vllm.command,
            ]
        return lines


def works(config: Config, facts: Facts, typed: Collection[str], verb: str) -> Works:
    """Return layouts that work on the facts' GPUs; `typed` are the options that were given to `verb`."""
    search = _Search(config, facts, frozenset(typed), verb)
    own = search.first(not_built_yet(config) | _own_engine(config))
    is_asked = config.use_vllm or own is None
    return Works(today=own, with_vllm=_with_vllm(search) if is_asked else None)


def _own_engine(config: Config) -> Edits:
    """What leaves vLLM out; nothing where it is not asked for."""
    if not config.use_vllm:
        return {}
    return {n: False if n in DERIVED else default_of(n) for n in OPTIONS if group_of(n) == "vllm"}


def _with_vllm(search: _Search) -> FittingLayout | None:
    """vLLM on these GPUs, first as it is typed, then over as few GPUs an engine and with as small a share as
    fit; awake before asleep while the model trains."""
    base: Edits = {"use_vllm": True, "vllm_mode": "colocate", "async_generate": False, "sleep_level": 0}
    spans, shares = list(range(1, search.facts.layout.num_gpus + 1)), list(_SHARES)
    if search.config.use_vllm:
        spans.insert(0, search.config.vllm_tensor_parallel_size)
        shares.insert(0, search.facts.layout.engine_share)
    for span, share, sleeps in product(dict.fromkeys(spans), dict.fromkeys(shares), (False, True)):
        engine: Edits = {
            "vllm_tensor_parallel_size": span,
            "vllm_gpu_memory_utilization": share,
            "vllm_enable_sleep_mode": sleeps,
        }
        found = search.first(base | engine)
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class _Search:
    """A configuration whose layouts are tried."""

    config: Config
    facts: Facts
    typed: frozenset[str]
    verb: str

    def first(self, base: Edits) -> FittingLayout | None:
        """The first layout that fits with `base` typed; with vLLM, forward passes and tuner stay."""
        started = self.config.model_copy(update=base)
        if layout_problems(started, self._laid_out(started, base)):
            return None
        passes: list[tuple[Edits, Edits]] = [({}, {})]
        tuners: list[Edits] = [{}]
        if not base.get("use_vllm"):
            passes += smaller_passes(self.config, self.facts, self.typed)
            tuners += [] if self.config.tuner_type == "lora" else [{"tuner_type": "lora"}]
        for tuner, (typed, counts), states in product(tuners, passes, self._states()):
            found = self._try(base | states | tuner, typed, counts)
            if found is not None:
                return found
        return None

    def _states(self) -> list[Edits]:
        """Where the states may be: as typed, then by the tool that was typed, then by the other one."""
        ways = (*_FSDP, *_ZERO) if self.config.deepspeed is None else (*_ZERO, *_FSDP)
        return [{}, *(_WHOLE | way for way in ways)]

    def _laid_out(self, config: Config, edits: Edits) -> Facts:
        """The facts with the layout of a changed configuration."""
        now = self.facts.layout
        states = States(
            stage=now.zero_stage,
            offload=now.offload,
            file=now.file,
            fsdp=now.fsdp,
            is_hybrid=now.shard_gpus > 0,
        )
        problems: tuple[Problem, ...] = ()
        if edits.keys() & _WHOLE.keys():
            states, problems = states_of(config, None, cuda=bool(self.facts.cuda))
        layout = layout_of(
            config,
            now.num_gpus,
            now.gpu_bytes,
            states,
            is_here=False,
            gpus_of_a_machine=now.machine_gpus or now.shard_gpus,
        )
        return replace(self.facts, layout=layout, layout_problems=problems)

    def _try(self, edits: Edits, typed: Edits, counts: Edits) -> FittingLayout | None:
        """The layout of the changed configuration, where it fits and the checks find no fault."""
        config = self.config.model_copy(update=edits | counts)
        facts = self._laid_out(config, edits)
        plan = memory_plan(config, facts)
        if not plan.fits:
            return None
        if any(p.severity is Severity.ERROR for p in checks(config, facts, self.typed)):
            return None
        changed = {n: v for n, v in edits.items() if getattr(self.config, n) != v} | typed
        return FittingLayout(edits=changed, command=self._command(changed, facts.layout), plan=plan)

    def _command(self, edits: Edits, layout: Layout) -> str:
        """The command as it was typed, with the edits."""
        values = {n: getattr(self.config, n) for n in OPTIONS if n in self.typed} | edits
        values.setdefault("nproc_per_node", layout.num_gpus)
        for name in edits:
            is_layout = name in _WHOLE or bool(FACTS[name].not_built) or group_of(name) == "vllm"
            if is_layout and edits[name] in (None, False, default_of(name)):
                del values[name]
        return tr("covey {verb} {flags}", verb=self.verb, flags=flags(values))
