"""Compare covey with TRL on the same work: `python bench/compare [CASE ...] --trl PYTHON`.

Each side runs in a process of its own, in turns; the table has the median of each side over its runs, and the
ratio of the medians. `--write FILE` keeps the table as Markdown, with the machine and the versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import CASES, Case, prepare  # noqa: E402

THREADS = str(min(2, os.cpu_count() or 1))


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(c.name for c in CASES)}; none: all")
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    chosen = [c for c in CASES if not arguments.cases or c.name in arguments.cases]
    pythons = {"covey": sys.executable, "trl": arguments.trl}
    lines = list(HEAD)
    sys.stdout.write("\n".join(lines) + "\n")
    with tempfile.TemporaryDirectory() as work:
        for case in chosen:
            row = _row(case, _measured(case, Path(work), pythons, arguments.repeats))
            lines.append(row)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    if arguments.write is not None:
        arguments.write.write_text("\n".join([*_preface(pythons), *lines, ""]), encoding="utf-8")


HEAD = (
    "| case | | covey s/step | TRL s/step | ratio | rollout s, both | tokens/s, both | peak GB, both |",
    "|---|---|---|---|---|---|---|---|",
)


def _measured(
    case: Case, work: Path, pythons: dict[str, str], repeats: int
) -> dict[str, list[dict[str, float]]]:
    spec = work / f"{case.name}.json"
    spec.write_text(json.dumps(prepare(case, work)))
    found: dict[str, list[dict[str, float]]] = {side: [] for side in pythons}
    for number in range(repeats):
        # In turns, and in the other order each time: the machine's speed drifts.
        for side in list(pythons)[:: 1 if number % 2 else -1]:
            found[side].append(_once(case, spec, side, pythons[side], work))
    return found


def _once(case: Case, spec: Path, side: str, python: str, work: Path) -> dict[str, float]:
    folder = work / "run"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir()
    result = folder / "result.json"
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), THREADS),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [python, str(HERE / f"side_{side}.py"), str(spec), str(result)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{side} failed on case {case.name}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return _figures(case, json.loads(result.read_text()))


def _figures(case: Case, result: dict[str, Any]) -> dict[str, float]:
    """What one run comes to: the steps behind the warm-up, or all of them on the way to a target."""
    ends, skipped = result["ends"], case.warmup
    seconds = (ends[-1] - ends[skipped - 1]) / (len(ends) - skipped)
    rollouts = result["rollout_s"][skipped:]
    return {
        "step_s": ends[-1] - result["started"] if case.target is not None else seconds,
        "rollout_s": statistics.mean(rollouts),
        "tokens_per_s": sum(result["tokens"][skipped:]) / (ends[-1] - ends[skipped - 1]),
        "peak_gb": result["peak_bytes"] / 1e9,
        "steps": len(ends),
    }


def _row(case: Case, found: dict[str, list[dict[str, float]]]) -> str:
    def median(side: str, name: str) -> float:
        return statistics.median(run[name] for run in found[side])

    def pair(name: str, form: str) -> str:
        return ", ".join(format(median(side, name), form) for side in ("covey", "trl"))

    covey, trl = median("covey", "step_s"), median("trl", "step_s")
    says = case.says
    if case.target is not None:
        says += f" (steps: {pair('steps', '.0f')})"
    cells = [case.name, says, f"{covey:.3f}", f"{trl:.3f}", f"{covey / trl:.2f}", pair("rollout_s", ".3f")]
    return f"| {' | '.join([*cells, pair('tokens_per_s', ',.0f'), pair('peak_gb', '.2f')])} |"


def _preface(pythons: dict[str, str]) -> list[str]:
    versions = {side: _version(python, side) for side, python in pythons.items()}
    return [
        "# Performance",
        "",
        "Written by `make bench`. Medians of runs in turns; a ratio below 1: covey takes less time.",
        "",
        f"- machine: {platform.machine()}, {_processor()}, {THREADS} threads",
        *(f"- {side}: {text}" for side, text in versions.items()),
        "",
    ]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "an unknown processor"


def _version(python: str, side: str) -> str:
    names = [side, "torch", "transformers"]
    code = f"from importlib.metadata import version as v; print(', '.join(n + ' ' + v(n) for n in {names}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
