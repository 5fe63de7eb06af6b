"""`torture.py [--backends single,ddp] [--kills 100]`: the writers of checkpoints under kills, failing disks
and flipped bits. Every run must go on bit for bit as if nothing had happened, or be refused by name.

A life is one run that is ended again and again in the middle of a write, and in the end is compared with a
run that nobody touched: weights, moments, states and records. After each end every checkpoint that is there
under its name has to be whole.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from covey.checkpoint.examine import examine
from covey.checkpoint.manifest import list_files
from covey.checkpoint.read import find_latest, verify
from covey.checkpoint.staging import tidy
from covey.checks.run.look import _resume
from covey.config.checkpoints import list_checkpoints
from covey.config.resolve import from_dict
from covey.errors import CheckpointError
from support.processes import start_processes

CHILD = str(Path(__file__).with_name("child.py"))
STEPS = 9
# The first save of a run that lets one checkpoint go and reduces another to its model.
FULL_SAVE = 4
BACKENDS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {}),
    "fsdp2": (2, {"fsdp": "full_shard"}),
}
"""Processes and options of each backend."""
TIMES = ("time/", "throughput/", "memory/")
_PATIENCE_S = 240


@dataclass
class Torture:
    """The runs of one backend in one directory."""

    backend: str
    work: Path
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    life: Iterator[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.life = self.lives()

    @property
    def processes(self) -> int:
        return BACKENDS[self.backend][0]

    def options(self, run: Path) -> dict[str, Any]:
        processes, own = BACKENDS[self.backend]
        return {
            "model": "quickstart",
            "dataset": ["quickstart#64"],
            "reward_funcs": ["accuracy", "format"],
            "num_generations": 8,
            "per_device_train_batch_size": 16 // processes,
            "max_completion_length": 16,
            "mask_truncated_completions": False,
            "learning_rate": 1e-3,
            "torch_dtype": "bfloat16",
            "num_iterations": 2,
            "max_steps": STEPS,
            "save_steps": 1,
            "save_total_limit": 3,
            "keep_trainer_state": 2,
            "reward_trial": False,
            "output_dir": str(run),
            "resume_from_checkpoint": "auto",
            **own,
        }

    def attempt(
        self, run: Path, fault: Mapping[str, Any], kill_after_s: float | None = None
    ) -> list[int | None]:
        """Start the run and wait for its end; the machine ends with the first process that is killed."""
        place = run.parent / f"{run.name}.work"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "opts.json").write_text(json.dumps(self.options(run)))
        (place / "fault.json").write_text(json.dumps(fault))
        began = time.monotonic()
        started = start_processes(CHILD, place, processes=self.processes, said=place, folder=self.work)
        end = began + _PATIENCE_S
        while any(process.exitcode is None for process in started):
            now = time.monotonic()
            is_due = kill_after_s is not None and now - began > kill_after_s
            if is_due or now > end or any(process.exitcode == -9 for process in started):
                for process in started:
                    process.kill()
            time.sleep(0.01)
        assert time.monotonic() < end, self.said(run)
        return [process.exitcode for process in started]

    def said(self, run: Path) -> str:
        """What the processes of the last attempt said."""
        place = run.parent / f"{run.name}.work"
        files = [place / str(rank) for rank in range(self.processes)] + sorted(place.glob("outcome-*"))
        return "\n".join(f"{f.name}: {f.read_text()[-2000:]}" for f in files if f.is_file())

    def outcome(self, run: Path, rank: int = 0) -> Any:
        path = run.parent / f"{run.name}.work" / f"outcome-{rank}.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def traced(self, run: Path, rank: int) -> list[tuple[int, int, str]]:
        """The steps that the writers of a rank took: which save, which step of it, and what it was."""
        path = run.parent / f"{run.name}.work" / f"steps-{rank}.txt"
        lines = path.read_text().splitlines() if path.is_file() else []
        split = [line.split(" ", 2) for line in lines]
        return [(int(save), int(step), what) for save, step, what in split]

    def truth(self) -> Path:
        """A run that nobody touched."""
        run = self.work / "truth"
        if not run.exists():
            began = time.monotonic()
            assert self.attempt(run, {"act": "none"}) == [0] * self.processes, self.said(run)
            self.seconds = time.monotonic() - began
            assert_moves(run)
        return run

    def finish(self, run: Path) -> None:
        """Let a run end, and compare it with the truth."""
        assert self.attempt(run, {}) == [0] * self.processes, self.said(run)
        assert_same(run, self.truth())
        self.counts["runs that ended bit-equal"] += 1
        shutil.rmtree(run)

    def check_whole(self, run: Path) -> None:
        """The newest checkpoint is whole as it lies there, and every other one once the reduction is finished
        that was begun, as the next save does; what is hidden is none."""
        if names := list_checkpoints(run):
            verify(names[-1])
        tidy(run)
        for path in names:
            verify(path)
            assert not examine(path).faults

    # -- kills

    def writer_steps(self, limit: int | None) -> list[dict[str, int]]:
        """Each step of a save that lets older checkpoints go, on each rank; or some of them."""
        truth = self.truth()
        found = [
            {"rank": rank, "save": 2, "at": step}
            for rank in range(self.processes)
            for save, step, _ in self.traced(truth, rank)
            if save == FULL_SAVE
        ]
        assert len(found) > 30 * self.processes, found
        return found if limit is None else self.draw.sample(found, min(limit, len(found)))

    def kill_at_steps(self, limit: int | None = None) -> None:
        """End the run at each step of the writers."""
        for place in self.writer_steps(limit):
            # One checkpoint is added at each attempt; the save after it is the one that is hit.
            run, fault = next(self.life), {"act": "kill", **place}
            codes = self.attempt(run, fault)
            if -9 not in codes:
                # Which rank makes a directory that both need is chance, so a rank may have a step less.
                steps = [step for save, step, _ in self.traced(run, place["rank"]) if save == place["save"]]
                assert steps and steps[-1] < place["at"], f"{fault} was not reached\n{self.said(run)}"
                self.counts["steps that a rank did not have"] += 1
                continue
            self.counts["kills at a step of the writer"] += 1
            self.check_whole(run)

    def kill_at_times(self, number: int) -> None:
        """End the run at any time, the writers being at work for a good part of it."""
        self.truth()
        killed = 0
        while killed < number:
            run = next(self.life)
            codes = self.attempt(run, {"act": "none"}, self.draw.uniform(0.0, 0.7 * self.seconds))
            if codes == [0] * self.processes:
                self.counts["kills that came too late"] += 1
                continue
            assert -9 in codes, self.said(run)
            killed += 1
            self.counts["kills at a random time"] += 1
            self.check_whole(run)

    def lives(self) -> Iterator[Path]:
        """A run to be hit once more, with as many checkpoints as stay: a new one where the former has few
        steps left, which is then ended."""
        number = 0
        run = self.work / f"life-{number}"
        self.truth()
        try:
            while True:
                newest = find_latest(run, with_trainer=True).manifest
                if newest is not None and newest.step > STEPS - 2:
                    self.finish(run)
                    number += 1
                    run = self.work / f"life-{number}"
                    newest = None
                if newest is None:
                    fault = {"act": "kill", "rank": self.processes - 1, "save": FULL_SAVE, "at": 1}
                    assert -9 in self.attempt(run, fault), self.said(run)
                    self.counts["kills at a step of the writer"] += 1
                    self.check_whole(run)
                yield run
        finally:
            if run.exists():
                self.finish(run)

    def end(self) -> None:
        """Let the last life end."""
        self.life.close()  # type: ignore[attr-defined]

    # -- disks

    def fail_disk(self, limit: int | None = None) -> None:
        """The disk is full, or broken, in turns, at each step of a save on each rank: the run says so, and
        goes on."""
        acts = ("ENOSPC", "EIO")
        targets: list[dict[str, Any]] = [
            {"act": acts[(place["at"] + place["rank"]) % 2], **place} for place in self.writer_steps(limit)
        ]
        for size in (20_000, 100_000)[:limit]:
            targets.append({"act": "limit", "rank": self.processes - 1, "save": 2, "at": size})
        for fault in targets:
            run = next(self.life)
            codes = self.attempt(run, fault)
            # What is only tidied may fail unseen. Where the first rank alone writes, the others end after it.
            is_named = 3 in codes and all(code in (1, 3) for code in codes)
            assert codes == [0] * self.processes or is_named, f"{fault}: {codes} {self.said(run)}"
            if any(codes):
                assert "F130" in self.said(run), self.said(run)
                assert not list(run.glob(".tmp-*")), fault
            self.counts[f"{fault['act']} {'named as F130' if any(codes) else 'without effect'}"] += 1
            self.check_whole(run)

    def fill_disk(self) -> None:
        """A small file system that runs full, where one can be mounted."""
        with small_disk(self.work / "disk") as disk:
            if disk is None:
                self.counts["full file systems: none can be mounted here"] += 1
                return
            run = disk / "run"
            whole = sum(p.stat().st_size for p in self.truth().rglob("*") if p.is_file())
            ballast = disk / "ballast"
            ballast.write_bytes(b"0" * max(0, shutil.disk_usage(disk).free - whole // 2))
            codes = self.attempt(run, {})
            assert any(codes), self.said(run)
            self.check_whole(run)
            ballast.unlink()
            self.finish(run)
            self.counts["full file systems"] += 1

    # -- bits

    def flip_bits(self, limit: int | None = None) -> None:
        """One bit of each file of a checkpoint: it is refused by the file's name, and the run goes on from
        the one before it."""
        truth = self.truth()
        newest = list_checkpoints(truth)[-1]
        names = [*list_files(newest), "manifest.json"]
        if limit is not None:
            names = self.draw.sample(names, min(limit, len(names)))
        run = self.work / "flipped"
        shutil.copytree(truth, run)
        for number, name in enumerate(names):
            path = run / newest.name / name
            content = path.read_bytes()
            damaged = bytearray(content)
            bit = self.draw.randrange(8 * len(content))
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            self._assert_refused(run, newest.name, name)
            self.counts["bits flipped, refused by the file's name"] += 1
            if number == 0:
                self._assert_goes_on_before_it(run, newest.name)
            path.write_bytes(content)
        shutil.rmtree(run)

    def _assert_refused(self, run: Path, checkpoint: str, name: str) -> None:
        found = examine(run / checkpoint)
        assert found.faults and Path(name).name in " ".join(found.faults), (name, found)
        latest = find_latest(run, with_trainer=True)
        assert latest.path is not None and latest.path.name != checkpoint
        assert Path(name).name in latest.skipped[0].reason
        asked = {**self.options(run), "resume_from_checkpoint": str(run / checkpoint)}
        refused = _resume(from_dict(asked, self.processes).config)
        assert refused is not None and refused.problem and Path(name).name in refused.problem

    def _assert_goes_on_before_it(self, run: Path, checkpoint: str) -> None:
        other = self.work / "goes-on"
        shutil.copytree(run, other)
        for path in [p for p in list_checkpoints(other) if p.name != checkpoint][:-1]:
            shutil.rmtree(path)
        self.finish(other)


@contextmanager
def small_disk(place: Path) -> Iterator[Path | None]:
    """A file system of a few MB in memory; None where this user may not mount one."""
    place.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=False)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(str(file)).items()
    }


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def assert_moves(run: Path) -> None:
    """The steps of a run change its weights and moments, so that going on from the wrong ones would show."""
    first, last = (tensors(path) for path in list_checkpoints(run)[-2:])
    for word in ("model", "exp_avg/", "master/"):
        names = [n for n in first if word in n and n in last]
        assert any(not torch.equal(first[n], last[n]) for n in names), word


def assert_same(run: Path, truth: Path) -> None:
    """Equal records, weights, moments and states, to the bit."""
    assert records(run) == records(truth)
    name = f"checkpoint-{STEPS}"
    ours, theirs = tensors(run / name), tensors(truth / name)
    assert ours.keys() == theirs.keys() and len(ours) > 100
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []
    assert states(run / name) == states(truth / name)


def states(checkpoint: Path) -> Any:
    """What a checkpoint holds as JSON, without what a clock says."""
    body = json.loads((checkpoint / "trainer/state.json").read_text())
    metrics = body["components"]["rollout"]["json"]["metrics"]
    for name in [name for name in metrics if name.startswith(TIMES)]:
        del metrics[name]
    return body


def torture(backend: str, work: Path, kills: int, disks: int | None, seed: int) -> Counter[str]:
    """Everything, with so many kills: one at each step of the writers, the rest at random times; and with
    failing disks at each step, or at so many of them."""
    work.mkdir(parents=True, exist_ok=True)
    subject = Torture(backend, work, random.Random(seed))
    began = time.monotonic()

    def at_times() -> None:
        at_steps = subject.counts["kills at a step of the writer"]
        subject.kill_at_times(max(kills // 4, kills - at_steps))

    parts = (
        lambda: subject.kill_at_steps(kills),
        at_times,
        subject.flip_bits,
        subject.fill_disk,
        lambda: subject.fail_disk(disks),
        subject.end,
    )
    for part in parts:
        part()
        said = ", ".join(f"{number} {what}" for what, number in subject.counts.items())
        print(f"{backend:<8}{time.monotonic() - began:5.0f} s  {said}", flush=True)  # noqa: T201
    return subject.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="single,ddp")
    parser.add_argument("--kills", type=int, default=100, help="of all backends together, at least")
    parser.add_argument("--disks", type=int, help="failing disks of each backend; not given: one a step")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    backends = given.backends.split(",")
    if unknown := [name for name in backends if name not in BACKENDS]:
        parser.error(f"no backend is called {unknown[0]}; there are {', '.join(BACKENDS)}")
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory(prefix="covey-torture-") as work:
        for backend in backends:
            try:
                kills = -(-given.kills // len(backends))
                counts = torture(backend, Path(work) / backend, kills, given.disks, given.seed)
            except (AssertionError, CheckpointError) as error:
                failed = True
                print(f"{backend}: FAILED\n{error}", flush=True)  # noqa: T201
                continue
            for what, number in sorted(counts.items()):
                print(f"{backend:<8}{what:<44}{number:>6}", flush=True)  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
