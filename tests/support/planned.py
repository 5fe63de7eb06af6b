"""What the words of `covey plan` make of a machine and of how a run lies on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.checks.run.look import run_facts, with_layout
from covey.cli.machine import Planned, take_machine
from covey.cli.options import read
from covey.plan.layout import Layout
from covey.types import Problem

_RUN = ["--model", "quickstart", "--dataset", "quickstart", "--reward_funcs", "accuracy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The words, the layout that they ask for, and what is wrong with them."""

    planned: Planned
    layout: Layout
    problems: tuple[Problem, ...]


def read_layout(words: Sequence[str]) -> Read:
    """Read the words as `covey plan` does."""
    planned = take_machine(words)
    resolved, num_processes = read("train", [*_RUN, *planned.words], planned)
    facts = with_layout(run_facts(resolved.config, num_processes), resolved.config, planned.machine)
    return Read(
        planned=planned, layout=facts.layout, problems=(*resolved.problems, *facts.launch.layout_problems)
    )
