"""What ranks say to each other outside the gradient: sums, maxima, tensors and JSON bytes, never pickled
objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from covey.activity import PHASES, Activity, ranks_word
from covey.codes import CODES
from covey.errors import GuardStop, OtherRankFailed, RunFailed
from covey.texts import joined, packed, packed_in, tr, unpacked, unpacked_in
from covey.types import Finding, Fix, Severity

COLLECTIVE_LIMIT = timedelta(minutes=60)
"""Above the half hour of the watchdog, so that a hang is named before a collective fails for it."""


class Comm(Protocol):
    """The ranks of a run, and where this one is. Every method is collective."""

    rank: int
    world: int
    activity: Activity
    first_rank: int

    def begin(self, phase: str, *, num_micro: int = 0, num_tokens: int = 0) -> None: ...

    def sum(self, values: Sequence[float]) -> list[float]: ...

    def max(self, values: Sequence[float]) -> list[float]: ...

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def gather_json(self, value: Any) -> list[Any]: ...

    def gather_tensors(self, own: torch.Tensor) -> list[torch.Tensor]: ...

    def swap_tensors(self, to_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


class LocalComm:
    """One process: every collective is the identity."""

    rank = 0
    world = 1
    first_rank = 0

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

    def gather_tensors(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The one rank's tensor."""
        return [own]

    def swap_tensors(self, to_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The one tensor, which this rank gives itself."""
        return list(to_rank)


class GroupComm:
    """The ranks of a process group, by itself the default one, over CPU tensors (gloo).

    `first_rank` is the number that the first of them has in the run.
    """

    def __init__(
        self, activity: Activity | None = None, group: dist.ProcessGroup | None = None, first_rank: int = 0
    ) -> None:
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.activity = activity or Activity()
        self.first_rank = first_rank
        self._group = group

    def begin(self, phase: str, *, num_micro: int = 0, num_tokens: int = 0) -> None:
        """Enter a phase that has collectives once every rank is about to, with the same step and counts.

        Raises GuardStop (F302) on every rank where they differ. Until all are there, the time counts as the
        former phase's: what one rank alone does, such as saving, takes every rank as long.
        """
        plan = [PHASES.index(phase), self.activity.step, num_micro, num_tokens]
        own = torch.tensor(plan, dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        with self._in("begin"):
            dist.all_gather(parts, own, group=self._group)
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
        dist.all_reduce(tensor, op=op, group=self._group)
        return [float(x) for x in tensor.tolist()]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of a CPU tensor over ranks."""
        with self._in("sum_tensor"):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with self._in("gather_json"):
            dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
            lengths = [int(s) for s in sizes]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = [torch.zeros_like(padded) for _ in range(self.world)]
            dist.all_gather(parts, padded, group=self._group)
        return [json.loads(p[:n].numpy().tobytes().decode()) for p, n in zip(parts, lengths, strict=True)]

    def gather_tensors(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's CPU tensor, in rank order: (n,) or (n, C), where n is each rank's own, and C and the
        dtype are the same everywhere.

        Each pair of ranks sends exactly these bytes, without padding. The own tensor comes back itself.
        """
        own = own.contiguous()
        with self._in("gather_tensors"):
            shapes = self._gather_counts([own.shape[0], prod(own.shape[1:]) * own.element_size()])
            assert len({width for _, width in shapes}) == 1, f"rows of different widths: {shapes}"
            parts = [own.new_empty((size, *own.shape[1:])) for size, _ in shapes]
            self._send_and_receive([own] * self.world, parts)
        parts[self.rank] = own
        return parts

    def swap_tensors(self, to_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give each rank the uint8 tensor (n,) that stands at its number; return the one that each gives to
        this rank.

        What a rank gives to another goes straight to it. The one for this rank itself comes back itself.
        """
        assert len(to_rank) == self.world, "one tensor for each rank"
        assert all(t.dtype is torch.uint8 and t.dim() == 1 for t in to_rank), "bytes"
        given = [tensor.contiguous() for tensor in to_rank]
        with self._in("swap_tensors"):
            sizes = self._gather_counts([tensor.numel() for tensor in given])
            parts = [torch.empty(row[self.rank], dtype=torch.uint8) for row in sizes]
            self._send_and_receive(given, parts)
        parts[self.rank] = given[self.rank]
        return parts

    def _gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """Every rank's counts, of which each gives the same number."""
        own = torch.tensor(list(counts), dtype=torch.int64)
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own, group=self._group)
        return [part.tolist() for part in parts]

    def _send_and_receive(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send each other rank its tensor and fill the one from it; both know which are empty and not sent.

        All are posted before any is waited for, so no order of ranks can block: gloo keeps what arrives
        before it is asked for on the sender's side.
        """
        works = []
        for distance in range(1, self.world):
            source, target = (self.rank - distance) % self.world, (self.rank + distance) % self.world
            if received[source].numel():
                works.append(dist.irecv(received[source], group=self._group, group_src=source))
            if sent[target].numel():
                works.append(dist.isend(sent[target], group=self._group, group_dst=target))
        for work in works:
            assert work is not None, "this rank is one of the group"
            work.wait()


def neighbours(comm: Comm, size: int) -> Comm:
    """Return the `size` consecutive ranks that this one is among, as one of whole groups of that size.
    Collective over all ranks."""
    if size == 1:
        return LocalComm(comm.activity)
    first = comm.rank - comm.rank % size
    for start in range(0, comm.world, size):
        # Every rank makes every group, in the same order.
        made = dist.new_group(list(range(start, start + size)), backend="gloo", timeout=COLLECTIVE_LIMIT)
        if start == first:
            own = made
    return GroupComm(comm.activity, own, first)


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
    raise error or OtherRankFailed(
        tr("rank {rank} failed: {words}", rank=comm.first_rank + rank, words=unpacked(told["words"]))
    )


@contextmanager
def failing_together(comm: Comm) -> Iterator[None]:
    """Raise what one rank fails with inside on every rank, as `raise_on_all_ranks` does. Collective; nothing
    inside it may be."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure = error
    raise_on_all_ranks(comm, failure)


def _told(error: Exception) -> dict[str, Any]:
    """What the other ranks are told of an error."""
    words = joined(": ", [type(error).__name__, str(error)])
    found: dict[str, Any] = {"order": 2, "finding": None, "exit_code": 1, "words": packed(words)}
    if isinstance(error, OtherRankFailed):
        # It has told of what failed on another rank, which tells it here.
        found["order"] = 3
    if isinstance(error, GuardStop | RunFailed):
        order = 0 if isinstance(error, GuardStop) else 1
        found |= {"order": order, "finding": packed_in(asdict(error.finding))}
    if isinstance(error, RunFailed):
        found["exit_code"] = error.exit_code
    return found


def _finding(told: dict[str, Any]) -> Finding:
    values = unpacked_in(told)
    fixes = tuple(Fix(**fix) for fix in values["fixes"])
    return Finding(**{**values, "fixes": fixes, "severity": Severity(values["severity"])})


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
