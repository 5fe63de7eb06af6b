"""Processes that are ranks of one run with vLLM in them: torchrun's environment, started afresh."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def on_ranks(program: Path, folder: Path, world: int, limit_s: float = 600) -> list[dict[str, Any]]:
    """What the program of each rank wrote into the file of its argument, as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(world):
        own = common | {"RANK": rank, "LOCAL_RANK": rank}
        environment = os.environ | {name: str(value) for name, value in own.items()}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        said = (folder / f"said-{rank}").open("w")
        words = [sys.executable, str(program), str(folder / f"found-{rank}.json")]
        started.append(subprocess.Popen(words, env=environment, stdout=said, stderr=subprocess.STDOUT))
    try:
        for process in started:
            process.wait(timeout=limit_s)
    finally:
        for process in started:
            process.kill()
            process.wait()
    told = "".join((folder / f"said-{rank}").read_text()[-6000:] for rank in range(world))
    assert [process.returncode for process in started] == [0] * world, told
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]
