"""Print what each rank holds under FSDP, under DDP and in one process, on the CPU, and what was forecast.

A random model of 125 M parameters, saved in bfloat16, trains in float32. Tensors are summed as the backend
holds them; a phase's peak is what it has of anonymous memory at its fullest, beyond that of Python and its
libraries, so that pages of the model's file, which the system takes back as it likes, do not count. Run with
`python bench/sharding.py`; it takes some three minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUNS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "single": (1, {}),
    "ddp on 2": (2, {}),
    "fsdp on 1": (1, {"fsdp": "full_shard"}),
    "fsdp on 2": (2, {"fsdp": "full_shard"}),
}
PHASES = ("load", "rollout", "update", "step", "save")
_STEPS, _EVERY_S, _LIMIT_S = 3, 0.002, 400
_MB = 1e6


def main() -> None:
    """Run all of them, or those named on the command line, and print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model")
        rows = [{"prompt": f"What is {n}+{n + 3}?"} for n in range(64)]
        (work / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (work / "rewards.py").write_text(
            "def chance(completions, **columns):\n    return [hash(str(c)) % 7 / 7 for c in completions]\n"
        )
        found = {name: _run(work, *how) for name, how in RUNS.items() if name in (sys.argv[1:] or RUNS)}
    _print(found)


def write_model(target: Path) -> None:
    """The sizes of a Qwen 2 of 125 M parameters, with the built-in tokenizer."""
    import torch
    import transformers

    from covey.quickstart.task import MODEL_DIR

    shutil.copytree(MODEL_DIR, target)
    (target / "model.safetensors").unlink()
    own = json.loads((MODEL_DIR / "config.json").read_text())
    config = transformers.Qwen2Config(
        vocab_size=32_768,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=own["eos_token_id"],
        pad_token_id=own.get("pad_token_id"),
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)


def _run(work: Path, processes: int, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every rank of a run found."""
    options = {
        "model": str(work / "model"),
        "dataset": [str(work / "data.jsonl")],
        "reward_funcs": [f"{work}/rewards.py:chance"],
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 24,
        "torch_dtype": "float32",
        "max_steps": _STEPS,
        "save_steps": 10**6,
        "output_dir": str(work / "run"),
        "overwrite_output_dir": True,
        **own,
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes}
    place["LOCAL_WORLD_SIZE"] = processes
    quiet = {
        "OMP_NUM_THREADS": 1,
        "PYTHONHASHSEED": 0,
        "HF_HUB_OFFLINE": 1,
        "TOKENIZERS_PARALLELISM": "false",
    }
    started = []
    for rank in range(processes):
        mine = {**quiet, **({**place, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {})}
        environment = {**os.environ, **{name: str(value) for name, value in mine.items()}}
        command = [sys.executable, __file__, "--rank", json.dumps(options), str(work / f"{rank}.json")]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    try:
        codes = [process.wait(_LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), f"exit codes {codes}"
    shutil.rmtree(work / "run")
    return [json.loads((work / f"{rank}.json").read_text()) for rank in range(processes)]


class _Watch:
    """The peak of anonymous memory in each phase, by a thread that looks every few milliseconds."""

    def __init__(self) -> None:
        self.start, self.phase = _status("RssAnon"), "load"
        self.peaks: dict[str, int] = {}
        threading.Thread(target=self._look, daemon=True).start()

    @contextmanager
    def within_phase(self, name: str) -> Iterator[None]:
        """Within it memory is of this phase."""
        before, self.phase = self.phase, name
        try:
            yield
        finally:
            self.phase = before

    def within(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, in this phase."""

        def called(*given: Any, **more: Any) -> Any:
            with self.within_phase(name):
                return call(*given, **more)

        return called

    def _look(self) -> None:
        while True:
            name, now = self.phase, _status("RssAnon") - self.start
            self.peaks[name] = max(self.peaks.get(name, 0), now)
            time.sleep(_EVERY_S)


def _rank(options: dict[str, Any]) -> dict[str, Any]:
    """What `covey train` does, with memory read between its phases."""
    from covey import environment

    environment.settle()
    from covey.checks.judge import refuse_faults
    from covey.checks.survey import survey
    from covey.comm import Comm
    from covey.config.resolve import from_dict
    from covey.plan.memory import memory_plan
    from covey.training import build, loop
    from covey.training.job import Job
    from covey.training.process import ranks
    from covey.training.saving import Saver

    def train(comm: Comm) -> dict[str, Any]:
        resolved = from_dict(options, comm.world)
        with survey(resolved.config, comm.world) as found:
            refuse_faults(resolved, found.facts)
            plan = memory_plan(resolved.config, found.facts)
            watch, after_load = _Watch(), 0

            def loaded(*given: Any, **more: Any) -> Any:
                nonlocal after_load
                made = real(*given, **more)
                watch.peaks["weights read"] = watch.peaks["load"]
                after_load = _status("VmHWM")
                return made

            real, build.backend_for = build.backend_for, loaded
            job = build.build_job(resolved, found, comm)
            backend: Any = job.backend
            watch.phase = "between"
            Job.collect = watch.within("rollout", Job.collect)  # type: ignore[method-assign]
            loop.update = watch.within("update", loop.update)
            held: dict[str, int] = {}
            step, seconds = backend.step, []

            def stepped(rate: float) -> Any:
                with watch.within_phase("step"):
                    held["gradients"] = _bytes(m.grad for m in backend.masters.masters)
                    out = step(rate)
                seconds.append(time.perf_counter())
                return out

            backend.step = stepped
            Saver.save = watch.within("save", Saver.save)  # type: ignore[method-assign]
            seconds.append(time.perf_counter())
            loop.run(job)
            held |= _held(backend)
            backend.close()
        forecast = {p.name: p.num_bytes for p in plan.phases}
        parts = {p.name: dict(p.parts) for p in plan.phases}
        return {
            "held": held,
            "start": watch.start,
            "peaks": watch.peaks,
            "forecast": forecast,
            "parts": parts,
            "after_load": after_load,
            "peak": _status("VmHWM"),
            "step_s": statistics.median(b - a for a, b in itertools.pairwise(seconds[1:])),
        }

    with ranks(int(os.environ.get("WORLD_SIZE", "1"))) as comm:
        return train(comm)


def _held(backend: Any) -> dict[str, int]:
    """The bytes of each owner, a tensor that two have counted once."""
    weights = [_local(p) for p in backend.policy.parameters()]
    own = {t.data_ptr() for t in weights}
    masters = [m for m in backend.masters.masters if m.data_ptr() not in own]
    states = [t for group in backend.masters._groups for t in group.adam.moments()]
    return {"weights": _bytes(weights), "masters": _bytes(masters), "moments": _bytes(states)}


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _status(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _print(found: Mapping[str, list[dict[str, Any]]]) -> None:
    owners = ("weights", "masters", "moments", "gradients")
    _row("MB", *owners, "update beyond", "peak RSS after load", "peak RSS", "s/step")
    _row("---", *["---"] * 8)
    for name, number, rank in _each(found):
        held = [rank["held"][owner] for owner in owners]
        beyond = rank["peaks"]["update"] - sum(held)
        numbers = [*held, beyond, rank["after_load"], rank["peak"]]
        _row(f"{name}, rank {number}", *(f"{n / _MB:,.0f}" for n in numbers), f"{rank['step_s']:.2f}")
    sys.stdout.write("\n")
    _row("MB, forecast / measured", *PHASES)
    _row("---", *["---"] * len(PHASES))
    for name, number, rank in _each(found):
        pairs = [(rank["forecast"].get(p, 0), rank["peaks"].get(p, 0)) for p in PHASES]
        _row(f"{name}, rank {number}", *(f"{a / _MB:,.0f} / {b / _MB:,.0f}" for a, b in pairs))


def _each(found: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for name, ranks_ in found.items():
        for number, rank in enumerate(ranks_):
            yield name, number, rank


def _row(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        Path(sys.argv[3]).write_text(json.dumps(_rank(json.loads(sys.argv[2]))))
    else:
        main()
