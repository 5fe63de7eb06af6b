"""`python held.py RUNS.json FOLDER`: one rank of several runs, one after the other, that says how much memory
each phase of each run held.

RUNS.json holds the words of `covey` by the name of each run. FOLDER gets RANK.json: by run and phase the most
bytes that were allocated and the most that were resident at a time, above what was there before the model was
loaded, and the parts of the forecast. Both are read every half millisecond; a mapped file counts in neither.
The environment has to hold ENVIRONMENT, so that what is freed goes back to the system. In a run whose name
begins with "gathers" a whole copy of the model is gathered at the load, which the reader has to see.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
}
_STATUS = Path("/proc/self/status")
_OWN = re.compile(r"^(?:RssAnon|RssShmem):\s+(\d+)", re.MULTILINE)


def spread(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs within every group, wherever its rows are, so that they have a gradient."""
    return [float(sum(ids) % 97) for ids in completion_ids]


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_LIBC = ctypes.CDLL("libc.so.6")
_LIBC.mallinfo2.restype = _MallInfo


def allocated_bytes() -> int:
    """What is allocated now."""
    found = _LIBC.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident_bytes() -> int:
    """What is resident now, without mapped files."""
    return sum(int(kib) for kib in _OWN.findall(_STATUS.read_text())) * 1024


class Meter:
    """The most bytes of each phase, read by a thread of its own."""

    def __init__(self) -> None:
        self.phase = ""
        self.most: dict[str, list[int]] = {}
        self._base = [0, 0]
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self) -> dict[str, list[int]]:
        """Begin anew: what is held now counts in no phase. Returns what is filled from now on."""
        self._base, self.most = [allocated_bytes(), resident_bytes()], {}
        return self.most

    def _read(self) -> None:
        while True:
            phase = self.phase
            if phase:
                now = [allocated_bytes() - self._base[0], resident_bytes() - self._base[1]]
                most = self.most
                most[phase] = [max(pair) for pair in zip(most.get(phase, (0, 0)), now, strict=True)]
            time.sleep(0.0005)

    def watched(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Work that counts as a phase, within another one or not."""

        def watch(*arguments: Any, **named: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return work(*arguments, **named)
            finally:
                self.phase = before

        return watch


def main(runs: Path, folder: Path) -> int:
    """Run the commands with their phases watched."""
    from covey.environment import settle

    settle()
    sys.setswitchinterval(0.0005)
    import peft  # noqa: F401

    from covey.cli.main import main as covey
    from covey.learner.backends.split import SplitModel
    from covey.plan.memory import memory_plan
    from covey.rollout.publisher import Publisher
    from covey.training import loop
    from covey.training import run as wiring
    from covey.training.saving import Saver
    from covey.training.source import LiveSource

    meter, told, name = Meter(), dict[str, Any](), ""
    choose, build = SplitModel.choose_layout, wiring.build_job

    def chosen(self: Any, attention: Any) -> None:
        if name.startswith("gathers"):
            with self.rollout_view():
                pass
        choose(self, attention)

    def begun(resolved: Any, found: Any, *arguments: Any, **named: Any) -> Any:
        phases = memory_plan(resolved.config, found.facts).phases
        told[name] = {
            "forecast": {phase.name: dict(phase.parts) for phase in phases},
            "measured": meter.begin(),
        }
        return build(resolved, found, *arguments, **named)

    SplitModel.choose_layout = chosen  # type: ignore[method-assign]
    wiring.build_job = begun
    for owner, method, phase in (
        (wiring, "build_job", "load"),
        (LiveSource, "next", "rollout"),
        (Publisher, "_publish", "publish"),
        (loop, "annotate_and_credit", "annotate"),
        (loop, "update", "update"),
        (Saver, "save", "save"),
    ):
        setattr(owner, method, meter.watched(phase, getattr(owner, method)))
    former = ""
    for name, words in json.loads(runs.read_text()).items():
        code = covey(words)
        if code:
            return code
        gc.collect()
        # The first rank is the one that leaves the server, which refuses another run until then.
        ended = folder / f"{name}.ended"
        if os.environ["RANK"] == "0":
            ended.touch()
        while not ended.exists():
            time.sleep(0.05)
        if former and os.environ["RANK"] == "0":
            # A checkpoint takes 1.6 GB. The ranks are done with that of the run before.
            shutil.rmtree(former)
        former = words[words.index("--output_dir") + 1]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
