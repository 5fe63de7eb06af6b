"""Requests with images for a small model that sees them, and what the engine of the process samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from covey.data.images import PlacedImage
from covey.data.vision import VisionSpec, vision_spec
from covey.media.source import ImageSource
from covey.models.policy import Policy
from covey.rollout.native.engine import NativeEngine
from covey.types import GenerationRequest, Medium, SamplingParams, TurnId
from support.engines import Plain, sampled
from support.vision import END, IMAGE, START, picture

RED, BLUE, WIDE = picture((255, 0, 0)), picture((0, 0, 255)), picture((0, 255, 0), (40, 16))


def spec_of(directory: Path) -> VisionSpec:
    """Return how prompts of a model hold images."""
    found = vision_spec(directory, Tokenizer.from_file(str(directory / "tokenizer.json")))
    assert found is not None
    return found


def image_of(spec: VisionSpec, data: bytes) -> Medium:
    """Return an image whose file is in memory."""
    return spec.medium(PlacedImage(ImageSource(data=data)))


def image_at(spec: VisionSpec, file: Path) -> Medium:
    """Return an image in a file."""
    return spec.medium(PlacedImage(ImageSource(path=str(file))))


def requests_with_images(policy: Policy, spec: VisionSpec, folder: Path) -> list[GenerationRequest]:
    """Return requests of four prompts with two siblings each: of three images, one is in a file of `folder`,
    and one in two prompts; a prompt has none."""
    file = folder / "wide.png"
    file.write_bytes(WIDE)
    red, blue, wide = image_of(spec, RED), image_of(spec, BLUE), image_at(spec, file)
    prompts: list[list[int | Medium]] = [[5, red, 6], [5, blue, 6], [7, wide, 8, red, 9], [10, 11, 12]]
    return [
        request_of(policy, parts, number, sibling)
        for number, parts in enumerate(prompts)
        for sibling in range(2)
    ]


def request_of(
    policy: Policy, parts: Sequence[int | Medium], number: int = 0, sibling: int = 0
) -> GenerationRequest:
    """Return a request whose prompt has these tokens and images."""
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=6, stop_token_ids=(1,), banned_token_ids=policy.head.banned
    )
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else _written(part))]
    return GenerationRequest(
        prompt_token_ids=tuple(ids),
        sampling=sampling,
        turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=number, sibling=sibling),
        media=tuple(part for part in parts if isinstance(part, Medium)),
    )


def _written(medium: Medium) -> list[int]:
    return [START, *[IMAGE] * medium.num_tokens, END]


def expected(policy: Policy, requests: Sequence[GenerationRequest]) -> list[Plain]:
    """Return what the engine of the process samples."""
    own = NativeEngine(policy)
    own.publish(iter(()), 0)
    return sampled(own, requests)


def agrees(found: Sequence[Plain], own: Sequence[Plain]) -> bool:
    """Return whether tokens are the same, and logprobs but for the last bits: the images of other prompts go
    through the vision tower beside them."""
    gaps = [
        abs(a - b)
        for one, two in zip(found, own, strict=True)
        for a, b in zip(one.logprobs, two.logprobs, strict=True)
    ]
    tokens, own_tokens = ([(one.token_ids, one.finish) for one in every] for every in (found, own))
    return tokens == own_tokens and max(gaps) < 1e-5


def own_gap(policy: Policy, requests: Sequence[GenerationRequest], done: Sequence[Plain]) -> float:
    """Return the largest distance of logprobs from those of the model's own forward pass from pixels."""
    stream = policy.stream
    policy.use_stream("padded")
    gaps = [
        float((own_logprobs(policy, request, one.token_ids) - torch.tensor(one.logprobs)).abs().max())
        for request, one in zip(requests, done, strict=True)
    ]
    policy.use_stream(stream)
    return max(gaps)


@torch.no_grad()
def own_logprobs(policy: Policy, request: GenerationRequest, completion: Sequence[int]) -> Tensor:
    """Return the logprobs (N,) of a completion."""
    assert policy.vision is not None
    ids_1L = torch.tensor([[*request.prompt_token_ids, *completion]])
    given: dict[str, Any] = {}
    if request.media:
        pixels = policy.vision.read(request.media)
        given = {"pixel_values": pixels.patches_PC, "image_grid_thw": pixels.grid_I3}
        given["mm_token_type_ids"] = (ids_1L == IMAGE).int()
    # It goes on from positions of an earlier call else.
    policy.model.base_model.rope_deltas = None  # type: ignore[union-attr]
    logits_LV = policy.model(input_ids=ids_1L, use_cache=False, **given).logits[0].float()
    logits_LV[:, list(policy.head.banned)] = -torch.inf
    first = len(request.prompt_token_ids)
    logprobs_NV = logits_LV.log_softmax(-1)[first - 1 : -1]
    found: Tensor = logprobs_NV.gather(1, ids_1L[0, first:, None])[:, 0]
    return found
