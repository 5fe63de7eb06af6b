"""The GPUs of this machine as torch sees them, and nvidia-smi's word on their memory and age.

torch alone knows what it can compute on: it counts by CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, by its own
build, and by the driver. Importing it takes seconds, so it is not asked where there is no file of a GPU's
driver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from os.path import isdir
from pathlib import Path
from typing import Any

_DEVICES = Path("/dev")
# NVIDIA's driver, that of WSL2, and ROCm's.
_GPU_FILE = re.compile(r"nvidia\d+|dxg|kfd")
_SMI = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_SMI_S, _TORCH_S = 5, 60
_BFLOAT16_SINCE = 8.0
# In a process of its own: what asks a GPU for its memory keeps some of it to its end.
_ASK_TORCH = """
import json, torch
gpus = range(torch.cuda.device_count())
free = min(torch.cuda.mem_get_info(i)[0] for i in gpus)
print(json.dumps({"free": free, "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False)}))
"""


def num_gpus() -> int:
    """GPUs that torch computes on."""
    if "torch" not in sys.modules and not _has_gpu_files():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_gpu_memory() -> int | None:
    """Bytes that are free on the GPU with the least; None where nobody says."""
    try:
        return min(int(line) for line in _of_smi("memory.free")) << 20
    except ValueError:
        free = _of_torch().get("free")
        return free if isinstance(free, int) else None


def gpus_have_bfloat16() -> bool | None:
    """Whether every GPU computes in bfloat16; None where nobody says."""
    try:
        lines = _of_smi("compute_cap")
        return all(float(line) >= _BFLOAT16_SINCE for line in lines) if lines else _of_torch().get("bfloat16")
    except ValueError:
        return _of_torch().get("bfloat16")


def _has_gpu_files() -> bool:
    return isdir(_DEVICES) and any(_GPU_FILE.fullmatch(d.name) for d in _DEVICES.iterdir())


def _of_smi(column: str) -> list[str]:
    """What nvidia-smi says of the GPUs that are shown, a line each; none where it does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = [
        f"--query-gpu={column}",
        "--format=csv,noheader,nounits",
        *([f"--id={visible}"] if visible else []),
    ]
    for tool in _SMI:
        try:
            done = subprocess.run([tool, *query], capture_output=True, text=True, timeout=_SMI_S, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return done.stdout.split()
    return []


def _of_torch() -> dict[str, Any]:
    """The same by torch, for GPUs that are not NVIDIA's; empty where it sees none."""
    if not num_gpus():
        return {}
    program = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=_TORCH_S, check=True)
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
