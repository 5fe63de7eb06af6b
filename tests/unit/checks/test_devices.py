"""What is known of GPUs: torch counts them, and is asked where a driver's file is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import covey
from covey.checks.run import devices
from covey.checks.run.devices import free_gpu_memory, gpus_have_bfloat16, num_gpus

COUNT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from covey.checks.run import devices
for directory in sys.argv[3:]:
    devices._DEVICES = Path(directory)
    print(devices.num_gpus(), sys.modules.pop("torch", None) is not None)
"""
# In place of torch, whose import takes seconds.
TORCH = "class cuda:\n    is_available, device_count = lambda: True, lambda: 3\n"


@pytest.mark.parametrize(
    ("names", "said"),
    [(("null", "nvidiactl", "nvidia-uvm", "dri"), "0 False"), (("nvidia0", "dxg", "kfd"), "3 True")],
)
def test_torch_is_asked_where_a_driver_is(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """NVIDIA's driver, that of WSL2, ROCm's; variables make no GPUs, nor does a directory without one."""
    (tmp_path / "torch.py").write_text(TORCH)
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/usr/bin:/bin"}
    source = Path(covey.__file__).parents[1]
    directories = [source, tmp_path, *(tmp_path / name for name in names), tmp_path / "none"]
    words = [sys.executable, "-c", COUNT, *map(str, directories)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [*[said] * len(names), "0 False"], done.stderr


def test_torch_that_is_there_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert num_gpus() == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert num_gpus() == 0


def tool(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_what_the_tool_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of WSL2 lies where no PATH leads to; only GPUs that are shown count."""
    script = 'case "$*" in *memory.free*--id=1*) echo 400;; *compute_cap*--id=1*) echo 8.6;; *) exit 9;; esac'
    monkeypatch.setattr(devices, "_SMI", ("nvidia-smi-that-is-not-there", tool(tmp_path / "smi", script)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (free_gpu_memory(), gpus_have_bfloat16()) == (400 << 20, True)


@pytest.mark.parametrize("script", ["exit 9", "echo '[N/A]'"])
def test_torch_says_what_the_tool_does_not(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_SMI", (tool(tmp_path / "smi", script),))
    assert (free_gpu_memory(), gpus_have_bfloat16()) == (None, None)
    monkeypatch.setattr(devices, "num_gpus", lambda: 1)
    monkeypatch.setattr(devices, "_ASK_TORCH", """print('{"free": 7, "bfloat16": false}')""")
    assert (free_gpu_memory(), gpus_have_bfloat16()) == (7, False)
