"""Layouts that work where the planned one does not, each tried by the checks of a run and typed as a command.

Two are looked for: one that `covey train` has, which samples with its own engine, and one with vLLM. What is
typed stays where it can. States are tried in the ladder's order of cost, those of the tool that was typed
first; then smaller forward passes; last LoRA, which is another run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from covey.config.resolve import without_plans
from covey.options.schema import FACTS, OPTIONS, Config, default_of
from covey.plan.check_layout import layout_problems
from covey.plan.checks import checks
from covey.plan.deepspeed import states_of
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.ladder import Edits, smaller_passes
from covey.plan.layout import Layout, States, layout_of
from covey.plan.memory import TIGHT, MemoryPlan, memory_plan
from covey.plan.words import flags
from covey.types import Problem, Severity

_GPUS_OF_A_MACHINE = 8
_WHOLE: Edits = {"deepspeed": None, "fsdp": None, "fsdp_offload": False, "fsdp_config": None}
_ZERO: tuple[Edits, ...] = tuple(
    {"deepspeed": word} for word in ("zero2", "zero3", "zero2_offload", "zero3_offload")
)
_FSDP: tuple[Edits, ...] = ({"fsdp": "full_shard"}, {"fsdp": "full_shard", "fsdp_offload": True})
_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout that fits: the options to type or to leave out, the whole command, and its forecast."""

    edits: Edits
    command: str
    plan: MemoryPlan

    def in_words(self) -> str:
        """The peak of a GPU, and the machine's memory."""
        host = f"; {size(self.plan.host_bytes)} of the machine's memory" if self.plan.host_bytes else ""
        peak = f"{size(self.plan.needed_bytes)} in {self.plan.binding.name}, {self.plan.share:.0%} of a GPU"
        return f"{peak}{host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """What `covey train` can run in the place of a plan, and what would fit with vLLM; None where nothing
    that was tried does, or where it was not asked for."""

    today: Found | None
    with_vllm: Found | None

    def as_dict(self) -> dict[str, Any]:
        """Return the layouts as `covey plan --json` prints them."""

        def found(of: Found | None) -> dict[str, Any] | None:
            if of is None:
                return None
            return {"edits": of.edits, "command": of.command, "needed_bytes": of.plan.needed_bytes}

        return {"today": found(self.today), "with_vllm": found(self.with_vllm)}

    def in_words(self) -> list[str]:
        """Return the layouts as lines."""
        lines = ["no change of layout, passes or tuner makes it a run that `covey train` can do"]
        if self.today is not None:
            lines = [f"`covey train` can run this: {self.today.in_words()}", self.today.command]
        if self.with_vllm is not None:
            words = self.with_vllm.in_words()
            lines += [f"with vLLM, which `covey train` does not have yet: {words}", self.with_vllm.command]
        return lines


def works(config: Config, facts: Facts, typed: Collection[str], verb: str) -> Works:
    """Return layouts that work on the facts' GPUs; `typed` are the options that were given to `verb`."""
    search = _Search(config, facts, frozenset(typed), verb)
    own = search.first(without_plans(config), with_lora=True)
    is_asked = config.use_vllm or own is None
    return Works(today=own, with_vllm=_with_vllm(search) if is_asked else None)


