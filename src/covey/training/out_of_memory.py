"""What is said of a process that ran out of memory: where, what it asked for, what was forecast, what to
type."""

from __future__ import annotations

import re
from typing import NamedTuple

from covey.checks.run.judge import protected_changes
from covey.codes import CODES
from covey.config.resolve import Resolved
from covey.plan.check_memory import less_memory_fixes
from covey.plan.disk import size
from covey.plan.facts import Facts
from covey.plan.memory import memory_plan
from covey.texts import joined, tr
from covey.training.failure import Where
from covey.training.together import Together
from covey.types import Finding, Fix

_SIGNS = ("can't allocate memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of")
_AMOUNT = r"([\d.]+) ([KMGT]?i?B)"
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# What the forecast calls the phases of a run that have another name there.
_FORECAST = {"start": "load", "reward": "rollout", "evaluate": "rollout", "publish": "step"}


class Asked(NamedTuple):
    """What an allocator said, in bytes; None where it said nothing of it."""

    asked: int | None
    free: int | None
    total: int | None
    idle: int | None

    def in_words(self) -> str:
        """`; it asked for 2.0 GB, and 1.1 GB of 80 GB were free`."""
        if self.asked is None:
            return ""
        free = (
            ""
            if self.free is None or self.total is None
            else tr("{size} of {size2}", size=size(self.free), size2=size(self.total))
        )
        return tr(
            "; it asked for {size}{words}",
            size=size(self.asked),
            words=tr(", and {free} were free", free=free) if free else "",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on a GPU, or of the machine's memory."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def explain_memory(
    resolved: Resolved, facts: Facts, others: Together, error: BaseException
) -> Finding | None:
    """F135: a failed allocation beside the forecast, with what takes less by the plan's own arithmetic; None
    for any other error."""
    if not is_out_of_memory(error):
        return None
    where = Where(others.rank, others.world, others.activity, others.output_dir)
    what = tr("the GPU") if facts.machine.cuda and not isinstance(error, MemoryError) else tr("this machine")
    asked = asked_in(str(error))
    stack, go_on = (where.fixes()[0], where.fixes()[-1])
    less = _less(resolved, facts, go_on)
    return Finding(
        code="F135",
        seen=tr(
            "{who} ran out of memory on {what} in {moment}{asked}",
            who=where.in_words(),
            what=what,
            moment=where.moment(),
            asked=asked.in_words(),
        ),
        why=CODES["F135"].why,
        cause=_cause(resolved, facts, where.activity.moment.phase, asked),
        fixes=(*less, *(() if less else (go_on,)), *((stack,) if stack != go_on else ())),
        step=where.activity.step,
    )


def asked_in(words: str) -> Asked:
    """The amounts in the message of torch's allocators."""
    return Asked(
        asked=_bytes(r"[Tt]ried to allocate " + _AMOUNT, words) or _plain(r"allocate (\d+) bytes", words),
        free=_bytes("of which " + _AMOUNT + " is free", words),
        total=_bytes("total capacity of " + _AMOUNT, words),
        idle=_bytes(_AMOUNT + " is reserved by PyTorch but unallocated", words),
    )


def _bytes(pattern: str, words: str) -> int | None:
    found = re.search(pattern, words)
    return None if found is None else int(float(found[1]) * _UNITS.get(found[2], 1))


def _plain(pattern: str, words: str) -> int | None:
    found = re.search(pattern, words)
    return None if found is None else int(found[1])


def _less(resolved: Resolved, facts: Facts, go_on: Fix) -> list[Fix]:
    """What takes less memory, each as it is typed to go on with it."""
    fixes = []
    for fix in less_memory_fixes(resolved.config, facts, resolved.typed_names):
        changed = resolved.config.model_copy(update=dict(fix.edits))
        changes = tuple((n, getattr(resolved.config, n), value) for n, value in fix.edits.items())
        if "tuner_type" in fix.edits:
            # No checkpoint of this run has what that starts from.
            fixes.append(Fix(text=tr("{text}, in a new run", text=fix.text), edits=fix.edits))
            continue
        allowed = {"allow_changes": True} if protected_changes(changed, changes) else {}
        fixes.append(
            Fix(
                text=tr("{text}; {then}", text=fix.text, then=go_on.text),
                edits={**fix.edits, **go_on.edits, **allowed},
            )
        )
    return fixes


def _cause(resolved: Resolved, facts: Facts, phase: str, asked: Asked) -> str:
    plan = memory_plan(resolved.config, facts)
    words = []
    if plan.phases:
        of_phase = {p.name: p.num_bytes for p in plan.phases}.get(_FORECAST.get(phase, phase))
        here = (
            ""
            if of_phase is None
            else tr(
                "{size} in the phase {forecast}, ", size=size(of_phase), forecast=_FORECAST.get(phase, phase)
            )
        )
        free = (
            ""
            if plan.free_bytes is None
            else tr("; {size} were free when the run started", size=size(plan.free_bytes))
        )
        words.append(
            tr(
                "The forecast was {here}{size} at most, in {name}, for one process{free}.",
                here=here,
                size=size(plan.binding.num_bytes),
                name=plan.binding.name,
                free=free,
            )
        )
    if asked.idle is not None and asked.asked is not None and asked.idle > asked.asked:
        words.append(
            tr(
                "torch held another {size} in reserve, but in pieces too small for this request.",
                size=size(asked.idle),
            )
        )
    return joined(" ", words)
