"""Part 0: versions, what can be imported, what the device does at most, and torch's attention kernels."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from typing import Any

import torch
import torch.nn.functional as F

from on_gpu.lines import Found, Lines
from on_gpu.machine import compute_dtype, copy_bandwidth, device, matmul_peak

# What a run imports, and what it uses where it is there.
NEEDED = (
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "yaml",
    "jinja2",
    "regex",
    "rich",
    "peft",
    "huggingface_hub",
    "datasets",
    "pyarrow",
    "math_verify",
    "latex2sympy2_extended",
    "matplotlib",
    "covey.cli.main",
    "covey.training.run",
    "covey.rewards.formulas",
)
OPTIONAL = ("triton", "flash_attn", "liger_kernel", "vllm", "trl", "deepspeed")
# The numbers of torch._fused_sdp_choice.
KERNELS = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def run(lines: Lines) -> None:
    """Write what this machine is."""
    lines.case("versions", _versions)
    lines.case("imports", _imports)
    lines.case("limits", lambda: _limits(lines.small))
    lines.case("attention kernel of torch", _kernels)
    lines.case("schema of torch's flash kernel", _schema)


def _versions() -> Found:
    import transformers

    figures: dict[str, Any] = {
        "device": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        import triton

        properties = torch.cuda.get_device_properties(0)
        figures |= {
            "device": properties.name,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "triton": triton.__version__,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    return Found(figures=figures)


def _imports() -> Found:
    missing = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    optional = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    why = f"cannot be imported: {'; '.join(missing)}; see make gpu-wheels" if missing else ""
    return Found(
        figures={"imported": len(NEEDED) - len(missing), "optional": ", ".join(optional) or "none"},
        passed=not missing,
        why=why,
    )


def _limits(small: bool) -> Found:
    dtype = str(compute_dtype()).removeprefix("torch.")
    return Found(
        figures={
            f"{dtype}_product_tflops": matmul_peak(small) / 1e12,
            "copy_tb_per_s": copy_bandwidth(small) / 1e12,
        }
    )


def _kernels() -> Found:
    """Which kernel torch takes for 12 query heads on 2 key heads, with and without a mask."""
    length, dtype = 256, compute_dtype()
    query = torch.randn(1, 12, length, 128, device=device(), dtype=dtype)
    key, value = torch.randn(2, 1, 2, length, 128, device=device(), dtype=dtype)
    wide_key, wide_value = (x.repeat_interleave(6, dim=1) for x in (key, value))
    mask = torch.zeros(1, 1, length, length, device=device(), dtype=dtype)
    choice: Any = torch._fused_sdp_choice
    asked = {
        "causal_grouped": choice(query, key, value, is_causal=True, enable_gqa=True),
        "mask_grouped": choice(query, key, value, mask, enable_gqa=True),
        "mask_repeated": choice(query, wide_key, wide_value, mask),
    }
    F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return Found(figures={name: KERNELS.get(int(number), str(number)) for name, number in asked.items()})


def _schema() -> Found:
    text = str(torch.ops.aten._flash_attention_forward.default._schema)
    return Found(figures={"has_seqused_k": "seqused_k" in text, "schema": text})
