"""Layouts that work where the planned one does not, each tried by the checks of a run and typed as a command.

What is typed stays where it can, the engine above all: servers stay servers. The least costly changes
(`covey.plan.fitting`), which E211 and W114 name as well, are tried first; then where the states lie, by the
tool that was typed first; then smaller forward passes; last LoRA, which is another run. Other engines are
looked for where none of these fits with the typed one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from covey.config.filters import filters_off
from covey.options.schema import OPTIONS, Config, default_of, group_of
from covey.plan.check_filters import engine_problems
from covey.plan.check_layout import layout_problems
from covey.plan.facts import Facts
from covey.plan.fitting import WHOLE, changed_run, fitting_changes, peak_in_words, smaller_passes
from covey.plan.layout import Engine, Layout
from covey.plan.memory import MemoryPlan, limit_of, memory_plan
from covey.plan.server_line import holding_line
from covey.plan.words import flags
from covey.texts import Text, tr
from covey.types import Fix, Problem, Severity

Edits = dict[str, Any]
Checks = Callable[[Config, Facts, Collection[str]], list[Problem]]
"""The checks of a run, as `covey.checks.judge` has them."""

_ZERO: tuple[Edits, ...] = tuple(
    {"deepspeed": word} for word in ("zero2", "zero3", "zero2_offload", "zero3_offload")
)
_FSDP: tuple[Edits, ...] = ({"fsdp": "full_shard"}, {"fsdp": "full_shard", "fsdp_offload": True})
_OTHERS: Mapping[Engine, tuple[Engine, ...]] = {
    "own": ("server", "colocate"),
    "colocate": ("server",),
    "server": (),
}
"""The engines that are looked for where nothing fits with one."""
_IN_TURN: Edits = {"async_generate": False, "max_staleness": 0}
"""Switches sampling ahead off, for engines in the training processes."""
OF_SERVERS = ("E420", "E421", "E422", "E423", "E424", "E427", "E428")
"""What is said of servers, which no layout of the training mends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingLayout:
    """A layout that fits: the options that change, the whole command, its forecast, and the line that starts
    a server for it, where it has servers and none was named."""

    edits: Edits
    command: str
    plan: MemoryPlan
    layout: Layout
    server: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the layout as `covey plan --json` prints it."""
        server = {"server": self.server} if self.server else {}
        return {"edits": self.edits, "command": self.command, "needed_bytes": self.plan.needed_bytes} | server

    def in_words(self) -> str:
        """Return the peak of a GPU, and what lies in the memory of a machine."""
        return peak_in_words(self.plan, self.layout)

    def fix(self) -> Fix:
        """Return the layout as what to type."""
        if any(value is None for value in self.edits.values()):
            return Fix(text=Text(f"{self.in_words()}: `{self.command}`"))
        return Fix(text=self.in_words(), edits=self.edits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """What `covey train` can run instead of a plan, by the engine that samples: with the typed one alone
    where anything fits with it. Empty: nothing that was tried fits."""

    layouts: Mapping[Engine, FittingLayout]

    def as_dict(self) -> dict[str, Any]:
        """Return the layouts as `covey plan --json` prints them."""
        return {engine: layout.as_dict() for engine, layout in self.layouts.items()}

    def in_words(self) -> list[str]:
        """Return the layouts as lines."""
        if not self.layouts:
            nothing = tr(
                "nothing that was tried (layouts, smaller micro-batches, LoRA) makes this fit `covey train`"
            )
            return [nothing]
        lines: list[str] = []
        for engine, layout in self.layouts.items():
            words = layout.in_words()
            by = {
                "own": tr("`covey train` can run this: {words}", words=words),
                "colocate": tr("`covey train` can run this with vLLM on these GPUs: {words}", words=words),
                "server": tr("`covey train` can run this with servers on other GPUs: {words}", words=words),
            }
            lines += [by[engine], layout.command]
            if layout.layout.num_machines > 1:
                line = tr(
                    "on each of {machines} machines, behind NNODES={machines} NODE_RANK=R "
                    "MASTER_ADDR=HOST MASTER_PORT=29500",
                    machines=layout.layout.num_machines,
                )
                lines.append(line)
            if layout.server:
                line = tr(
                    "first, on the other GPUs: `{server}`; then add --rollout_servers http://HOST:PORT "
                    "--rollout_token_file FILE",
                    server=layout.server,
                )
                lines.append(line)
        return lines

    def agreed(self, problem: Problem) -> Problem:
        """Return a problem of the forecast with these layouts as its fixes, unless it names the first of them
        first itself."""
        answers = [layout.fix() for layout in self.layouts.values()]
        if not answers or problem.code not in ("E211", "W114", "W150"):
            return problem
        if problem.fixes[0].edits == answers[0].edits:
            return problem
        kept = [fix for fix in problem.fixes if "ignore_memory_forecast" in fix.edits]
        return replace(problem, fixes=(*answers, *kept))


def works(config: Config, facts: Facts, typed: Collection[str], verb: str, checks: Checks) -> Works:
    """Return layouts that work on the facts' GPUs and in which `checks` find no error; `typed` are the
    options that were given to `verb`."""
    search = _Search(config, facts, frozenset(typed), verb, checks)
    own = facts.layout.engine
    for engines in ((own,), _OTHERS[own]):
        found = {engine: layout for engine in engines if (layout := search.with_engine(engine)) is not None}
        if found:
            return Works(layouts=found)
    return Works(layouts={})


@dataclass(frozen=True, slots=True)
class _Search:
    """A configuration whose layouts are tried."""

    config: Config
    facts: Facts
    typed: frozenset[str]
    verb: str
    checks: Checks

    def with_engine(self, engine: Engine) -> FittingLayout | None:
        """The first layout that fits with an engine; forward passes and tuner change with the typed one
        alone."""
        base: Edits = {} if engine == "server" else dict(_IN_TURN)
        is_typed = engine == self.facts.layout.engine
        vllm: Edits = {} if is_typed else {"use_vllm": True, "vllm_mode": engine, "rollout_servers": []}
        if engine_problems(self.config.model_copy(update=vllm), self.facts):
            base |= filters_off(self.config)
        passes: list[tuple[Edits, Edits]] = [({}, {})]
        tuners: list[Edits] = [{}]
        if is_typed:
            limit = limit_of(self.facts) or 0
            less = fitting_changes(self.config, self.facts, self.typed, limit)
            for typed, options in [({}, {}), *((change.typed, change.options) for change in less)]:
                found = self._try(base, typed, options)
                if found is not None:
                    return found
            passes += [(c.typed, c.options) for c in smaller_passes(self.config, self.facts, self.typed)]
            tuners += [] if self.config.tuner_type == "lora" else [{"tuner_type": "lora"}]
        engines = list(self._engines(engine))
        for tuner, (typed, options), states, how in product(tuners, passes, self._states(), engines):
            found = self._try(base | states | how | tuner, typed, options)
            if found is not None:
                return found
        return None

    def _engines(self, engine: Engine) -> Iterator[Edits]:
        """An engine first as it is typed; vLLM on these GPUs then over as few of them as fit, with the share
        that covey chooses, and awake before asleep while the model trains."""
        is_typed = engine == self.facts.layout.engine
        if engine == "own" or (engine == "server" and is_typed):
            yield {}
        elif engine == "server":
            yield {"use_vllm": True, "vllm_mode": "server"}
        else:
            layout = self.facts.layout
            each = layout.machine_gpus or layout.num_gpus
            spans = [n for n in range(1, each + 1) if each % n == 0]
            shares: list[float | None] = [None]
            if is_typed:
                yield {}
                spans.insert(0, layout.engine_parallel)
                shares.insert(0, self.config.vllm_gpu_memory_utilization)
            for span, share, sleeps in product(dict.fromkeys(spans), dict.fromkeys(shares), (False, True)):
                yield {
                    **{"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": span},
                    **{"vllm_gpu_memory_utilization": share, "vllm_enable_sleep_mode": sleeps},
                    **{"vllm_data_parallel_size": 1, "sleep_level": 0},
                }

    def _states(self) -> list[Edits]:
        """Where the states may be: as typed, then by the tool that was typed, then by the other one."""
        ways = (*_FSDP, *_ZERO) if self.config.deepspeed is None else (*_ZERO, *_FSDP)
        return [{}, *(WHOLE | way for way in ways)]

    def _try(self, edits: Edits, typed: Edits, options: Edits) -> FittingLayout | None:
        """Return the layout with some edits, and `typed`, of which `options` follow, where it fits and the
        checks find no fault."""
        config, facts = changed_run(self.config, self.facts, edits | options)
        if layout_problems(config, facts):
            return None
        plan = memory_plan(config, facts)
        if not plan.fits:
            return None
        faults = [p for p in self.checks(config, facts, self.typed) if p.severity is Severity.ERROR]
        if any(p.code not in OF_SERVERS for p in faults):
            return None
        changed = {n: v for n, v in edits.items() if getattr(self.config, n) != v} | typed
        is_unnamed = facts.layout.engine == "server" and not config.rollout_servers
        return FittingLayout(
            edits=changed,
            command=self._command(changed, facts.layout),
            plan=plan,
            layout=facts.layout,
            server=holding_line(config, facts) if is_unnamed else "",
        )

    def _command(self, edits: Edits, layout: Layout) -> str:
        """The command as it was typed, with the edits."""
        values = {n: getattr(self.config, n) for n in OPTIONS if n in self.typed} | edits
        values["nproc_per_node"] = layout.num_gpus // layout.num_machines
        for name in edits:
            is_layout = name in WHOLE or name in _IN_TURN or group_of(name) == "vllm"
            if is_layout and edits[name] in (None, False, default_of(name)):
                del values[name]
        return tr("covey {verb} {flags}", verb=self.verb, flags=flags(values))
