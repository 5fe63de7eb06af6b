"""Seconds of a training step on prompts with images: shared by their completions, end to end, and padded.

Run as `python bench/vision.py`. Ratios of one run count. The model is the built-in one, its images are noise.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from covey.data.images import PlacedImage
from covey.data.text import load_codec
from covey.media.source import sources_of
from covey.models.load import load_policy
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.quickstart.shapes_task import MODEL_DIR
from covey.token_streams import Row, StreamKind
from covey.types.arrays import bools, ints

SIZE, COMPLETIONS, TOKENS, TIMES = (96, 128), 8, 32, 5
KINDS: Sequence[StreamKind] = ("prefix", "packed", "padded")


def rows(num_images: int) -> list[Row]:
    """Return the completions of a prompt with so many images."""
    codec = load_codec(MODEL_DIR)
    assert codec.vision is not None
    noise = np.random.default_rng(0).integers(256, size=(num_images, *SIZE, 3), dtype=np.uint8)
    media = tuple(codec.vision.medium(PlacedImage(one)) for image in noise for one in sources_of(image))
    prompt = [5, *(token for one in media for token in (*[one.token_id] * one.num_tokens, 6))]
    drawn = np.random.default_rng(1).integers(300, size=(COMPLETIONS, TOKENS)).tolist()
    return [
        Row(
            token_ids=ints([*prompt, *completion]),
            is_trained=bools([False] * len(prompt) + [True] * TOKENS),
            prompt_length=len(prompt),
            prompt_key=0,
            media=media,
        )
        for completion in drawn
    ]


def seconds(policy: Policy, own: Sequence[Row], kind: StreamKind) -> float:
    """Return the median seconds of a forward and a backward pass."""
    policy.use_stream(kind)
    micro = micro_of(own, kind, policy.device)
    taken = []
    for _ in range(TIMES + 1):
        policy.zero_grad()
        began = time.perf_counter()
        policy(micro).logprob_N.sum().backward()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main() -> None:
    """Print a line for each number of images."""
    torch.set_num_threads(1)
    policy = load_policy(MODEL_DIR, device=torch.device("cpu"), disable_dropout=True)
    for num_images in (1, 2, 4):
        own = rows(num_images)
        found = {kind: seconds(policy, own, kind) for kind in KINDS}
        shared = found["prefix"]
        told = "  ".join(f"{kind} {value:.3f} s ({value / shared:.2f})" for kind, value in found.items())
        size = f"{num_images} images, {own[0].prompt_length} prompt tokens, {COMPLETIONS} x {TOKENS}"
        sys.stdout.write(f"{size}:  {told}\n")


if __name__ == "__main__":
    main()
