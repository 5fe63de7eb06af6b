"""Where code waits for the device: every read of a tensor's values by the host.

On the meta device nothing has values, so a read would raise; within `Syncs` it gives zeros, and is counted
with the line of covey that asked.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import covey

_SOURCE = str(Path(covey.__file__).parent)
# By name: inference mode shows calls that are taken apart elsewhere, `item` beside what it calls.
_SCALARS = ("item", "_local_scalar_dense")
_TRUTHS = ("equal", "allclose", "is_nonzero")
_INDEXED = ("index", "index_put", "index_put_")


def reads(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator hands values of a tensor to the host."""
    name = operator.overloadpacket.__name__
    if name in (*_SCALARS, *_TRUTHS, "nonzero"):
        return True
    if name in _INDEXED:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in ("to", "_to_copy", "copy_") and _goes_to_host(name, args, kwargs)


def _goes_to_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "copy_":
        return bool(args[0].device.type == "cpu" and args[1].device.type != "cpu")
    others = [a.device if isinstance(a, Tensor) else a for a in args[1:]]
    to = kwargs.get("device") or next((d for d in others if isinstance(d, torch.device)), None)
    return to is not None and to.type == "cpu" and args[0].device.type != "cpu"


def place() -> str:
    """The innermost line of covey that is being executed: `learner/update.py: accumulate`."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(_SOURCE)]
    if not frames:
        return "outside of covey"
    return f"{Path(frames[-1].filename).relative_to(_SOURCE)}: {frames[-1].name}"


class Syncs(TorchDispatchMode):
    """Counts reads by their place, in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not reads(func, args, kwargs):
            return func(*args, **kwargs)
        self.found[place()] += 1
        if all(not isinstance(a, Tensor) or a.device.type != "meta" for a in args):
            return func(*args, **kwargs)
        return _zeros(func.overloadpacket.__name__, args[0], kwargs)


def _zeros(name: str, of: Tensor, kwargs: dict[str, Any]) -> Any:
    """What the host reads of a tensor without values."""
    if name in _SCALARS:
        return False if of.dtype == torch.bool else 0.0 if of.is_floating_point() else 0
    if name in _TRUTHS:
        return True
    if name == "nonzero":
        return torch.zeros(0, of.dim(), dtype=torch.long, device="meta")
    if name == "copy_":
        return of.zero_()
    if name in ("to", "_to_copy"):
        return torch.zeros(of.shape, dtype=kwargs.get("dtype") or of.dtype)
    raise NotImplementedError(f"{name} reads {tuple(of.shape)} on the meta device")
