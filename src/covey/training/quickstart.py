"""`covey quickstart`: the built-in model on the built-in task, measured on held-out prompts before and
after."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock

import torch

from covey.checks.survey import Survey, model_dir
from covey.comm import LocalComm
from covey.config.resolve import Resolved
from covey.data.rows import PromptOptions, prompt_table
from covey.data.text import TextCodec, load_codec
from covey.environments.agents import Agents, TurnLimits
from covey.environments.protocol import ToolHost
from covey.environments.rendering import Renderer, calls_alike
from covey.environments.template_calls import format_of
from covey.environments.tools import start_tools
from covey.kernels.choose import KernelsName
from covey.media.decode import load_image
from covey.models.load import choose_stream, load_policy
from covey.quickstart import tools_task
from covey.quickstart.built_in import BUILT_IN
from covey.rewards.registry import build, score_rows
from covey.rollout.collect import collect
from covey.rollout.native.engine import NativeEngine
from covey.rollout.slots import CollectPlan
from covey.telemetry.plot import Picture, draw_pictures
from covey.texts import Text, counted, joined, padded, tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.training.run import Outcome, train
from covey.training.together import Together
from covey.types import Episode, Origin, SamplingParams, ScoredGroup, ToolCall, ToolResult

SUMS, TOOLS, SHAPES = "quickstart", "quickstart-tools", "quickstart-shapes"
"""The built-in tasks: without anything, with a tool, with pictures."""

_SHOWN = 4
_MOST_CHARS = 1000
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


def measure(
    directory: Path,
    max_new_tokens: int,
    kernels: KernelsName = "auto",
    name: str = "quickstart",
    *,
    is_shuffled: bool = False,
) -> Measured:
    """Sample the 512 held-out prompts of a built-in task from a model directory and score them, under fixed
    noise; with `is_shuffled` each call of a tool is given the result of another one, and each question the
    picture of another one."""
    policy = load_policy(
        directory,
        device=torch.device("cpu"),
        disable_dropout=True,
        kernels=kernels,
    )
    choose_stream(policy)
    policy.eval()
    codec = load_codec(directory)
    agents = _agents(codec, max_new_tokens, is_shuffled=is_shuffled) if name == TOOLS else None
    options = PromptOptions(tools=() if agents is None else agents.schemas)
    task = BUILT_IN[name]
    rows = task.misleading_rows if is_shuffled and task.misleading_rows else task.held_out_rows
    table = prompt_table(rows(), codec, max_length=None, options=options)
    rewards = build(["accuracy"])
    with nullcontext() if agents is None else closing(agents):
        found = collect(
            [table.take(i, Origin(epoch=0, rollout=0)) for i in range(len(table.entries))],
            NativeEngine(policy),
            lambda rows: lambda: score_rows(rewards, [1.0], rows),
            codec,
            CollectPlan(
                num_generations=1,
                sampling=SamplingParams(
                    temperature=1.0,
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=codec.stop_token_ids,
                    banned_token_ids=codec.banned_token_ids,
                ),
                seed=_EVAL_SEED,
                split="eval",
            ),
            LocalComm(),
            agents,
        )
    return Measured(groups=found.groups)


def _agents(codec: TextCodec, max_tokens: int, *, is_shuffled: bool) -> Agents:
    """The calculator, as a run has it."""
    tools, _ = start_tools(
        [tools_task.TOOL], workers=2, timeout_s=60.0, memory_gb=None, max_result_chars=_MOST_CHARS
    )
    form = format_of(codec)
    return Agents(
        renderer=Renderer(codec, calls_alike(codec, form)),
        limits=TurnLimits(max_tokens=max_tokens),
        format=form,
        tools=_Shuffled(tools) if is_shuffled else tools,
        keys=count(),
    )


class _Shuffled:
    """Gives each call the result of the call before it."""

    def __init__(self, tools: ToolHost) -> None:
        self._tools, self._last, self._lock = tools, "0", Lock()
        self.schemas = tools.schemas

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        """Start a call."""

        def swap(result: ToolResult) -> None:
            with self._lock:
                content, self._last = self._last, result.content
            done(replace(result, content=content))

        self._tools.call(call, swap)

    def close(self) -> None:
        """End the processes."""
        self._tools.close()


def quickstart(resolved: Resolved, found: Survey | None = None, others: Together | None = None) -> Outcome:
    """Measure, train, measure again, and say what to type next."""
    config = resolved.config
    name = config.dataset[0] if config.dataset[0] in BUILT_IN else "quickstart"
    speaks = os.environ.get("RANK", "0") == "0"
    before = None
    if speaks and config.resume_from_checkpoint is None:
        before = measure(model_dir(config), config.max_completion_length, config.kernels, name)
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
        again = partial(measure, outcome.checkpoint, config.max_completion_length, config.kernels, name)
        shuffled = None if name == SUMS else again(is_shuffled=True)
        after = again()
        if name == SHAPES:
            shown = [_said_of(before, after, number) for number in _drawn(after)]
            draw_pictures(outcome.output_dir / "pictures.png", shown)
        _say(_report(outcome, name, before, after, shuffled, seconds))
    return outcome


def _report(
    outcome: Outcome,
    name: str,
    before: Measured | None,
    after: Measured,
    shuffled: Measured | None,
    seconds: float,
) -> str:
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
            *_misled(name, shuffled),
            "",
            *_samples(name, before.groups if before is not None else None, after.groups),
            "",
            tr("run directory      {run}", run=run),
            tr("reward plot        {run}/reward.png", run=run),
            *([tr("pictures           {run}/pictures.png", run=run)] if name == SHAPES else []),
            tr(
                "model              {relpath}   (loads with from_pretrained)",
                relpath=os.path.relpath(outcome.checkpoint),
            ),
            "",
            tr("next:"),
            tr(
                "  {typed} quickstart{task} --max_steps {total_steps} --output_dir {run} "
                "--resume_from_checkpoint latest --allow_changes true",
                typed=typed,
                task="" if name == SUMS else f" --task {name.removeprefix('quickstart-')}",
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


def _misled(name: str, shuffled: Measured | None) -> list[str]:
    """Return a line with the accuracy where each call gets another call's result, or each question another
    one's picture."""
    if shuffled is None:
        return []
    if name == SHAPES:
        return [
            tr(
                "with other pictures {accuracy:.3f}  (each question gets another one's)",
                accuracy=shuffled.accuracy,
            )
        ]
    words = tr(
        "with other results {accuracy:.3f}   (each call gets another one's)", accuracy=shuffled.accuracy
    )
    return [words]


