"""The words of `covey plan` that name a machine to plan for, taken from those of the run.

How model and engine lie on it are options of the run (`--deepspeed zero3_offload`, `--use_vllm true`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.argv import take_out
from covey.config.take import Layer
from covey.options.schema import Config
from covey.options.verbs import PLAN_WORDS, PlanOptions
from covey.plan.layout import Machine
from covey.plan.problem import problem
from covey.texts import tr
from covey.types import Fix, Problem

_MOST = 10**6
_UNITS = {"gib": 1 << 30, "gb": 10**9, "mib": 1 << 20, "mb": 10**6}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The machine that is planned, None for this one; what is printed of it; the other words.

    Where a word of the machine is at fault, nothing is known of it, so that nothing is said that only follows
    from the fault.
    """

    words: tuple[str, ...]
    machine: Machine | None = None
    as_json: bool = False
    problems: tuple[Problem, ...] = ()


def take_machine(argv: Sequence[str]) -> Planned:
    """Split the words of `covey plan` into its own and those of the run."""
    own, rest = take_out("plan", argv, PlanOptions, Config)
    given = {name: typed.value for name, typed in own.typed.items()}
    problems = list(own.problems)
    return Planned(
        words=tuple(rest),
        machine=_machine(own, given, problems),
        as_json=given.get("json", False),
        problems=tuple(problems),
    )


def _machine(own: Layer, given: dict[str, Any], problems: list[Problem]) -> Machine | None:
    named = [name for name in PLAN_WORDS if name in own.named]
    if not named:
        return None
    if "plan_gpus" not in own.named:
        problems.append(_lacks(named[0], "plan_gpus", Fix(text=tr("eight GPUs"), edits={"plan_gpus": 8})))
    elif "plan_gpu_memory" not in own.named:
        fix = Fix(text=tr("of 80 GB"), edits={"plan_gpu_memory": "80GB"})
        problems.append(_lacks("plan_gpus", "plan_gpu_memory", fix))
    num_gpus = given.get("plan_gpus") or 0
    if "plan_gpus" in given and not 1 <= num_gpus <= _MOST:
        problems.append(_unfit("plan_gpus", str(num_gpus or "none"), tr("a whole number of at least 1")))
        num_gpus = 0
    gpu_bytes = _bytes(given["plan_gpu_memory"] or "none", problems) if "plan_gpu_memory" in given else 0
    return Machine(num_gpus=num_gpus, gpu_bytes=0 if problems else gpu_bytes)


def _bytes(word: str, problems: list[Problem]) -> int:
    match = _SIZE.fullmatch(word.strip())
    if match is None or not float(match[1]):
        problems.append(_unfit("plan_gpu_memory", word, tr("a size with its unit, such as 96GiB or 80GB")))
        return 0
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _unfit(name: str, word: str, takes: str) -> Problem:
    seen = tr("{name} is {word} (flag --{name}); it takes {takes}.", name=name, word=word, takes=takes)
    return problem("E103", name, seen, "", Fix(text=tr("--{name} takes {takes}", name=name, takes=takes)))


def _lacks(name: str, needed: str, fix: Fix) -> Problem:
    return problem("E115", name, tr("{name} is given without {needed}.", name=name, needed=needed), "", fix)
