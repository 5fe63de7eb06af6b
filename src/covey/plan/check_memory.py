"""Whether the memory forecast passes what is free, and what takes less."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from covey.options.schema import Config
from covey.plan.check_layout import layout_problems
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.fitting import changed_run, fitting_fixes
from covey.plan.memory import PARTS, MemoryPlan, memory_plan, processes_sharing
from covey.plan.problem import START_ANYWAY, problem, warning
from covey.plan.recompute import TYPED
from covey.plan.server_line import holding_line
from covey.plan.shape import faults, shape_of
from covey.texts import counted, joined, tr
from covey.types import Fix, Problem

# Of what a run takes that did not fit: the most that is proposed for it.
_LESS = 0.85


def memory_problems(config: Config, facts: Facts, typed: Collection[str] | None = None) -> list[Problem]:
    """Return what the forecast says against the configuration; nothing where the batch is at fault.

    A run is refused where its states alone take more than is free, whatever its batch and its lengths are.
    Where the forecast of all of it passes the plan's limit, it is warned of.
    """
    if faults(shape_of(config, facts.launch.num_processes), facts.prompts.num_used) or not _is_planned(
        config
    ):
        return []
    plan = memory_plan(config, facts)
    if not plan.phases or plan.fits or plan.free_bytes is None or plan.limit_bytes is None:
        return []
    fixes = fitting_fixes(config, facts, typed, plan.limit_bytes)
    if not fixes:
        smaller = Fix(text=tr("use a smaller model, or a machine with more memory"))
        fixes = (*_other_engines(config, facts, plan), smaller)
    if _states_bytes(plan, facts) <= plan.free_bytes:
        return [warning("W114", "per_device_train_batch_size", _seen(plan, facts), _cause(plan), *fixes)]
    seen, cause = _seen_states(plan, facts), _cause_of_states(plan, facts)
    if config.ignore_memory_forecast:
        return [warning("W150", "model", seen, cause, *fixes)]
    return [problem("E211", "model", seen, cause, *fixes, START_ANYWAY)]


def less_memory_fixes(config: Config, facts: Facts, typed: Collection[str] | None) -> tuple[Fix, ...]:
    """What takes clearly less than the run by the same arithmetic, for one that has run out of memory: that
    the forecast fits says nothing then."""
    plan = memory_plan(config, facts)
    if not plan.phases or not _is_planned(config):
        return ()
    if config.gradient_checkpointing == "auto":
        config = config.model_copy(update={"gradient_checkpointing": TYPED[plan.recompute]})
    return fitting_fixes(config, facts, typed, int(_LESS * plan.needed_bytes))


def _other_engines(config: Config, facts: Facts, plan: MemoryPlan) -> list[Fix]:
    """Servers, and vLLM over as few of this machine's GPUs as fit, where the copy that the native engine
    samples with is what is too much. Of a machine that is planned `covey.plan.works` finds them."""
    if not facts.layout.is_here or not facts.machine.cuda or not _is_of_copy(plan, facts):
        return []
    fixes = []
    edits: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server"}
    served, there = changed_run(config, facts, edits)
    if memory_plan(served, there).fits:
        text = tr(
            "start a server with `{line}`, and add to this command: --rollout_servers "
            "http://127.0.0.1:8000 --rollout_token_file rollout-8000.token",
            line=holding_line(served, facts, "http://127.0.0.1:8000"),
        )
        fixes.append(Fix(text=text, edits=edits))
    here = facts.launch.num_processes_here or facts.launch.num_processes
    for span in (n for n in range(2, here + 1) if here % n == 0):
        edits = {"use_vllm": True, "vllm_tensor_parallel_size": span, "vllm_enable_sleep_mode": True}
        changed, given = changed_run(config, facts, edits | {"vllm_mode": "colocate"})
        found = memory_plan(changed, given)
        if found.fits and not layout_problems(changed, given):
            text = tr("{size} in {name}", size=size(found.needed_bytes), name=found.binding.name)
            return [*fixes, Fix(text=text, edits=edits)]
    return fixes


def _is_planned(config: Config) -> bool:
    return config.max_completion_length >= 1 and config.torch_dtype != "float16"


def _states_bytes(plan: MemoryPlan, facts: Facts) -> int:
    """The states of all processes that share the memory, where they take the most."""
    return processes_sharing(facts) * sum(plan.largest_states.states.values())


def _who(facts: Facts) -> tuple[str, str]:
    """Whose memory is spoken of, and where that is."""
    if not facts.layout.is_here:
        states = facts.layout.states_in_words()
        return tr("With {states}, each process takes", states=states), tr("on its GPU")
    shared = processes_sharing(facts)
    who = tr("{processes} take", processes=counted(shared, "process")) if shared > 1 else tr("The run takes")
    return who, tr("on the GPU") if facts.machine.cuda else tr("on this machine")


def _seen(plan: MemoryPlan, facts: Facts) -> str:
    who, where = _who(facts)
    return tr(
        "{who} about {size} in the phase {name}, including Python and its libraries; {free} are "
        "free {where}.",
        who=who,
        size=size(plan.needed_bytes),
        name=plan.binding.name,
        free=size(plan.free_bytes or 0),
        where=where,
    )


def _seen_states(plan: MemoryPlan, facts: Facts) -> str:
    who, where = _who(facts)
    phase = plan.largest_states
    parts = sorted(phase.states.items(), key=lambda part: -part[1])
    each = tr("each with ") if processes_sharing(facts) > 1 else ""
    words = each + joined(
        ", ", [tr("{name} {size}", name=PARTS[name], size=size(n)) for name, n in parts if n]
    )
    needed, free = size(_states_bytes(plan, facts)), size(plan.free_bytes or 0)
    return tr(
        "{who} {needed} for {what} alone in the phase {name} ({words}); {free} are free {where}.",
        who=who,
        needed=needed,
        what=tr("model states and vLLM") if phase.states.get("engine") else tr("model states"),
        name=phase.name,
        words=words,
        free=free,
        where=where,
    )


def _cause(plan: MemoryPlan) -> str:
    name, largest = max(plan.binding.parts.items(), key=lambda part: part[1])
    return tr(
        "The largest part is {name}: {size} of the {total} of one process. Completions are counted "
        "at their maximum length.",
        name=PARTS[name],
        size=size(largest),
        total=size(plan.binding.num_bytes),
    )


def _cause_of_states(plan: MemoryPlan, facts: Facts) -> str:
    if _is_of_copy(plan, facts):
        return tr(
            "The native engine keeps a full copy of the weights in each process for sampling; "
            "sharding, offloading and LoRA reduce only what is beside it."
        )
    if plan.largest_states.states.get("engine"):
        return tr(
            "vLLM holds its share beside the model states; batch size, completion length and recomputation "
            "change neither."
        )
    return tr("Batch size, completion length and recomputation do not change the size of model states.")


def _is_of_copy(plan: MemoryPlan, facts: Facts) -> bool:
    """Whether the copy that the native engine samples with is what is too much: by itself, or since the run
    would fit without it."""
    copies = max(phase.parts.get("gathered weights", 0) for phase in plan.phases)
    without = max(
        sum(n for name, n in phase.states.items() if name != "gathered weights") for phase in plan.phases
    )
    free = (plan.free_bytes or 0) // processes_sharing(facts)
    return copies > 0 and (copies > free or without <= free)
