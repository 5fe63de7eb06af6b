"""Several gloo processes that run a file of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_in_processes(
    file: str,
    *arguments: object,
    processes: int = 2,
    timeout: float = 180,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a file, which joins the others by itself, with these arguments; fail where one of them fails."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"),
        *(file, *map(str, arguments)),
    ]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
