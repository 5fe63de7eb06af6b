"""What this machine does at best, in float32 and bfloat16: `python rates.py SPEC.json RESULT.json`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A set of weights that stays in the processor's cache, and one that does not.
SETS = {"small": 4 << 20, "large": 512 << 20}
_EDGE = 1024
# Repetitions, each of about so many seconds: far above the clock's own grain.
_TURNS, _TURN_S = 12, 0.05


def main() -> dict[str, dict[str, dict[str, float]]]:
    """FLOP/s of a product of two square matrices by the faster of two libraries, and bytes/s of a copy (read
    and written) and of weights that `linear` reads for 8 and for 64 rows, of a small and of a large set."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with torch.inference_mode():
        for name, dtype in DTYPES.items():
            square = torch.randn(2048, 2048).to(dtype)
            rates = [_rate(2.0 * square.numel() * len(square), product(square)) for product in PRODUCTS]
            found[name] = {"matmul": {"2048": max(rates)}}
            for label, num_bytes in SETS.items():
                found[name][label] = _bytes_rates(dtype, num_bytes)
    return found


def _by_blas(square: Tensor) -> Callable[[], object]:
    # As layers multiply: of bfloat16 some processors have no other fast product.
    return lambda: torch.nn.functional.linear(square, square)


def _by_onednn(square: Tensor) -> Callable[[], object]:
    is_served = square.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not torch.backends.mkldnn.is_available() or not is_served:
        return _by_blas(square)
    return lambda: torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], "")


PRODUCTS = (_by_blas, _by_onednn)


def _bytes_rates(dtype: torch.dtype, num_bytes: int) -> dict[str, float]:
    count = max(1, num_bytes // (_EDGE * _EDGE * dtype.itemsize))
    weights = [torch.randn(_EDGE, _EDGE).to(dtype) for _ in range(count)]
    read = float(sum(w.numel() * w.element_size() for w in weights))
    rates = {
        f"linear {rows}": _rate(read, _reader(weights, torch.randn(rows, _EDGE).to(dtype)))
        for rows in (8, 64)
    }
    source = torch.cat([w.view(-1) for w in weights])
    target = torch.empty_like(source)
    rates["copy"] = _rate(2 * read, lambda: target.copy_(source))
    return rates


def _reader(weights: list[Tensor], rows: Tensor) -> Callable[[], None]:
    def read() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows, weight)

    return read


def _rate(amount: float, work: Callable[[], object]) -> float:
    """The best rate over repetitions: a floor asks what the machine can do, not what it did on average."""
    work()
    count = max(1, math.ceil(_TURN_S / _seconds(work, 1)))
    return amount / min(_seconds(work, count) / count for _ in range(_TURNS))


def _seconds(work: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main()))
