"""Train a real small model on word problems: `python bench/quickstart_real.py MODEL [--seed N]`.

MODEL is the directory of SmolLM2-135M-Instruct that bench/real_models.py fetches. It answers 128 held-out
problems before and after 36 steps of 64 completions, in about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from word_problems import problems

import covey

_STEPS = 36
_TRAINED, _HELD_OUT, _SHOWN = 2_000, 128, 3
_COMPLETION = 48


def main() -> None:
    """Measure, train, measure again, and show conversations of both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart-real"))
    arguments = parser.parse_args()
    began = time.perf_counter()
    run: Path = arguments.output_dir
    data = run.with_name(f"{run.name}-data")
    data.mkdir(parents=True, exist_ok=True)
    trained, held_out = data / "train.jsonl", data / "held_out.jsonl"
    _write(trained, problems(_TRAINED, is_held_out=False))
    asked = problems(_HELD_OUT, is_held_out=True)
    _write(held_out, asked)

    before = _answers(arguments.model, held_out, data / "before")
    _say(f"accuracy on {_HELD_OUT} held-out problems before training: {before[0]:.3f}")
    outcome = covey.train(
        model=str(arguments.model),
        dataset=str(trained),
        reward_funcs="accuracy",
        max_completion_length=_COMPLETION,
        num_generations=8,
        per_device_train_batch_size=64,
        learning_rate=3e-5,
        max_steps=_STEPS,
        seed=arguments.seed,
        save_only_model=True,
        output_dir=str(run),
    )
    after = _answers(outcome.checkpoint, held_out, data / "after")
    for number in range(_SHOWN):
        first, second = _one(before[1][number]), _one(after[1][number])
        _say(f"\n{asked[number]['question']}\n  before  {first}\n  after   {second}")
    _say(
        f"\naccuracy on held-out problems  {before[0]:.3f} -> {after[0]:.3f}   "
        f"({outcome.step} steps, {time.perf_counter() - began:.0f} s in all)\n"
        f"reward plot                    {run}/reward.png\n"
        f"model                          {outcome.checkpoint}"
    )


def _answers(model: Path, held_out: Path, output: Path) -> tuple[float, list[dict[str, Any]]]:
    """The share of right answers, one sampled completion of each problem, and the records of all."""
    found = covey.evaluate(
        str(model),
        val_dataset=str(held_out),
        reward_funcs="accuracy",
        max_completion_length=_COMPLETION,
        num_generations_eval=1,
        output_dir=str(output),
    )
    records = [json.loads(line) for line in (output / f"{held_out.stem}.jsonl").read_text().splitlines()]
    return found.metrics["eval_reward"].value, records


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _one(record: dict[str, Any]) -> str:
    mark = "right" if record["reward"] else "wrong"
    return f"{mark}  {' '.join(record['text'].split())}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
