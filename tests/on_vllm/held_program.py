"""support/held.py with vLLM imported before anything is measured: `held_program.py RUNS.json FOLDER`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from covey.environment import settle
from support import held

_OF_VLLM = ("vllm", "vllm.model_executor.models.llama", "vllm.v1.worker.cpu_worker", "torch._inductor")

if __name__ == "__main__":
    settle()
    for name in _OF_VLLM:
        import_module(name)
    sys.exit(held.main(Path(sys.argv[1]), Path(sys.argv[2])))
