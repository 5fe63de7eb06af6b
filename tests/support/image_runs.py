"""Runs on rows of which some have images: their data, and their options."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import squares
from support.runs import options
from support.vision import FAMILIES, picture, save_model

REWARD = '''
def mixed(prompts, completion_ids, **columns):
    """Rewards differ between completions of a prompt, whatever is in them."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def half(prompts, completion_ids, solution, **columns):
    """The completions of each second prompt get 0."""
    return [float(sum(ids) % 7) * (int(row) % 2) for ids, row in zip(completion_ids, solution)]
'''
ENVIRONMENT = '''
from PIL import Image


class Looks:
    """Answers a turn with a picture, once."""

    def reset(self, row, seed):
        self.seed, self.turn = seed, 0

    def step(self, turn):
        self.turn += 1
        image = Image.new("RGB", (24, 16), (self.seed % 256, 40 * self.turn, 200))
        content = [{"type": "image", "image": image}, {"type": "text", "text": "And now?"}]
        return [{"role": "user", "content": content}], self.turn == 2, 0.0
'''
# The last rows of a step have no image, and each third step none at all.
_IMAGES = (1, 0, 2, 1, 0, 0)


def image_data(directory: Path, family: str = "qwen2_5_vl") -> Path:
    """Save a small model that sees as `model` in a directory, and `rows.jsonl` beside it; returns the
    directory."""
    (save_model if family in FAMILIES else squares.save_model)(family, directory / "model")
    image_rows(directory)
    return directory


def drawings(directory: Path, family: str) -> dict[str, Any]:
    """Save a small model that sees, and four rows that ask the same of other drawings, the first and the last
    of one size; returns the options that name them."""
    model = image_data(directory, family) / "model"
    rows = image_rows(directory, prompts=4, images=(1,), asked="What is it?")
    return {
        "model": str(model),
        "dataset": [str(rows)],
        "dataset_shuffle": False,
        "reward_funcs": [f"{reward_file(directory)}:mixed"],
        "reward_trial": False,
    }


def image_rows(
    directory: Path, *, prompts: int = 24, first: int = 0, images: Sequence[int] = _IMAGES, asked: str = ""
) -> Path:
    """Write rows with so many `images`, one number after the other, in files beside them and in the rows
    themselves; returns their file. Another number of the `first` makes other images. Rows ask the same where
    `asked` says what."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    rows, number = [], first
    for prompt in range(prompts):
        own: list[str] = []
        for _ in range(images[prompt % len(images)]):
            colour = 40 + 9 * number % 216, 255 - 9 * number % 256, number * 37 % 256
            file = picture(colour, (16 + 8 * (number % 3), 16))
            path = Path("images") / f"{number}.png"
            (directory / path).write_bytes(file)
            data = f"data:image/png;base64,{base64.b64encode(file).decode()}"
            own.append(data if number % 2 else str(path))
            number += 1
        content = "<image>" * len(own) + (asked or f"What is {prompt}?")
        row: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "solution": str(prompt)}
        rows.append({**row, "images": own} if own else row)
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def looking(directory: Path) -> dict[str, Any]:
    """Write an environment that answers with pictures into a directory; returns the options of its episodes,
    whose turns end soon though a model is random."""
    path = directory / "looks.py"
    path.write_text(ENVIRONMENT)
    return {
        "environment_factory": f"{path}:Looks",
        "stop_words": [*"etaoins 1245"],
        "max_completion_length": 200,
        "max_tokens_per_micro_batch": 800,
    }


def reward_file(directory: Path) -> Path:
    """Write the rewards into a directory; returns their file."""
    path = directory / "mixed.py"
    path.write_text(REWARD)
    return path


def image_options(
    model: Path, rows: Path, output: Path, reward_name: str = "mixed", **changes: Any
) -> dict[str, Any]:
    """Options of a run of three steps, of two prompts with four completions each, that trains all of the
    model with a KL term."""
    output.parent.mkdir(parents=True, exist_ok=True)
    reward = reward_file(output.parent)
    base = options(
        model,
        output,
        dataset=[str(rows)],
        dataset_shuffle=False,
        reward_funcs=[f"{reward}:{reward_name}"],
        reward_trial=False,
        max_steps=3,
        learning_rate=5e-4,
        # Gradients that are rounding alone move no weight.
        adam_epsilon=1e-5,
        beta=0.04,
        max_completion_length=6,
        mask_truncated_completions=False,
        max_tokens_per_micro_batch=48,
    )
    return {**base, **changes}
