"""Print what sampling ahead gains, and what it costs in reward: `python bench/ahead.py [SEEDS]`.

Runs of the built-in task on a server that each run starts for itself, with a reward that takes its time,
for `--max_staleness` 0, 1 and 4:

- seconds a step, the median over steps behind the first five, of three runs in turn; asserted: 1 is faster
  than 0;
- the reward over time and at the end, over several seeds at equal updates; asserted: the mean of 4 is not
  below the least of 0 by more than the spread of 0;
- ages of tokens; who waited for whom; lengths of what was trained on against those of the run in turn.

Figures of one run are compared with each other alone. About ten minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REWARD = '''"""The sum is right; asking takes a while."""

import time


def slow(completions, solution, **columns):
    time.sleep({seconds})
    return [float(f"<answer>{{s}}</answer>" in c) for c, s in zip(completions, solution)]
'''
SLOW_S = 0.5
AHEAD = (0, 1, 4)
TIMED, LEARNED = 25, 80


def say(name: str, *figures: str) -> None:
    sys.stdout.write(f"{name:<46} " + " ".join(f"{figure:>12}" for figure in figures) + "\n")
    sys.stdout.flush()


def train(folder: Path, most: int, seed: int, steps: int, seconds: float) -> list[dict[str, Any]]:
    """The records of a run, with the seconds since its first step."""
    reward = folder / f"slow_{seconds}.py"
    reward.write_text(REWARD.format(seconds=seconds))
    output = Path(tempfile.mkdtemp(dir=folder))
    words = ["--model", "quickstart", "--dataset", "quickstart", "--reward_funcs", f"{reward}:slow"]
    words += ["--max_completion_length", "32", "--learning_rate", "3e-4", "--num_generations", "8"]
    words += ["--per_device_train_batch_size", "64", "--gradient_accumulation_steps", "1"]
    words += [
        "--max_steps",
        str(steps),
        "--seed",
        str(seed),
        "--output_dir",
        str(output),
        "--report_to",
        "none",
    ]
    words += ["--async_generate", "true", "--max_staleness", str(most), "--reward_workers", "8"]
    done = subprocess.run([sys.executable, "-m", "covey", "train", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    since = 0.0
    for record in found:
        since += record["time/step_s"]
        record["since"] = since
    return found


def mean(records: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(r[name] for r in records if r.get(name) is not None)


def speed(folder: Path) -> None:
    """Seconds a step with a slow reward, three runs of each in turn."""
    took: dict[int, list[float]] = {most: [] for most in AHEAD}
    records: dict[int, list[dict[str, Any]]] = {}
    for turn in range(3):
        for most in AHEAD:
            records[most] = train(folder, most, turn, TIMED, SLOW_S)[5:]
            took[most].append(statistics.median(r["time/step_s"] for r in records[most]))
    say("--max_staleness", *map(str, AHEAD))
    medians = {most: statistics.median(found) for most, found in took.items()}
    say(f"seconds a step, reward of {SLOW_S} s, median of 3", *(f"{medians[m]:.3f}" for m in AHEAD))
    say("ratio", *(f"{medians[m] / medians[0]:.2f}" for m in AHEAD))
    for name in ("ahead/learner_waits", "ahead/sampler_waits", "age/mean"):
        say(name, *(f"{mean(records[m], name):.2f}" for m in AHEAD))
    for age in range(max(AHEAD) + 1):
        name = f"age/share_{age}"
        say(name, *("–" if age > m else f"{mean(records[m], name):.2f}" for m in AHEAD))
    assert medians[1] < medians[0], medians


def learning(folder: Path, seeds: int) -> None:
    """The reward at equal updates, without a slow reward."""
    ends: dict[int, list[float]] = {}
    for most in AHEAD:
        runs = [train(folder, most, seed, LEARNED, 0.0) for seed in range(seeds)]
        ends[most] = [mean(run[-20:], "reward") for run in runs]
        for at in (10, 20, 40, 60, LEARNED):
            rewards = [mean(run[at - 10 : at], "reward") for run in runs]
            say(f"k {most}: reward, steps {at - 9} to {at}", f"{statistics.fmean(rewards):.3f}")
        lengths = statistics.fmean(mean(run, "completions/mean_length") for run in runs)
        say(f"k {most}: tokens of a completion, all steps", f"{lengths:.2f}")
    say("--max_staleness", *map(str, AHEAD))
    say(f"reward, last 20 steps, {seeds} seeds", *(f"{statistics.fmean(ends[m]):.3f}" for m in AHEAD))
    say("least and largest of them", *(f"{min(ends[m]):.3f}-{max(ends[m]):.3f}" for m in AHEAD))
    assert statistics.fmean(ends[4]) >= min(ends[0]) - statistics.stdev(ends[0]), ends


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        speed(Path(folder))
        learning(Path(folder), seeds)
        say("seconds", f"{time.monotonic() - began:.0f}")


if __name__ == "__main__":
    main()
