"""The rollouts that every cell learns from, written once and replayed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from covey.telemetry.kept_files import without_sets, write_sets
from support.models import VOCAB
from support.runs import record
from support.steps import random_sets

Rows = Literal["equal", "ragged", "an empty half", "a masked half", "two sequences", "filtered"]

SIBLINGS = 8
ROWS_PER_RANK = 32
"""As many as 32 micro-batches of one row."""
ROLLOUTS = 3
"""Of two steps each."""

_LONGEST_PROMPT = 10


def write(directory: Path, rows: Rows, world: int) -> Path:
    """Rollouts of 4 groups of 8 a rank. In every other one the half that is empty or masked is the first.

    Ragged rows are short in the first half of a step and long in the second; one of them failed, one was cut
    off, and one group is all equal. An empty half has groups that are all equal: rows without an advantage. A
    masked one has rows that were cut off. Rows are dealt to ranks by tokens, so both ranks forward half of
    what is left. Of two sequences every other episode has a second one, with a prompt of its own. Of filtered
    rows each token was drawn from a set: alone, from a few, or from most of the vocabulary.
    """
    draw = random.Random(f"{rows} {world}")
    directory.mkdir(parents=True)
    per_rank = ROWS_PER_RANK // SIBLINGS
    for rollout in range(ROLLOUTS):
        special = (1 - rollout) % 2
        lines = [
            line
            for group in range(per_rank * world)
            for line in _group(draw, rollout, group, rows, is_special=group // per_rank == special)
        ]
        path = directory / f"rollout-{rollout:06d}.jsonl"
        lines, kept = without_sets(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        if kept is not None:
            write_sets(path, kept)
    return directory


def _group(
    draw: random.Random, rollout: int, group: int, rows: Rows, *, is_special: bool
) -> list[dict[str, Any]]:
    is_equal = rows == "equal"
    prompt = [draw.randrange(300) for _ in range(_LONGEST_PROMPT if is_equal else draw.choice((4, 7, 10)))]
    lines = []
    for sibling in range(SIBLINGS):
        place = (group, sibling)
        length = 12 if is_equal else draw.randrange(1, 9) if group < 4 else draw.randrange(8, 21)
        reward = draw.choice((0.0, 0.5, 1.0)) + 0.01 * sibling
        is_flat = (rows == "ragged" and group == 2) or (rows == "an empty half" and is_special)
        is_cut = (rows == "ragged" and place == (3, 2)) or (rows == "a masked half" and is_special)
        has_failed = rows == "ragged" and place == (1, 5)
        lines.append(
            record(
                draw,
                rollout=rollout,
                group=group,
                sibling=sibling,
                prompt=prompt,
                length=length,
                is_cut=is_cut,
                reward=None if has_failed else 1.0 if is_flat else reward,
            )
        )
        if rows == "filtered":
            seed = 1000 * rollout + 10 * group + sibling
            lines[-1]["kept"] = random_sets(lines[-1]["completion_ids"], seed, VOCAB)
        if rows == "two sequences" and sibling % 2:
            lines[-1]["sequences"] = [_second(draw, rollout)]
    return lines


def _second(draw: random.Random, rollout: int) -> dict[str, Any]:
    """A further sequence of an episode, as a record has it."""
    names = ("prompt_ids", "completion_ids", "trained_mask", "sampler_logprobs", "versions", "sources")
    prompt = [draw.randrange(300) for _ in range(draw.randrange(6, 12))]
    length = draw.randrange(4, 12)
    own = record(
        draw, rollout=rollout, group=0, sibling=0, prompt=prompt, length=length, is_cut=False, reward=1.0
    )
    return {name: own[name] for name in names}
