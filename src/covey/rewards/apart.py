"""Rewards that have a worker of their own: models that score, and a judge behind a service."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.rewards.builtin import JUDGE, JUDGE_OPTIONS
from covey.rewards.callee import Wants
from covey.rewards.judge_text import filled, prompt_in_words, row_limit_s, template_text
from covey.rewards.own_worker import OwnWorker
from covey.rewards.protocol import Scored
from covey.rewards.resolve import ResolvedReward
from covey.rewards.targets import Target, model_source

ROWS_PER_PASS, TOKENS_PER_PASS = 8, 8192
"""What one forward pass of a reward model holds at most; a longer row has a pass to itself."""

_LOAD_LIMIT_S = 1800.0
# Seconds for starting and ending, beside those for the answers.
_BESIDE_S = 30.0
_NOTHING = Wants(names=(), demands=(), takes_all=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A reward model: what was typed, the name of its metric, its directory on this machine."""

    entry: str
    name: str
    directory: str

    def __str__(self) -> str:
        return self.entry


def model_reward(entry: ModelEntry, timeout_s: float) -> ResolvedReward:
    """The reward of a model. Its weights load at the first call; `timeout_s` is for each forward pass."""
    worker = OwnWorker(
        Target(entry=entry.entry, name="RewardModel", module="covey.rewards.reward_model"),
        {"directory": entry.directory, "rows": ROWS_PER_PASS, "tokens": TOKENS_PER_PASS},
        load_limit_s=_LOAD_LIMIT_S,
        limit_of=lambda count: timeout_s * count,
    )
    return ResolvedReward(
        plain=entry.name,
        source=model_source(entry.entry),
        kind="built_in",
        wants=_NOTHING,
        ask=worker.ask,
        calls=1,
        worker=worker,
        arguments=conversations,
    )


def judge_reward(options: Mapping[str, Any]) -> ResolvedReward:
    """The reward `judge` with its options of the run."""
    retries, concurrency = options["judge_retries"], options["judge_concurrency"]
    row_s = row_limit_s(retries, options["judge_timeout_s"])
    worker = OwnWorker(
        Target(entry=JUDGE, name="Judge", module="covey.rewards.judge"),
        {name: options[name] for name in JUDGE_OPTIONS},
        load_limit_s=_LOAD_LIMIT_S,
        limit_of=lambda count: -(-count // concurrency) * row_s + _BESIDE_S,
    )
    try:
        template = template_text(options["judge_prompt"] or "")
    except (OSError, UnicodeDecodeError):
        # The plan refuses such a prompt before any judge is asked.
        template = ""

    def questions(rows: Sequence[Scored]) -> dict[str, list[Any]]:
        return {"questions": [filled(template, _values(row)) for row in rows]}

    return ResolvedReward(
        plain=JUDGE,
        source=None,
        kind="built_in",
        wants=_NOTHING,
        ask=worker.ask,
        calls=1,
        worker=worker,
        arguments=questions,
    )


def conversations(rows: Sequence[Scored]) -> dict[str, list[Any]]:
    """What a reward model reads of each row: the messages with the completion as the last turn, or, where the
    prompt was text, that text with the completion behind it."""
    return {"conversations": [_conversation(row) for row in rows]}


def _conversation(row: Scored) -> str | list[dict[str, Any]]:
    if row.before is None:
        return row.prompt.text + row.episode.text
    return [*(dict(m) for m in row.before), *row.spoken]


def _values(row: Scored) -> dict[str, str]:
    columns = {name: _as_text(value) for name, value in row.prompt.columns.items()}
    prompt = row.prompt.text if row.before is None else prompt_in_words(row.before)
    return {**columns, "prompt": prompt, "completion": row.text}


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
