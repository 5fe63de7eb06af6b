"""What is known of GPUs: torch counts them, and is asked where a driver's file is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from covey.checks.run import devices
from covey.checks.run.devices import free_gpu_memory, gpus_have_bfloat16, num_gpus

COUNT = """
import sys
from pathlib import Path
from covey.checks.run import devices
devices._DEVICES = Path(sys.argv[1])
print(devices.num_gpus(), "torch" in sys.modules)
"""


def counted(directory: Path, visible: str) -> str:
    """GPUs of a process that has not imported torch, and whether it has then."""
    environment = {"CUDA_VISIBLE_DEVICES": visible, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(directory)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["null", "nvidiactl", "nvidia-uvm", "dri"])
def test_variables_make_no_gpus(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert counted(tmp_path, "0,1") == "0 False"
    assert counted(tmp_path / "nowhere", "0") == "0 False"


@pytest.mark.parametrize("name", ["nvidia0", "dxg", "kfd"])
def test_torch_is_asked_where_a_driver_is(name: str, tmp_path: Path) -> None:
    """NVIDIA's driver, that of WSL2, ROCm's; behind CUDA_VISIBLE_DEVICES torch shows none of them."""
    (tmp_path / name).touch()
    assert counted(tmp_path, "-1") == "0 True"


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
