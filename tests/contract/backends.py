"""The backends that the contract holds: one entry each, and nothing else knows which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from covey.learner.backends.base import Backend


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A backend as a user selects it: `options` are typed, and `worlds` are the numbers of processes.

    `is_variant`: near to one that is here, or to the oracle, so `make test` takes few cells of it, or leaves
    it to `make contract` where it `is_long`. `unknown` are the guards that cannot see their fault on it, each
    with the reason, `nonsense` the planted faults that it cannot have, and `named` those that another code
    names on it. `trained` gives the tensors whose `.grad` the optimizer reads, and `moments` what it has of
    AdamW's.
    """

    name: str
    worlds: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_variant: bool = False
    is_long: bool = False
    unknown: Mapping[str, str] = field(default_factory=dict)
    nonsense: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    trained: Callable[[Backend], Iterable[Tensor]]
    moments: Callable[[Backend], Iterable[Tensor]]


def _masters(backend: Any) -> Iterable[Tensor]:
    return backend.masters.masters


def _moments(backend: Any) -> Iterable[Tensor]:
    return [moment for group in backend.masters._groups for moment in group.adam.moments()]


def _moments_of_zero(backend: Any) -> Iterable[Tensor]:
    return [
        tensor
        for master in backend.masters.masters
        for name, tensor in backend.engine.state(master).items()
        if name != "step"
    ]


_ALONE = "one process has nobody to share a gradient with"

_ON_ONE = dict.fromkeys(
    ("is not reduced over ranks", "is averaged where a sum is due", "is another one on each rank"), _ALONE
)


def _fsdp2(name: str, *, is_variant: bool = True, **more: Any) -> Kind:
    """A model that is split over processes; `more` are options, and fields of the entry."""
    fields = {field: more.pop(field) for field in ("worlds", "nonsense", "is_long") if field in more}
    return Kind(
        name=name,
        options={"fsdp": "full_shard", **more},
        is_variant=is_variant,
        trained=_masters,
        moments=_moments,
        unknown={
            "F121": "no two processes hold the same weight",
            "F123": "a process holds sums over all processes, or nothing before the last pass",
        },
        # A rank has the gradient of its shard from the reduction alone.
        named={"is not reduced over ranks": "F102"},
        **{"worlds": (2,), **fields},
    )


def _zero(name: str, word: str, **more: Any) -> Kind:
    """DeepSpeed by one of its presets."""
    return Kind(
        name=name,
        options={"deepspeed": word},
        is_variant=True,
        trained=_masters,
        moments=_moments_of_zero,
        unknown={
            "F121": "each process steps its own part of the weights",
            "F123": "a process holds sums over all processes",
        },
        named={"is not reduced over ranks": "F102"},
        **{"worlds": (2,), **more},
    )


KINDS = (
    Kind(
        name="single",
        worlds=(1,),
        is_variant=True,
        trained=_masters,
        moments=_moments,
        nonsense=_ON_ONE,
    ),
    Kind(name="ddp", worlds=(2,), trained=_masters, moments=_moments),
    _fsdp2("fsdp2", is_variant=False),
    _fsdp2("fsdp2 offloaded", fsdp_offload=True, is_long=True),
    _fsdp2("fsdp2 on one", worlds=(1,), nonsense=_ON_ONE),
    _zero("zero1", "zero1", is_long=True),
    _zero("zero2", "zero2"),
    _zero("zero2 offloaded", "zero2_offload", is_long=True),
    _zero("zero3", "zero3"),
    _zero("zero3 offloaded", "zero3_offload", is_long=True),
    _zero("zero3 on one", "zero3", worlds=(1,), nonsense=_ON_ONE, is_long=True),
    Kind(
        name="ddp, state in CPU memory",
        worlds=(2,),
        options={"offload_optimizer": True, "offload_reference": True},
        is_variant=True,
        is_long=True,
        trained=_masters,
        moments=_moments,
    ),
    _fsdp2("fsdp2, state in CPU memory", offload_optimizer=True, offload_reference=True, is_long=True),
)
"""Every backend, in the order of the tables."""

BY_NAME = {kind.name: kind for kind in KINDS}
