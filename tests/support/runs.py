"""Runs for tests: replayed rollouts, gradients of every step, one process or several."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.checks.survey import survey
from covey.comm import Comm, LocalComm
from covey.config.resolve import from_dict
from covey.learner.backends.split import SplitModel
from covey.learner.backends.zero import Zero2Backend
from covey.training.build import build_job
from covey.training.loop import run
from covey.training.process import ranks
from support.processes import run_in_processes

GROUPS, SIBLINGS = 2, 4
_LONGEST_PROMPT = 14


@dataclass(frozen=True)
class Result:
    """What a run left: per-step gradients, the weights before and after, its metrics, the forward passes of
    each step, and how many weights the process holds."""

    gradients: list[dict[str, Tensor]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    metrics: list[dict[str, Any]]
    forwards: list[int]
    held: int


def write_rollouts(directory: Path, *, rollouts: int = 5, seed: int = 0) -> Path:
    """Rollouts of 2 groups x 4 completions: ragged, one row invalid, one truncated, uneven work.

    The second half of a rollout has long completions and the first short ones, so that two ranks never have
    equal work.
    """
    draw = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    for rollout in range(rollouts):
        lines = []
        for group in range(GROUPS):
            prompt = [draw.randrange(300) for _ in range(draw.choice((5, 9, _LONGEST_PROMPT)))]
            for sibling in range(SIBLINGS):
                length = draw.randrange(1, 13) if group == 0 else draw.randrange(14, 31)
                is_cut = group == 1 and sibling == 2
                is_broken = group == 0 and sibling == 1
                reward = None if is_broken else draw.choice((0.0, 0.5, 1.0)) + 0.01 * sibling
                lines.append(
                    record(
                        draw,
                        rollout=rollout,
                        group=group,
                        sibling=sibling,
                        prompt=prompt,
                        length=length,
                        is_cut=is_cut,
                        reward=reward,
                    )
                )
        path = directory / f"rollout-{rollout:06d}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return directory


def record(
    draw: random.Random,
    *,
    rollout: int,
    group: int,
    sibling: int,
    prompt: list[int],
    length: int,
    is_cut: bool,
    reward: float | None,
) -> dict[str, Any]:
    """A line of a rollout's file with random tokens; without a reward the row is invalid."""
    status = "error" if reward is None else "ok"
    part = {"name": "accuracy", "value": reward, "status": status, "message": ""}
    return {
        "rollout": rollout,
        "group": group,
        "sibling": sibling,
        "prompt_id": group,
        "epoch": 0,
        "attempt": 0,
        "split": "train",
        "seed": 0,
        "temperature": 0.8,
        "max_new_tokens": 32,
        "stop_token_ids": [314],
        "prompt": "",
        "text": "",
        "finish": "length" if is_cut else "stop",
        "reward": reward,
        "parts": [part],
        "status": part["status"],
        "message": "",
        "columns": {},
        "prompt_ids": prompt,
        "completion_ids": [draw.randrange(300) for _ in range(length)],
        "trained_mask": [1] * length,
        "sampler_logprobs": [-draw.uniform(0.1, 6.0) for _ in range(length)],
        "versions": [rollout] * length,
        "sources": [["model", length, 1, length]],
        "seconds": 0.0,
    }


