"""Stand-ins for what the verbs hand their work to: each module is looked up when a verb runs."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.cli import launch, ranks
from covey.config import Resolved
from covey.plan.facts import Facts
from support.checks import changed

WORDS = ["--model", "m", "--dataset", "d.jsonl", "--reward_funcs", "accuracy"]


@dataclass(frozen=True)
class Outcome:
    exit_code: int


@dataclass(frozen=True)
class Survey:
    """Facts, and a word in `order` each time that what was read is closed."""

    facts: Facts
    order: list[str]

    def close(self) -> None:
        self.order.append("close")

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Run:
    """Stands in for the modules of a run and remembers what it was given, and in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.got: list[Resolved] = []
        self.gathered: list[int] = []
        self.order: list[str] = []
        self.ends: Callable[[], int] = lambda: 0
        self.fetches: Callable[[], object] = lambda: None
        self.facts = Facts()
        stand_in(monkeypatch, "covey.training.run", train=self._run)
        stand_in(monkeypatch, "covey.training.quickstart", quickstart=self._run)
        stand_in(monkeypatch, "covey.checks.survey", survey=self._survey, fetch_model=self._fetch)

    def _run(self, resolved: Resolved, found: Survey, others: object) -> Outcome:
        assert found.facts == changed(self.facts, launch={"num_processes": found.facts.launch.num_processes})
        self.order.append("run")
        self.got.append(resolved)
        return Outcome(self.ends())

    def _survey(
        self, config: Any, num_processes: int, *, offline: bool = False, machine: Any = None
    ) -> Survey:
        self.order.append("facts offline" if offline else "facts")
        self.gathered.append(num_processes)
        return Survey(changed(self.facts, launch={"num_processes": num_processes}), self.order)

    def _fetch(self, config: Any) -> None:
        self.order.append("fetch")
        self.fetches()


class Launched:
    """Stands in for the launching of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: list[str] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.order = [] if order is None else order
        monkeypatch.setattr("covey.cli.start.launch", self._launch)

    def _launch(self, *arguments: Any) -> int:
        self.order.append("launch")
        self.calls.append(arguments)
        return 3


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Put a module of this content in the place of another for one test."""
    module = types.ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


def alone(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Work in a directory, in a process that no launcher has started."""
    monkeypatch.chdir(directory)
    own = (ranks.EXIT_FILE, launch.OUTPUT_DIR)
    for name in (*rank_variables(0, 1), "NPROC_PER_NODE", "NNODES", "NODE_RANK", *own):
        monkeypatch.delenv(name, raising=False)


def rank_variables(rank: int, world: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {**{n: str(v) for n, v in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def raises(error: BaseException) -> Callable[[], int]:
    """A function that ends so."""

    def end() -> int:
        raise error

    return end


def codes_in(text: str) -> list[str]:
    """The codes of problems as they are shown."""
    return [line.split()[0] for line in text.splitlines() if line[:1] in "EW" and line[1:4].isdigit()]