def _with_vllm(search: _Search) -> Found | None:
    """vLLM on these GPUs, as it is typed; else as few of them for one engine as hold it, awake, or asleep
    while the model trains."""
    base: Edits = {"use_vllm": True, "vllm_mode": "colocate", "async_generate": False, "sleep_level": 0}
    spans, shares = list(range(1, search.facts.layout.num_gpus + 1)), list(_SHARES)
    if search.config.use_vllm:
        spans.insert(0, search.config.vllm_tensor_parallel_size)
        shares.insert(0, search.config.vllm_gpu_memory_utilization)
    for span, share, sleeps in product(dict.fromkeys(spans), dict.fromkeys(shares), (False, True)):
        engine: Edits = {
            "vllm_tensor_parallel_size": span,
            "vllm_gpu_memory_utilization": share,
            "vllm_enable_sleep_mode": sleeps,
        }
        found = search.first(base | engine, with_lora=False)
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class _Search:
    """A configuration whose layouts are tried, as it was typed."""

    config: Config
    facts: Facts
    typed: frozenset[str]
    verb: str

    def first(self, base: Edits, *, with_lora: bool) -> Found | None:
        """The first layout that fits with `base` typed; with vLLM forward passes stay as they are."""
        started = self.config.model_copy(update=base)
        if layout_problems(started, self._laid_out(started, base)):
            return None
        tuners: list[Edits] = [{}]
        if with_lora and self.config.tuner_type != "lora":
            tuners.append({"tuner_type": "lora"})
        smaller = smaller_passes(self.config, self.facts, self.typed) if with_lora else ()
        passes: list[tuple[Edits, Edits]] = [({}, {}), *smaller]
        for tuner in tuners:
            for typed, counts in passes:
                for states in self._states(base):
                    found = self._try(base | states | tuner, typed, counts)
                    if found is not None:
                        return found
        return None

    def _states(self, base: Edits) -> Iterator[Edits]:
        """Where the states may lie: as typed, then as the tool that was typed has them, then as the other."""
        if not self.facts.layout.by_words:
            yield {}
        # With vLLM it is a forecast in any case.
        is_planned = bool(base.get("use_vllm")) or not FACTS["deepspeed"].not_built
        zero = _ZERO if is_planned else ()
        is_zero = base.get("deepspeed", self.config.deepspeed) is not None
        for way in [*zero, *_FSDP] if is_zero else [*_FSDP, *zero]:
            yield _WHOLE | way

    def _laid_out(self, config: Config, edits: Edits) -> Facts:
        """The facts with the layout of a changed configuration."""
        now = self.facts.layout
        states = States(
            stage=now.zero_stage,
            offload=now.offload,
            file=now.file,
            fsdp=now.fsdp,
            is_hybrid=now.shard_gpus > 0,
            by_words=now.by_words,
        )
        problems: tuple[Problem, ...] = ()
        if edits.keys() & _WHOLE.keys():
            states, problems = states_of(config, None, None, cuda=bool(self.facts.cuda))
        layout = layout_of(
            config,
            now.num_gpus,
            now.gpu_bytes,
            states,
            is_here=now.is_here,
            gpus_of_a_machine=now.shard_gpus or _GPUS_OF_A_MACHINE,
        )
        return replace(self.facts, layout=layout, layout_problems=problems)

    def _try(self, edits: Edits, typed: Edits, counts: Edits) -> Found | None:
        """The layout of the changed configuration, where it fits and the checks find no fault."""
        config = self.config.model_copy(update=edits | counts)
        facts = self._laid_out(config, edits)
        plan = memory_plan(config, facts)
        if not 0 < plan.share <= TIGHT:
            return None
        if any(p.severity is Severity.ERROR for p in checks(config, facts, self.typed)):
            return None
        changed = {n: v for n, v in edits.items() if getattr(self.config, n) != v} | typed
        return Found(edits=changed, command=self._command(changed, facts.layout), plan=plan)

    def _command(self, edits: Edits, layout: Layout) -> str:
        """The command as it was typed, with the edits, for a planned layout of vLLM behind `covey plan`."""
        values = {n: getattr(self.config, n) for n in OPTIONS if n in self.typed} | edits
        values.setdefault("nproc_per_node", layout.num_gpus)
        for name in edits:
            is_layout = name in _WHOLE or bool(FACTS[name].not_built)
            if is_layout and edits[name] in (None, False, default_of(name)):
                del values[name]
        if layout.engine == "own":
            return f"covey {self.verb} {flags(values)}"
        gpus = f"--plan_gpus {layout.num_gpus} --plan_gpu_memory {layout.gpu_bytes >> 20}MiB"
        return f"covey plan {self.verb} {flags(values)} {gpus}"
