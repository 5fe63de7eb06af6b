"""Declares how a run tells a program of its steps, and how the program asks for more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from covey.types import Metric, StepRecord

if TYPE_CHECKING:
    from covey.training.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Says which of these follow a step: an evaluation, a checkpoint, the end of the run."""

    evaluate: bool = False
    save: bool = False
    stop: bool = False


class Hooks(Protocol):
    """Is called on every rank, at the same places of the run. An exception of it ends the run."""

    @property
    def may_ask(self) -> bool:
        """Return whether `due` may differ between ranks, which then agree: what one of them asks for, all
        do."""
        ...

    @property
    def adds_adapter(self) -> bool:
        """Return whether a trained adapter is added to the model that the program gave."""
        ...

    @property
    def due(self) -> Due:
        """Return what the program asks for now."""
        ...

    def begin(self, job: Job) -> None:
        """Take the job, which is built and stands before its first step."""
        ...

    def begin_step(self) -> None:
        """Learn that a step begins; called a second time where a rollout was collected for it."""
        ...

    def before_optimizer(self) -> None:
        """Learn that the gradient of a step is whole."""
        ...

    def after_optimizer(self) -> None:
        """Learn that the optimizer has stepped."""
        ...

    def end_step(self, record: StepRecord, due: Due) -> None:
        """Take the record of a step and what follows it by the options; `self.due` is what then does."""
        ...

    def evaluated(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Take the metrics of an evaluation."""
        ...

    def saved(self) -> None:
        """Learn that the checkpoint of the last step is written."""
        ...

    def end_epoch(self, *, is_last: bool) -> None:
        """Learn that a step and what followed it are done; the last one ends an epoch in its middle."""
        ...

    def end(self) -> None:
        """Learn that the run has ended without an error."""
        ...


class NoHooks:
    """Does nothing: a command has no program to tell."""

    may_ask = False
    adds_adapter = True

    def __init__(self) -> None:
        self.due = Due()

    def begin(self, job: Job) -> None: ...

    def begin_step(self) -> None: ...

    def before_optimizer(self) -> None: ...

    def after_optimizer(self) -> None: ...

    def end_step(self, record: StepRecord, due: Due) -> None:
        self.due = due

    def evaluated(self, metrics: Mapping[str, Metric], step: int) -> None: ...

    def saved(self) -> None: ...

    def end_epoch(self, *, is_last: bool) -> None:
        self.due = Due()

    def end(self) -> None: ...
