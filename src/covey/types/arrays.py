"""Arrays of tokens: what carriers hold in place of Python objects, one number of four bytes a token.

numpy is imported where an array is made, so that a command that makes none does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
    Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
    Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
else:
    Ints = Floats = Bools = Any

Versions = tuple[tuple[int, int], ...]
"""Policy versions of consecutive tokens, as runs: `((4, 10), (5, 3))` are ten tokens of 4 and three of 5."""


def ints(values: Iterable[int]) -> Ints:
    """Token ids as int32."""
    array: Ints = _array(values, "int32")
    return array


def joined_ints(parts: Sequence[Ints]) -> Ints:
    """Token ids one behind the other."""
    import numpy as np

    return ints(np.concatenate(parts))


def joined_floats(parts: Sequence[Floats]) -> Floats:
    """Numbers one behind the other; no part makes an empty array."""
    import numpy as np

    return floats(np.concatenate(parts)) if parts else floats(())


def joined_bools(parts: Sequence[Bools]) -> Bools:
    """Truth values one behind the other."""
    import numpy as np

    return bools(np.concatenate(parts))


def floats(values: Iterable[float]) -> Floats:
    """Numbers as float32, which logprobs are computed in."""
    array: Floats = _array(values, "float32")
    return array


def bools(values: Iterable[bool]) -> Bools:
    """One truth value for each token."""
    array: Bools = _array(values, "bool")
    return array


def constant_bools(value: bool, count: int) -> Bools:
    """Return (count,) bool, all `value`."""
    import numpy as np

    return bools(np.full(count, value))


def constant_floats(value: float, count: int) -> Floats:
    """Return (count,) float32, all `value`."""
    import numpy as np

    return floats(np.full(count, value, np.float32))


def num_true(values: Bools) -> int:
    """Count the True entries of (n,)."""
    import numpy as np

    return int(np.count_nonzero(values))


def _array(values: Iterable[Any], dtype: str) -> Any:
    import numpy as np

    # Asking for the very types first is what makes this fast.
    if type(values) not in (np.ndarray, list, tuple) and not isinstance(values, Sequence):
        values = list(values)
    array: Any = np.asarray(values, dtype=dtype)
    if array.flags.writeable:
        # What several carriers share is changed by none of them.
        array = array.view()
        array.flags.writeable = False
    return array


def runs(values: Iterable[int]) -> Versions:
    """Consecutive equal values as runs of value and count."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return tuple((value, count) for value, count in found)


def joined_runs(parts: Iterable[Versions]) -> Versions:
    """Runs one behind the other, equal neighbours as one."""
    found: list[tuple[int, int]] = []
    for version, count in (run for part in parts for run in part if run[1]):
        if found and found[-1][0] == version:
            count += found.pop()[1]
        found.append((version, count))
    return tuple(found)


def each(versions: Versions) -> Iterator[int]:
    """The version of each token."""
    return (version for version, count in versions for _ in range(count))


def selected_runs(versions: Versions, mask: Bools) -> Versions:
    """Return the versions of the tokens where a mask is True, as runs."""
    return runs(v for v, is_in in zip(each(versions), mask.tolist(), strict=True) if is_in)


class ByValue:
    """Carriers with arrays are equal where the arrays hold the same numbers."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_is_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]


def _is_equal(one: Any, other: Any) -> bool:
    if hasattr(one, "shape") and hasattr(other, "shape"):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)
