"""What ranks say to each other outside the gradient: sums, maxima and JSON bytes, never pickled objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist

from covey.activity import PHASES, Activity, ranks_word
from covey.codes import CODES
from covey.errors import GuardStop, OtherRankFailed, RunFailed
from covey.texts import joined, packed, tr, unpacked
from covey.types import Finding, Fix, Severity


class Comm(Protocol):
    """The ranks of a run, and where this one is. Every method is collective."""

    rank: int
    world: int
    activity: Activity

    def begin(self, phase: str, *, num_micro: int = 0, num_tokens: int = 0) -> None: ...

    def sum(self, values: Sequence[float]) -> list[float]: ...

    def max(self, values: Sequence[float]) -> list[float]: ...

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def gather_json(self, value: Any) -> list[Any]: ...


class LocalComm:
    """One process: every collective is the identity."""

    rank = 0
    world = 1

    def __init__(self, activity: Activity | None = None) -> None:
        self.activity = activity or Activity()

    def begin(self, phase: str, *, num_micro: int = 0, num_tokens: int = 0) -> None:
        """Enter a phase."""
        self.activity.enter(phase)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """The one rank's value."""
        return [value]


class GroupComm:
    """The ranks of the default process group, over CPU tensors (gloo)."""

    def __init__(self, activity: Activity | None = None) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.activity = activity or Activity()

    def begin(self, phase: str, *, num_micro: int = 0, num_tokens: int = 0) -> None:
        """Enter a phase that has collectives once every rank is about to, with the same step and counts.

        Raises GuardStop (F302) on every rank where they differ. Until all are there, the time counts as the
        former phase's: what one rank alone does, such as saving, takes every rank as long.
        """
        plan = [PHASES.index(phase), self.activity.step, num_micro, num_tokens]
        own = torch.tensor(plan, dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        with self._in("begin"):
            dist.all_gather(parts, own)
        check_plans([p.tolist() for p in parts])
        self.activity.enter(phase)

    @contextmanager
    def _in(self, collective: str) -> Iterator[None]:
        self.activity.wait(collective)
        yield
        self.activity.leave_collective()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums in float64; every rank gives the same number of values."""
        with self._in("sum"):
            return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maxima in float64; every rank gives the same number of values."""
        with self._in("max"):
            return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return [float(x) for x in tensor.tolist()]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a CPU tensor over ranks."""
        with self._in("sum_tensor"):
            dist.all_reduce(tensor)
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with self._in("gather_json"):
            dist.all_gather(sizes, torch.tensor([data.numel()]))
            lengths = [int(s) for s in sizes]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = [torch.zeros_like(padded) for _ in range(self.world)]
            dist.all_gather(parts, padded)
        return [json.loads(p[:n].numpy().tobytes().decode()) for p, n in zip(parts, lengths, strict=True)]


def raise_on_all_ranks(comm: Comm, error: Exception | None) -> None:
    """Raise on every rank what one of them failed with (None: this one did not). Collective.

    A stop of a guard comes first, then a run that cannot go on: all ranks raise the same finding. Any other
    error is raised on its own rank, and OtherRankFailed on the others.
    """
    if comm.world == 1:
        if error is not None:
            raise error
        return
    every = enumerate(comm.gather_json(None if error is None else _told(error)))
    failed = sorted(((rank, told) for rank, told in every if told is not None), key=lambda f: f[1]["order"])
    if not failed:
        return
    rank, told = failed[0]
    if told["finding"] is not None:
        finding = _finding(told["finding"])
        stop = GuardStop(finding) if told["order"] == 0 else RunFailed(finding, told["exit_code"])
        raise stop from error
    raise error or OtherRankFailed(tr("rank {rank} failed: {words}", rank=rank, words=told["words"]))


def _told(error: Exception) -> dict[str, Any]:
    """What the other ranks are told of an error."""
    words = f"{type(error).__name__}: {error}"
    found: dict[str, Any] = {"order": 2, "finding": None, "exit_code": 1, "words": words}
    if isinstance(error, GuardStop | RunFailed):
        order = 0 if isinstance(error, GuardStop) else 1
        found |= {"order": order, "finding": _packed(error.finding)}
    if isinstance(error, RunFailed):
        found["exit_code"] = error.exit_code
    return found


_TEXTS = ("seen", "why", "cause")


def _packed(finding: Finding) -> dict[str, Any]:
    """A finding as JSON, with its texts as they can be put into another language."""
    fixes = [{"text": packed(fix.text), "edits": dict(fix.edits)} for fix in finding.fixes]
    texts = {name: packed(getattr(finding, name)) for name in _TEXTS}
    return {**asdict(finding), **texts, "fixes": fixes}


def _finding(values: dict[str, Any]) -> Finding:
    fixes = tuple(Fix(text=unpacked(fix["text"]), edits=fix["edits"]) for fix in values["fixes"])
    texts = {name: unpacked(values[name]) for name in _TEXTS}
    return Finding(**{**values, **texts, "fixes": fixes, "severity": Severity(values["severity"])})


def check_plans(plans: Sequence[Sequence[int]]) -> None:
    """Raise GuardStop (F302) where ranks are about to do different things.

    A plan is the number of a phase in PHASES, the optimizer steps taken, micro-batches and trained tokens of
    the step; one a rank.
    """
    if all(plan == plans[0] for plan in plans):
        return
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, plan in enumerate(plans):
        alike.setdefault(tuple(plan), []).append(rank)
    raise GuardStop(
        Finding(
            code="F302",
            seen=joined("; ", [f"{ranks_word(ranks)}: {_plan_words(plan)}" for plan, ranks in alike.items()]),
            why=CODES["F302"].why,
            cause=tr(
                "A file, a package or an environment variable differs between processes, or covey has a bug."
            ),
            fixes=(Fix(text=tr("compare data, model and package versions on the machines, then resume")),),
            step=plans[0][1],
        )
    )


def _plan_words(plan: Sequence[int]) -> str:
    phase, step, num_micro, num_tokens = plan
    plural = "" if num_micro == 1 else "es"
    counts = (
        tr(
            " with {num_micro} micro-batch{plural} and {num_tokens:,} trained tokens",
            num_micro=num_micro,
            plural=plural,
            num_tokens=num_tokens,
        )
        if num_micro
        else ""
    )
    return tr("{phases} after step {step}{counts}", phases=PHASES[phase], step=step, counts=counts)
