"""What the device can do, the shapes of models, and random models of them built where they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of the Qwen families by its sizes; `qk_norm` is Qwen 3's, biases are Qwen 2's."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    intermediate: int
    vocabulary: int = 151_936
    tied: bool = True
    qk_norm: bool = False

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of the backbone."""
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the output embedding."""
        return self.vocabulary * self.hidden

    def kv_bytes(self, size: int) -> int:
        """Bytes of keys and values of a token at `size` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.width * size


TINY = Shape(name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, width=16, intermediate=96, vocabulary=320)
QWEN_05B = Shape(name="0.5B", hidden=896, layers=24, heads=14, kv_heads=2, width=64, intermediate=4864)
QWEN_06B = Shape(
    name="0.6B", hidden=1024, layers=28, heads=16, kv_heads=8, width=128, intermediate=3072, qk_norm=True
)
QWEN_15B = Shape(name="1.5B", hidden=1536, layers=28, heads=12, kv_heads=2, width=128, intermediate=8960)
QWEN_7B = Shape(
    name="7B",
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    width=128,
    intermediate=18944,
    vocabulary=152_064,
    tied=False,
)


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_model(shape: Shape, dtype: torch.dtype) -> Any:
    """A model with random weights, made on the device in `dtype`."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 32768,
    }
    if shape.qk_norm:
        config: Any = transformers.Qwen3Config(head_dim=shape.width, **sizes)
    else:
        config = transformers.Qwen2Config(**sizes)
    torch.manual_seed(0)
    with torch.device(device()):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def wait() -> None:
    """Until the device has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """The median time of `work`, after one call that is not counted."""
    work()
    wait()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def copy_bandwidth(small: bool) -> float:
    """Bytes read and written a second by a copy within the device's memory."""
    count = 1 << (24 if small else 30)
    source = torch.empty(count, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * count / seconds_of(lambda: target.copy_(source), 5)


def matmul_peak(small: bool) -> float:
    """Operations a second of a large product of matrices in the dtype that training computes in."""
    side = 512 if small else 8192
    dtype = compute_dtype()
    a = torch.randn(side, side, device=device(), dtype=dtype)
    return 2 * side**3 / seconds_of(lambda: a @ a, 10)


def compute_dtype() -> torch.dtype:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def peak_bytes() -> int:
    """Most bytes of the GPU that were in use since `forget_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def forget_peak() -> None:
    """Give memory back and begin anew to count."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