def options(model: Path, output: Path, replay: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Options of a small run: one optimizer step of 8 completions a rollout, whose forward passes hold what B
    says, as those of a large model would."""
    base: dict[str, Any] = {
        "model": str(model),
        "dataset": ["quickstart#512"],
        "reward_funcs": ["accuracy"],
        "num_generations": SIBLINGS,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 32,
        "learning_rate": 1e-3,
        "torch_dtype": "float32",
        "max_steps": 5,
        "save_steps": 0,
        "mask_truncated_completions": True,
        "output_dir": str(output),
    }
    if replay is not None:
        base["replay_rollouts"] = str(replay)
    asked = {**base, **changes}
    row = _LONGEST_PROMPT + asked["max_completion_length"]
    return {"max_tokens_per_micro_batch": asked["per_device_train_batch_size"] * row, **asked}


def train_and_watch(
    opts: Mapping[str, Any], *, stream: str | None = None, comm: Comm | None = None
) -> Result:
    """Run in this process and keep the gradient of every optimizer step."""
    comm = comm or LocalComm()
    resolved = from_dict(opts, comm.world)
    found = survey(resolved.config, comm.world)
    job = build_job(resolved, found, comm)
    job.recorder.console = None
    if stream is not None:
        job.backend.policy.use_stream(stream)
        job.buffer.plan = replace(job.buffer.plan, stream=stream)
    before = _weights(job.backend)
    gradients: list[dict[str, Tensor]] = []
    forwards = [0]
    step, backward = job.backend.step, job.backend.backward

    def counted(*given: Any, **more: Any) -> Any:
        forwards[-1] += 1
        return backward(*given, **more)

    def watched(rate: float) -> Any:
        gradients.append(_gradients(job.backend))
        forwards.append(0)
        return step(rate)

    job.backend.step, job.backend.backward = watched, counted
    run(job)
    after = _weights(job.backend)
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in job.backend.policy.parameters())
    job.backend.close()
    found.close()
    path = Path(opts["output_dir"]) / "metrics.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.is_file() else []
    return Result(gradients, before, after, lines, forwards[:-1], held)


def _weights(backend: Any) -> dict[str, Tensor]:
    """Those that the optimizer steps, whole: of a model or an optimizer that is split as they compute.
    Collective."""
    if isinstance(backend, SplitModel):
        each = backend.split.whole()
    elif isinstance(backend, Zero2Backend):
        each = backend.policy.named_parameters()
    else:
        each = backend.masters.each()
    return {name: weight.detach().clone() for name, weight in each}


def _gradients(backend: Any) -> dict[str, Tensor]:
    """Whole gradients. Collective."""
    return {name: gradient.detach().clone() for name, gradient in backend.gradients()}


def save_result(result: Result, path: Path) -> None:
    """Write a result's tensors; metrics are in the run directory."""
    tensors = {f"before/{k}": v for k, v in result.before.items()}
    tensors["held/"] = torch.tensor(result.held)
    tensors["forwards/"] = torch.tensor(result.forwards)
    tensors |= {f"after/{k}": v for k, v in result.after.items()}
    for i, gradient in enumerate(result.gradients):
        tensors |= {f"gradient{i}/{k}": v for k, v in gradient.items()}
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, str(path))


def load_result(path: Path, output: Path) -> Result:
    """Read what `save_result` wrote, and the metrics of the run in `output`."""
    tensors = load_file(str(path))

    def part(prefix: str) -> dict[str, Tensor]:
        return {k[len(prefix) + 1 :]: v for k, v in tensors.items() if k.startswith(prefix + "/")}

    count = len({k.split("/")[0] for k in tensors if k.startswith("gradient")})
    lines = [json.loads(x) for x in (output / "metrics.jsonl").read_text().splitlines()]
    gradients = [part(f"gradient{i}") for i in range(count)]
    forwards = tensors["forwards/"].tolist()
    held = int(tensors["held/"])
    return Result(gradients, part("before"), part("after"), lines, forwards, held)


def train_in_processes(
    runs: Sequence[Mapping[str, Any]], work: Path, *, processes: int = 2, machine: int = 0
) -> list[Result]:
    """Runs, one after the other, in several gloo processes; the tensors are rank 0's. With `machine` each so
    many of them are told that they are alone on theirs."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "runs.json").write_text(json.dumps([dict(r) for r in runs]))
    run_in_processes(__file__, work, processes=processes, timeout=300, machine=machine)
    return [
        load_result(work / f"result{i}.safetensors", Path(opts["output_dir"])) for i, opts in enumerate(runs)
    ]


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    with ranks(int(os.environ["WORLD_SIZE"])) as comm:
        for i, opts in enumerate(json.loads((work / "runs.json").read_text())):
            outcome = train_and_watch(opts, comm=comm)
            if comm.rank == 0:
                save_result(outcome, work / f"result{i}.safetensors")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
