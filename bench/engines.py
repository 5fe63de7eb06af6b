"""Train the built-in model with every engine and print them side by side: agreement, speed, learning.

Each run is the same command but for its engine: covey's own, `generate` of transformers, vLLM in the process,
and both engines behind `covey rollout`. Run it in the environment of `make vllm-env`, on an idle machine:
`.vllm-env/bin/python bench/engines.py [STEPS]`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_STEPS = 40
_WORDS = (
    *("train", "--model", "quickstart", "--dataset", "quickstart#8", "--reward_funcs", "accuracy"),
    *("--num_generations", "8", "--max_completion_length", "32", "--learning_rate", "2e-4"),
    *("--lr_scheduler_type", "constant", "--save_steps", "1000", "--reward_trial", "false"),
)
_VLLM = ("--vllm_max_model_len", "256", "--vllm_gpu_memory_utilization", "0.2")
_SERVER = ("rollout", "--model", "quickstart", "--port", "0")
ENGINES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "covey's own": ((), ()),
    "`generate` of transformers": (("--engine", "generate"), ()),
    "vLLM in the process": (("--use_vllm", "true", *_VLLM), ()),
    "covey's own, `covey rollout`": ((), _SERVER),
    "vLLM, `covey rollout`": ((), (*_SERVER, "--engine", "vllm", *_VLLM)),
}
"""What the run types for each engine, and the command of the server where it has one."""


def main() -> None:
    """A line of a table for each engine."""
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else _STEPS
    sys.stdout.write(
        "| engine | s a step | of that rollout | publish, s | tokens/s | gap of logprobs, largest | slope | "
        "reward, first and last 5 steps |\n|---|---|---|---|---|---|---|---|\n"
    )
    for name, (words, server) in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder, _serving(server, Path(folder)) as more:
            typed = [*_WORDS, *words, *more, "--max_steps", str(num_steps), "--output_dir", f"{folder}/run"]
            done = subprocess.run(
                [sys.executable, "-m", "covey", *typed], capture_output=True, text=True, cwd=folder
            )
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr}")
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        sys.stdout.write(_line(name, [json.loads(line) for line in lines]) + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _serving(command: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """A server for as long as the block lasts; what a run types to use it."""
    if not command:
        yield []
        return
    token = folder / "token"
    with subprocess.Popen(
        [sys.executable, "-m", "covey", *command, "--token_file", str(token)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as server:
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith("ready"))
            found = re.search(r"http://\S+", ready)
            assert found is not None
            yield ["--rollout_servers", found[0], "--rollout_token_file", str(token)]
        finally:
            server.terminate()


def _line(name: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """Medians leave out the first step, which compiles and sends the first weights."""
    later = steps[1:]

    def median(metric: str) -> float:
        return statistics.median(step.get(metric) or 0.0 for step in later)

    def mean(part: Sequence[Mapping[str, Any]]) -> float:
        return statistics.fmean(step["reward"] for step in part)

    # The number of tokens is that of the run so far.
    speed = statistics.median(
        (step["num_tokens"] - before["num_tokens"]) / step["time/rollout_s"]
        for before, step in itertools.pairwise(steps)
    )
    slopes = [step["sampling/logprob_slope"] for step in steps]
    gap = max(step["sampling/logprob_max_gap"] for step in steps)
    published = median("time/publish_s")
    cells = (
        name,
        f"{median('time/step_s'):.3f}",
        f"{median('time/rollout_s'):.3f}",
        f"{published:.3f}" if published else "–",
        f"{speed:,.0f}",
        f"{gap:.1e}",
        f"{min(slopes):.6f} to {max(slopes):.6f}",
        f"{mean(steps[:5]):.2f}, {mean(steps[-5:]):.2f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
