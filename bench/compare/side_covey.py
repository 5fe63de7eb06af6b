"""One case with covey: `python side_covey.py CASE.json RESULT.json`."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Train, and return seconds of every step, of its rollout, generated tokens and peak memory."""
    from covey.config.resolve import from_dict
    from covey.training import parts
    from covey.training.facts import survey
    from covey.training.job import Job
    from covey.training.run import train

    ends: list[float] = []
    finish = Job.finish_step
    scores: list[float] = []

    def timed(self: Job, *arguments: Any) -> None:
        rewards = self.buffer.metrics[f"rewards/{case['reward']}/mean"].value
        finish(self, *arguments)
        ends.append(time.perf_counter())
        scores.append(float(rewards or 0.0))
        if case["target"] is not None and len(scores) >= 10 and sum(scores[-10:]) / 10 >= case["target"]:
            self.ended_by = "the target"

    Job.finish_step = timed  # type: ignore[method-assign]
    if case["forced"]:
        sampling = parts.sampling

        def endless(*arguments: Any) -> Any:
            from dataclasses import replace

            return replace(sampling(*arguments), stop_token_ids=())

        parts.sampling = endless  # type: ignore[assignment]
    options = {
        "model": case["model_dir"],
        "dataset": [case["data_file"]],
        "reward_funcs": [f"{Path(__file__).with_name('rewards.py')}:{case['reward']}"],
        "num_generations": case["num_generations"],
        "per_device_train_batch_size": case["per_device_train_batch_size"],
        "gradient_accumulation_steps": case["gradient_accumulation_steps"],
        "max_completion_length": case["max_completion_length"],
        "learning_rate": case["learning_rate"],
        "torch_dtype": case["dtype"],
        "tuner_type": "lora" if case["lora"] else "full",
        "max_steps": case["steps"] + case["warmup"],
        "save_steps": 10**6,
        "output_dir": str(work / "covey"),
        "overwrite_output_dir": True,
        "logging_steps": 50,
        **case["options"],
    }
    resolved = from_dict(options)
    with survey(resolved.config, 1) as found:
        started = time.perf_counter()
        train(resolved, found)
    lines = [json.loads(line) for line in (work / "covey" / "metrics.jsonl").read_text().splitlines()]
    return {
        "started": started,
        "ends": ends,
        "rollout_s": [line["time/rollout_s"] for line in lines],
        "tokens": [line["completions/mean_length"] * line["n"]["completions/mean_length"] for line in lines],
        "scores": scores,
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
