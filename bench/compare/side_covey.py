"""One case with covey: `python side_covey.py CASE.json RESULT.json`."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from memory import children_peak_bytes, gpu_peak_bytes, peak_bytes, resident_bytes

# The lengths of so many steps, from the end, are handed on for the count of operations.
_COUNTED = 10


def main(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Train, and return seconds of every step and of its parts, what was generated, and memory."""
    from covey import environment

    environment.settle()
    from covey.checks.survey import survey
    from covey.config.resolve import from_dict
    from covey.training.run import train

    notes: dict[str, list[float]] = {"ends": [], "scores": [], "resident_bytes": [], "children": []}
    watch_steps(notes, case)
    if case["mean_length"] is not None:
        draw_lengths(case["mean_length"], case["max_completion_length"])
    elif case["forced"]:
        ignore_end_tokens()
    resolved = from_dict(options(case, work))
    with survey(resolved.config, 1) as found:
        started = time.perf_counter()
        train(resolved, found)
    run = work / "covey"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "started": started,
        "rollout_s": [line["time/rollout_s"] for line in lines],
        "reward_s": [line["time/reward_s"] for line in lines],
        "tokens": [line["completions/mean_length"] * line["n"]["completions/mean_length"] for line in lines],
        "lengths": lengths(run / "rollouts"),
        "own_peak_bytes": peak_bytes(),
        "peak_bytes": gpu_peak_bytes() or peak_bytes() + int(notes["children"][0]),
        **{name: notes[name] for name in ("ends", "scores", "resident_bytes")},
    }


def options(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """covey's options of a case."""
    return {
        "model": case["model_dir"],
        "dataset": [case["data_file"]],
        "reward_funcs": [
            f"{Path(__file__).with_name('rewards.py')}:{name}" for name in case["reward"].split()
        ],
        "num_generations": case["num_generations"],
        "per_device_train_batch_size": case["per_device_train_batch_size"],
        "gradient_accumulation_steps": case["gradient_accumulation_steps"],
        "max_completion_length": case["max_completion_length"],
        "learning_rate": case["learning_rate"],
        "seed": case["seed"],
        "torch_dtype": case["dtype"],
        "tuner_type": "lora" if case["lora"] else "full",
        "max_steps": case["steps"] + case["warmup"],
        "save_steps": 10**6,
        "output_dir": str(work / "covey"),
        "overwrite_output_dir": True,
        "logging_steps": 50,
        **case["options"],
    }


def watch_steps(notes: dict[str, list[float]], case: dict[str, Any]) -> None:
    """Note memory before the first step, and time, reward and memory at the end of each; stop at a target."""
    from covey.training.job import Job

    begin, finish = Job.begin, Job.finish_step
    scores = notes["scores"]

    def began(self: Job) -> None:
        notes["resident_bytes"].append(resident_bytes())
        begin(self)

    def finished(self: Job, *arguments: Any) -> None:
        rewards = self.buffer.metrics[f"rewards/{case['reward'].split()[0]}/mean"].value
        finish(self, *arguments)
        notes["ends"].append(time.perf_counter())
        notes["resident_bytes"].append(resident_bytes())
        if not notes["children"]:
            notes["children"].append(children_peak_bytes())
        scores.append(float(rewards or 0.0))
        if case["target"] is not None and len(scores) >= 10 and sum(scores[-10:]) / 10 >= case["target"]:
            self.limits.ended_by = "the target"

    Job.begin, Job.finish_step = began, finished  # type: ignore[method-assign,assignment]


def ignore_end_tokens() -> None:
    """Let every completion run to the limit."""
    from covey.training import build_source

    sampling = build_source.sampling

    def endless(*arguments: Any) -> Any:
        return replace(sampling(*arguments), stop_token_ids=())

    build_source.sampling = endless  # type: ignore[assignment]


def draw_lengths(mean: int, longest: int) -> None:
    """Give each completion a length of its own, exponential around `mean` and at most `longest`."""
    from covey.rollout.native.engine import NativeEngine

    chance = random.Random(0)
    submit = NativeEngine.submit

    def submitted(self: NativeEngine, request: Any) -> int:
        length = min(longest, 1 + int(chance.expovariate(1 / mean)))
        sampling = replace(request.sampling, max_new_tokens=length, stop_token_ids=())
        return submit(self, replace(request, sampling=sampling))

    NativeEngine.submit = submitted  # type: ignore[method-assign,assignment]


def lengths(rollouts: Path) -> list[list[dict[str, Any]]]:
    """Of each of the last rollouts its groups: tokens of the prompt and of each completion, and how many
    beginnings completions have by length, all of them and those with an advantage other than 0."""
    from covey.telemetry.rollouts import read_rollouts

    found: list[list[dict[str, Any]]] = []
    for _, records in read_rollouts(rollouts):
        groups: dict[int, list[dict[str, Any]]] = {}
        for record in records:
            groups.setdefault(record["group"], []).append(record)
        counted = [
            {
                "prompt": len(group[0]["prompt_ids"]),
                "completions": [len(r["completion_ids"]) for r in group],
                "decoded": beginnings([r["completion_ids"] for r in group]),
                "trained": beginnings([r["completion_ids"] for r in group if r["advantage"] != 0]),
            }
            for group in groups.values()
        ]
        found = [*found[1 - _COUNTED :], counted]
    return found


def beginnings(completions: list[list[int]]) -> list[int]:
    """How many different beginnings of 1, 2, ... tokens completions have that go on behind them."""
    longest = max((len(c) for c in completions), default=0)
    return [len({tuple(c[:n]) for c in completions if len(c) > n}) for n in range(1, longest)]


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).parent)
    Path(sys.argv[2]).write_text(json.dumps(result))
