"""`covey quickstart`: the built-in model on the built-in task, measured on held-out prompts before and
after."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from covey.checks.survey import Survey, model_dir
from covey.comm import LocalComm
from covey.config.resolve import Resolved
from covey.data.rows import prompt_table
from covey.data.text import load_codec
from covey.kernels.choose import KernelsName
from covey.models.load import choose_stream, load_policy
from covey.quickstart import task
from covey.rewards.registry import build, score_rows
from covey.rollout.collect import collect
from covey.rollout.native.engine import NativeEngine
from covey.rollout.slots import CollectPlan
from covey.texts import Text, counted, joined, padded, tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.training.run import Outcome, train
from covey.training.together import Together
from covey.types import Origin, SamplingParams, ScoredGroup

_SHOWN = 4
_EVAL_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One sampled completion of every held-out prompt, at temperature 1."""

    groups: tuple[ScoredGroup, ...]

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return sum(_accuracy(g) for g in self.groups) / len(self.groups)


def _accuracy(scored: ScoredGroup) -> float:
    return scored.scores[0].total or 0.0


def measure(directory: Path, max_new_tokens: int, kernels: KernelsName = "auto") -> Measured:
    """Sample the 512 held-out prompts from a model directory and score them, under fixed noise."""
    policy = load_policy(
        directory,
        device=torch.device("cpu"),
        disable_dropout=True,
        kernels=kernels,
    )
    choose_stream(policy)
    policy.eval()
    codec = load_codec(directory)
    table = prompt_table(task.held_out_rows(), codec, max_length=None)
    rewards = build(["accuracy"])
    found = collect(
        [table.take(i, Origin(epoch=0, rollout=0)) for i in range(len(table.entries))],
        NativeEngine(policy),
        lambda rows: lambda: score_rows(rewards, [1.0], rows),
        codec,
        CollectPlan(
            num_generations=1,
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=max_new_tokens, stop_token_ids=codec.stop_token_ids
            ),
            seed=_EVAL_SEED,
            split="eval",
        ),
        LocalComm(),
    )
    return Measured(groups=found.groups)


def quickstart(resolved: Resolved, found: Survey | None = None, others: Together | None = None) -> Outcome:
    """Measure, train, measure again, and say what to type next."""
    config = resolved.config
    speaks = os.environ.get("RANK", "0") == "0"
    before = None
    if speaks and config.resume_from_checkpoint is None:
        before = measure(model_dir(config), config.max_completion_length, config.kernels)
        _say(
            tr(
                "held-out accuracy before training: {accuracy:.3f} (512 prompts, one sample each)",
                accuracy=before.accuracy,
            )
        )
    started = time.perf_counter()
    outcome = train(resolved, found, others)
    seconds = time.perf_counter() - started
    if speaks and outcome.exit_code == 0:
        after = measure(outcome.checkpoint, config.max_completion_length, config.kernels)
        _say(_report(outcome, before, after, seconds))
    return outcome


def _report(outcome: Outcome, before: Measured | None, after: Measured, seconds: float) -> str:
    first = tr("{accuracy:.3f} -> ", accuracy=before.accuracy) if before is not None else ""
    run = os.path.relpath(outcome.output_dir)
    typed = os.path.relpath(sys.argv[0]) if os.path.basename(sys.argv[0]) == "covey" else "covey"
    return joined(
        "\n",
        [
            "",
            tr(
                "held-out accuracy  {first}{accuracy:.3f}   ({steps}, {seconds:.1f} s)",
                first=first,
                accuracy=after.accuracy,
                steps=counted(outcome.step, "step"),
                seconds=seconds,
            ),
            "",
            *_samples(before.groups if before is not None else None, after.groups),
            "",
            tr("run directory      {run}", run=run),
            tr("reward plot        {run}/reward.png", run=run),
            tr(
                "model              {relpath}   (loads with from_pretrained)",
                relpath=os.path.relpath(outcome.checkpoint),
            ),
            "",
            tr("next:"),
            tr(
                "  {typed} quickstart --max_steps {total_steps} --output_dir {run} "
                "--resume_from_checkpoint latest --allow_changes true",
                typed=typed,
                total_steps=2 * outcome.total_steps,
                run=run,
            ),
            tr(
                "  {typed} train --model DIR --dataset FILE.jsonl --reward_funcs accuracy format", typed=typed
            ),
            tr("  {typed} train --help", typed=typed),
            "",
        ],
    )


def _samples(before: Sequence[ScoredGroup] | None, after: Sequence[ScoredGroup]) -> list[str]:
    """The first held-out prompts with what the model said of them then and now."""
    lines = []
    for number in range(_SHOWN):
        row = task.held_out_rows()[number]
        lines.append(
            tr(
                "{content}  (gold {solution})",
                content=row["messages"][0]["content"],
                solution=row["solution"],
            )
        )
        for name, groups in ((tr("before"), before), (tr("after"), after)):
            if groups is not None:
                scored = groups[number]
                mark = tr("right") if _accuracy(scored) else tr("wrong")
                said = Text(scored.group.episodes[0].text)
                lines.append(joined("", ("  ", padded(name, 7), " ", mark, "  ", said)))
    return lines


def _say(text: str) -> None:
    say(spoken(text))