def _said(episode: Episode) -> str:
    """Return an episode as one line: each turn, and the results that followed it."""
    if len(episode.turns) < 2:
        return episode.text
    parts = []
    for turn in episode.turns:
        parts += [turn.text, *(str(answer["content"]) for answer in turn.answer)]
    return " -> ".join(" ".join(part.split()) for part in parts)


def _samples(name: str, before: Sequence[ScoredGroup] | None, after: Sequence[ScoredGroup]) -> list[str]:
    """The first held-out prompts with what the model said of them then and now."""
    lines = []
    for number in range(_SHOWN):
        row = BUILT_IN[name].held_out_rows()[number]
        lines.append(
            tr(
                "{content}  (gold {solution})",
                content=row["messages"][0]["content"],
                solution=row["solution"],
            )
        )
        for when, groups in ((tr("before"), before), (tr("after"), after)):
            if groups is not None:
                scored = groups[number]
                mark = tr("right") if _accuracy(scored) else tr("wrong")
                said = Text(_said(scored.group.episodes[0]))
                lines.append(joined("", ("  ", padded(when, 7), " ", mark, "  ", said)))
    return lines


def _drawn(measured: Measured) -> list[int]:
    """Return the first held-out prompts, half of which ask for a number and half for a name."""
    numbers: list[int] = []
    names: list[int] = []
    for number, scored in enumerate(measured.groups):
        is_number = str(scored.group.prompt.columns["solution"]).isdigit()
        (numbers if is_number else names).append(number)
    return [*numbers[: _SHOWN // 2], *names[: _SHOWN // 2]]


def _said_of(before: Measured | None, after: Measured, number: int) -> Picture:
    group = after.groups[number].group
    then = "" if before is None else f"{before.groups[number].group.episodes[0].text} →\n"
    question = group.prompt.messages[-1]["content"][-1]["text"] if group.prompt.messages else ""
    gold = group.prompt.columns["solution"]
    image = load_image(group.prompt.media[0].source.place.image())
    return image, f"{question} ({gold})\n{then}{group.episodes[0].text}"


def _say(text: str) -> None:
    say(spoken(text))
