"""The backends that the contract holds: one entry each, and nothing else knows which there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """A backend as a user selects it: `options` are typed, and `worlds` are the numbers of processes.

    `is_variant`: near to one that is here, or to the oracle, so `make test` takes few cells of it, or leaves
    it to `make contract` where it `is_long`. `unknown` are the guards that cannot see their fault on it, each
    with the reason, `nonsense` the planted faults that it cannot have, and `named` those that another code
    names on it.
    """

    name: str
    worlds: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_variant: bool = False
    is_long: bool = False
    unknown: Mapping[str, str] = field(default_factory=dict)
    nonsense: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


_ALONE = "one process has nobody to share a gradient with"

SHIFTED = "a row that was moved has the next tokens' logprobs"
TURNED = "a row that was moved has its logprobs in another order"

_ON_ONE = {
    **dict.fromkeys(
        ("is not reduced over ranks", "is averaged where a sum is due", "is another one on each rank"), _ALONE
    ),
    **dict.fromkeys((SHIFTED, TURNED), "one process has every row that it forwards"),
}


def _split(name: str, options: Mapping[str, Any], *, is_variant: bool = True, **more: Any) -> Kind:
    """A backend whose processes hold parts of one model, or of its optimizer."""
    return Kind(
        name=name,
        options=options,
        is_variant=is_variant,
        unknown={
            "F121": "no two processes step the same weight",
            "F123": "a process holds sums over all processes, or nothing before the last pass",
        },
        # A rank has the gradient of its part from the reduction alone.
        named={"is not reduced over ranks": "F102"},
        **{"worlds": (2,), **more},
    )


_FSDP = {"fsdp": "full_shard"}
_IN_CPU_MEMORY = {"offload_optimizer": True, "offload_reference": True}

KINDS = (
    Kind(name="single", worlds=(1,), is_variant=True, nonsense=_ON_ONE),
    Kind(name="ddp", worlds=(2,)),
    _split("fsdp2", _FSDP, is_variant=False),
    _split("fsdp2 offloaded", {**_FSDP, "fsdp_offload": True}, is_long=True),
    _split("fsdp2 on one", _FSDP, worlds=(1,), nonsense=_ON_ONE),
    _split("zero1", {"deepspeed": "zero1"}, is_long=True),
    _split("zero2", {"deepspeed": "zero2"}),
    _split("zero2 offloaded", {"deepspeed": "zero2_offload"}, is_long=True),
    _split("zero3", {"deepspeed": "zero3"}),
    _split("zero3 offloaded", {"deepspeed": "zero3_offload"}, is_long=True),
    _split("zero3 on one", {"deepspeed": "zero3"}, worlds=(1,), nonsense=_ON_ONE, is_long=True),
    Kind(name="ddp, state in CPU memory", worlds=(2,), options=_IN_CPU_MEMORY, is_variant=True, is_long=True),
    _split("fsdp2, state in CPU memory", {**_FSDP, **_IN_CPU_MEMORY}, is_long=True),
)
"""Every backend, in the order of the tables."""
