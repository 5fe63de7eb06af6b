"""A CUDA graph's rules on a CPU: what was launched is launched again, on the very memory of the first time.

Numbers of Python are those of the recording, whatever they are by now. What a graph cannot hold is refused:
reads by the host, and tensors that are made of Python's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from support.syncs import place, reads

Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reads(func, args, kwargs) or func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError(f"{func} is not permitted while a stream is recorded ({place()})")
        out = func(*args, **kwargs)
        # A recording is of memory: of what a tensor's name stands for later it knows nothing.
        given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        self.calls.append((func, *given, out))
        return out


def record(compute: Callable[[], None]) -> Callable[[], None]:
    """Record what `compute` calls; the result plays it."""
    listener = _Listener()
    with listener:
        compute()

    def play() -> None:
        for func, args, kwargs, out in listener.calls:
            found = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                    if isinstance(old, Tensor) and not _is_within(old, args, kwargs):
                        old.copy_(new)

    return play


def _is_within(out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an output lies in an input's memory, as that of `reshape` may."""
    place = out.untyped_storage().data_ptr()
    given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    return any(t.untyped_storage().data_ptr() == place for t in given)
