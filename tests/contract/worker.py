"""Runs of the contract, one after the other in the processes of a backend: what each of them left."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from contract import faults, uneven
from contract.cells import SAVED, STEPS
from covey.checkpoint.shards import SavedShards, write_shards
from covey.checks.judge import refuse_faults
from covey.checks.survey import survey
from covey.comm import Comm
from covey.config.resolve import from_dict
from covey.errors import ConfigError, GuardStop
from covey.learner.backends.split import SplitModel
from covey.models import load
from covey.models.policy import Policy
from covey.training.build import build_job
from covey.training.job import Job
from covey.training.loop import run
from covey.training.process import ranks
from support.processes import run_in_processes

# Seconds for all the runs of a call.
_LIMIT_S = 1500


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run to make: its options, the layout of its rows, the shares of ranks in what is sampled and in what
    is forwarded, and the fault that is planted in it."""

    options: Mapping[str, Any]
    layout: str
    owned: uneven.Share = "evenly"
    dealt: uneven.Share = "evenly"
    fault: str | None = None


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run left: `code` and `words` where something ended it; the gradients of every step with the
    names in their order; float32 weights, and what the optimizer keeps, by the steps that were taken; the
    lines of its metrics; and the forward passes of each step."""

    code: str | None = None
    words: str = ""
    seconds: float = 0.0
    names: Sequence[str] = ()
    passes: Sequence[int] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    gradients: Sequence[Mapping[str, Tensor]] = field(default=(), repr=False)
    weights: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)
    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)


def run_all(runs: Sequence[Run], work: Path, *, processes: int) -> list[Left]:
    """What every one of these runs left, made in processes that last for all of them."""
    work.mkdir(parents=True)
    (work / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    run_in_processes(__file__, work, processes=processes, timeout=_LIMIT_S)
    left = [_load(work / str(number)) for number in range(len(runs))]
    shutil.rmtree(work)
    return left


def _load(path: Path) -> Left:
    found = json.loads(path.with_suffix(".json").read_text())
    tensors = load_file(str(path.with_suffix(".safetensors")))

    def part(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    def by_step(kind: str) -> dict[int, dict[str, Tensor]]:
        steps = sorted({int(k.split("/")[1]) for k in tensors if k.startswith(f"{kind}/")})
        return {step: part(f"{kind}/{step}/") for step in steps}

    gradients = list(by_step("gradient").values())
    return Left(**found, gradients=gradients, weights=by_step("weights"), states=by_step("state"))


def _save(left: Left, path: Path) -> None:
    tensors = {f"gradient/{i}/{n}": t for i, own in enumerate(left.gradients) for n, t in own.items()}
    tensors |= {f"weights/{i}/{n}": t for i, own in left.weights.items() for n, t in own.items()}
    tensors |= {f"state/{i}/{n}": t for i, own in left.states.items() for n, t in own.items()}
    save_file(tensors, str(path.with_suffix(".safetensors")))
    words = {k: getattr(left, k) for k in ("code", "words", "seconds", "names", "passes", "metrics")}
    path.with_suffix(".json").write_text(json.dumps(words))


def _left_by(run_: Run, comm: Comm, folder: Path) -> Left:
    began = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        if run_.fault is not None:
            faults.BY_NAME[run_.fault].plant(patch, comm.rank)
        _lay_out(patch, run_.layout)
        uneven.plant(patch, comm.rank, run_.owned, run_.dealt)
        seen = _Seen(folder)
        code, words = None, ""
        try:
            _train(run_, comm, seen)
        except ConfigError as error:
            code = " ".join(p.code for p in error.problems)
            words = " ".join(p.seen for p in error.problems)
        except GuardStop as stop:
            code, words = stop.finding.code, f"step {stop.finding.step}: {stop.finding.seen}"
    path = Path(run_.options["output_dir"]) / "metrics.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.is_file() else []
    return Left(
        code=code,
        words=words,
        seconds=time.process_time() - began,
        names=seen.names,
        passes=seen.passes[: len(seen.gradients)],
        metrics=lines,
        gradients=seen.gradients,
        weights=seen.weights,
        states=seen.states,
    )


def _lay_out(patch: pytest.MonkeyPatch, layout: str) -> None:
    """Take a layout for the best one that the model passes the probe with, of policy and reference."""
    real = load.widest_stream

    def asked_for(policy: Policy, share: float = 1.0) -> Any:
        widest, shares_prompts, results = real(policy, share)
        assert widest == "prefix", "every model here can be laid out in any way"
        return layout, shares_prompts and layout == "prefix", results

    patch.setattr(load, "widest_stream", asked_for)


@dataclass
class _Seen:
    folder: Path
    names: list[str] = field(default_factory=list)
    passes: list[int] = field(default_factory=lambda: [0])
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def _train(run_: Run, comm: Comm, seen: _Seen) -> None:
    """What `covey train` does, without its words on the terminal."""
    resolved = from_dict(run_.options, comm.world)
    with ExitStack() as stack:
        with redirect_stderr(StringIO()):
            found = stack.enter_context(survey(resolved.config, comm.world))
        refuse_faults(resolved, found.facts)
        job = build_job(resolved, found, comm)
        stack.callback(job.backend.close)
        job.recorder.console = None
        _watch(job, seen)
        run(job)


def _watch(job: Job, seen: _Seen) -> None:
    """Keep the gradient of every step as the backend gives it, and the weights around it."""
    backend: Any = job.backend
    step, backward = backend.step, backend.backward

    def counted(*given: Any, **more: Any) -> Any:
        seen.passes[-1] += 1
        return backward(*given, **more)

    def watched(rate: float) -> Any:
        gradient = {n: g.detach().cpu().clone() for n, g in backend.gradients()}
        seen.names = list(gradient)
        seen.gradients.append(gradient)
        seen.passes.append(0)
        out = step(rate)
        _keep(job, seen, job.progress.step + 1)
        return out

    backend.step, backend.backward = watched, counted
    _keep(job, seen, job.progress.step)


def _keep(job: Job, seen: _Seen, step: int) -> None:
    """Keep float32 weights, and at the step of a stop what a checkpoint has of the optimizer. Collective."""
    if step not in (0, 1, SAVED, STEPS):
        return
    kept = _whole_state(job, seen.folder / str(step))
    held = _trained(job.backend)
    seen.weights[step] = {name: kept.get(f"master/{name}", tensor) for name, tensor in held.items()}
    if step == SAVED:
        seen.states[step] = {name: t for name, t in kept.items() if not name.startswith("master/")}


def _trained(backend: Any) -> dict[str, Tensor]:
    """Whole trained tensors as they compute. Collective."""
    trained = {n for n, p in backend.policy.named_parameters() if p.requires_grad}
    split = isinstance(backend, SplitModel)
    whole = backend.split.whole() if split else backend.policy.named_parameters()
    return {n: t.detach().cpu().clone() for n, t in whole if n in trained}


def _whole_state(job: Job, folder: Path) -> dict[str, Tensor]:
    """What all ranks would save, read as a resumed run does."""
    write_shards(folder, job.backend.shards(), job.comm.rank, job.comm.world)
    job.comm.gather_json(None)
    return {name: tensor.clone() for name, tensor in SavedShards(folder).items()}


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    with ranks(int(os.environ.get("WORLD_SIZE", "1"))) as comm:
        for number, given in enumerate(json.loads((work / "runs.json").read_text())):
            left = _left_by(Run(**given), comm, work / f"state-{number}")
            if comm.rank == 0:
                _save(left, work / str(number))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
