"""`make gpu-check`: whether covey is right on this machine's GPU and how fast it is, part by part.

Every part is a process with a time limit of its own, so that one that fails loses no other. A part writes
JSON lines as it goes; at the end the driver prints them as a table. docs/gpu.md says how to read it. Without
a GPU `--small` runs tiny versions of all parts on the CPU. Exits with 1 where a check failed or was not
finished. This file imports no package, so that it can say what is missing.
"""

from __future__ import annotations

import argparse
import compileall
import faulthandler
import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
sys.path.insert(0, str(BENCH))

from on_gpu.lines import Lines, read_lines  # noqa: E402
from on_gpu.parts import Part, chosen  # noqa: E402
from on_gpu.processes import run_limited  # noqa: E402
from on_gpu.table import Ended, table  # noqa: E402

WHEELS = ROOT / ".gpu-wheels"
FILES = (
    "results.jsonl",
    "table.txt",
    "parts.log",
    "train.log",
    "profile.txt",
    "steps-covey.log",
    "steps-trl.log",
)
"""All files of a check; some machines hand back eight at most."""
# A part stops to begin cases this long before its limit, and says where it stands shortly before it.
_MARGIN_S, _TRACE_S = 3.0, 1.5
_SMALL_FACTOR = 4


def main(words: list[str] | None = None) -> int:
    """Run the parts that are asked for, or one of them in this process."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__)
    parser.add_argument("--parts", default="", help="numbers or names with commas, or all")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-check", help="the folder of the results")
    parser.add_argument("--small", action="store_true", help="tiny sizes; for a machine without a GPU")
    parser.add_argument("--slower", type=float, default=1.0, help="every time limit times this")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.out = arguments.out.resolve()
    if arguments.one:
        return _one(arguments)
    try:
        parts = chosen(arguments.parts)
    except ValueError as error:
        parser.error(str(error))
    # A CPU has no lease to fit into, and other work beside this may make it slow.
    slower = arguments.slower * (_SMALL_FACTOR if arguments.small else 1.0)
    parts = [replace(part, limit_s=slower * part.limit_s) for part in parts]
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="covey-gpu-check-", ignore_cleanup_errors=True) as scratch:
        return _all(parts, arguments, Path(scratch))


def _one(arguments: argparse.Namespace) -> int:
    """One part, in this process."""
    began = time.monotonic()
    (part,) = chosen(arguments.one)
    faulthandler.dump_traceback_later(max(arguments.seconds - _TRACE_S, 0.5))
    lines = Lines(
        part=part.name,
        path=arguments.out / "results.jsonl",
        small=arguments.small,
        deadline=began + arguments.seconds - _MARGIN_S,
    )
    sys.path.insert(0, str(ROOT / "src"))
    from covey import environment

    # As `covey train` has it, and before torch is imported.
    environment.settle()
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if not arguments.small and not torch.cuda.is_available():
        sys.stderr.write("torch sees no CUDA device; without a GPU: make gpu-check SMALL=1\n")
        return 2
    importlib.import_module(f"on_gpu.{part.module}").run(lines)
    return 0


def _all(parts: list[Part], arguments: argparse.Namespace, scratch: Path) -> int:
    """Every part in a process of its own, then the table."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    environment = environment_of_parts(scratch)
    if arguments.small:
        environment.setdefault("OMP_NUM_THREADS", "1")
    ended: list[Ended] = []
    began = time.monotonic()
    try:
        for part in parts:
            _say(f"part {part.number} {part.name}, at most {part.limit_s:.0f} s")
            ended.append(_run(part, arguments, environment))
            faults = table(read_lines(out / "results.jsonl"), [ended[-1]]).faults
            _say(f"  {ended[-1].seconds:.0f} s, {'; '.join(faults) or 'no fault'}")
    except KeyboardInterrupt:
        _say("stopped; what was finished is below")
    ended += [
        Ended(part=p, code=None, seconds=0.0, was_run=False)
        for p in parts
        if p not in {e.part for e in ended}
    ]
    shown = table(read_lines(out / "results.jsonl"), ended)
    verdict = "FAILED: " + "; ".join(shown.faults) if shown.faults else "passed"
    last = f"{verdict}\n{time.monotonic() - began:.0f} s; results, output and table: {arguments.out}"
    (out / "table.txt").write_text("\n".join([*shown.lines, last]) + "\n", encoding="utf-8")
    _say("\n".join(["", *shown.lines, last]))
    return 1 if shown.faults else 0


def _run(part: Part, arguments: argparse.Namespace, environment: dict[str, str]) -> Ended:
    command = [sys.executable, str(BENCH / "gpu.py"), "--one", part.name, "--seconds", str(part.limit_s)]
    command += ["--out", str(arguments.out), *(["--small"] if arguments.small else [])]
    began = time.monotonic()
    with (arguments.out / "parts.log").open("a", encoding="utf-8") as log:
        log.write(f"== part {part.number} {part.name}\n")
        log.flush()
        code = run_limited(command, limit_s=part.limit_s, log=log, environment=environment)
    said = (arguments.out / "parts.log").read_text(encoding="utf-8", errors="replace")
    last = said.strip().rpartition("\n")[2]
    ended = Ended(part=part, code=code, seconds=time.monotonic() - began, last=last)
    line = {"part": part.name, "case": "process", "status": "ended" if code == 0 else "error"}
    with (arguments.out / "results.jsonl").open("a", encoding="utf-8") as file:
        # A killed writer can leave half a line.
        file.write(
            f"\n{json.dumps({**line, 'figures': {'code': code, 'seconds': round(ended.seconds, 1)}})}\n"
        )
    return ended


def environment_of_parts(scratch: Path) -> dict[str, str]:
    """The environment of the parts: this repository, carried packages, one cache of compiled kernels."""
    paths = [str(ROOT / "src")]
    carried = ("pydantic", "datasets", "math_verify")
    if WHEELS.is_dir() and any(importlib.util.find_spec(name) is None for name in carried):
        for wheel in sorted(WHEELS.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(scratch / "packages")
        # Outside of every limit: the first part would do it else.
        compileall.compile_dir(scratch / "packages", quiet=2, workers=0)
        paths.insert(0, str(scratch / "packages"))
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # A caller's own folders let a second run go on from the kernels of the first.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor")),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(scratch / "triton")),
        "TMPDIR": _folder(scratch / "tmp"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _folder(path: Path) -> str:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return str(path)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
