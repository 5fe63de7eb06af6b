"""What vLLM samples from prompts with images for a small model: `images_program.py FAMILY FOUND.json`.

A process of its own, so that it may find a stand-in for torchvision.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from covey.checksums import checksum
from covey.data.vision import VisionSpec
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_adapted, load_policy
from covey.models.lora import adapter_weights, base_weights, plain_weights
from covey.models.policy import Policy
from covey.models.vision.pixels import PixelReader
from covey.rollout.vllm import library
from covey.rollout.vllm.engine import VllmEngine
from covey.types import Completion, GenerationRequest, Medium, Receipt
from support.engines import plain, sampled
from support.image_requests import (
    BLUE,
    RED,
    image_of,
    own_gap,
    own_logprobs,
    request_of,
    requests_with_images,
    spec_of,
)
from support.vision import save_model
from support.vllm_learner import settings

CPU = torch.device("cpu")
# vLLM's build for CPUs takes no narrower heads.
HEAD = 32
RANK = 4
LIMITS = {"image": 1, "video": 0}


def started(directory: Path, policy: Policy, **changes: Any) -> VllmEngine:
    assert policy.vision is not None
    policy.vision.read = PixelReader(directory)
    given = settings(model=str(directory), media_limits=LIMITS, **changes)
    return VllmEngine(given, read=policy.vision.read)


def published(engine: VllmEngine, policy: Policy, version: int) -> dict[str, Any]:
    """What the receipt says of all tensors, and how many of the vision tower it has checksums of."""
    given = dict(plain_weights(policy))
    receipt = engine.publish(iter(given.items()), version)
    return {
        "agrees": agrees(receipt, given),
        "read": sum(".visual." in name for name in receipt.fingerprints),
        "unread biases": sum(not name.endswith("weight") for name in receipt.unread),
    }


def agrees(receipt: Receipt, given: dict[str, torch.Tensor]) -> bool:
    """Whether every tensor that was read back is the one that was sent, and no name is missing."""
    is_named = receipt.fingerprints.keys() | set(receipt.unread) == given.keys()
    return is_named and all(checksum(given[n]) == c for n, c in receipt.fingerprints.items())


def change_tower(policy: Policy) -> None:
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "visual" in name and parameter.dim() > 1:
                parameter.mul_(1.3)


def swapped(request: GenerationRequest, image: Medium) -> GenerationRequest:
    """The same prompt with another image in the place of its one."""
    return replace(request, media=(image,)) if len(request.media) == 1 else request


def of_one_text(policy: Policy, spec: VisionSpec, is_mistaken: bool = False) -> list[GenerationRequest]:
    """Prompts of several blocks of the cache that differ in the image alone; under the key of the other one,
    where they are mistaken for each other."""
    red, blue = image_of(spec, RED), image_of(spec, BLUE)
    blue = replace(blue, key=red.key) if is_mistaken else blue
    return [request_of(policy, [5, one, *[6] * 70, 7], 20 + n) for n, one in enumerate((red, blue))]


def mistaken_gap(engine: VllmEngine, policy: Policy, spec: VisionSpec) -> float:
    """The gap where the keys of two images are equal: vLLM goes by them."""
    done = sampled(engine, of_one_text(policy, spec, is_mistaken=True))
    return own_gap(policy, of_one_text(policy, spec), done)


def while_running(engine: VllmEngine, policy: Policy, asked: Sequence[GenerationRequest]) -> float:
    """The gap of tokens behind a publish, of requests that run meanwhile."""
    longer = [replace(r, sampling=replace(r.sampling, max_new_tokens=40, stop_token_ids=())) for r in asked]
    numbers = [engine.submit(request) for request in longer]
    for _ in range(7):
        assert not engine.step()
    change_tower(policy)
    published(engine, policy, 3)
    done = {one.request_id: one for one in engine.results()}
    stream = policy.stream
    policy.use_stream("padded")
    gaps = [tail_gap(policy, r, done[number]) for r, number in zip(longer, numbers, strict=True)]
    policy.use_stream(stream)
    return max(gaps)


def tail_gap(policy: Policy, request: GenerationRequest, completion: Completion) -> float:
    (_, before), (version, _) = completion.versions
    assert version == 3 and before >= 1
    one = plain(completion)
    gap_N = (own_logprobs(policy, request, one.token_ids) - torch.tensor(one.logprobs)).abs()
    return float(gap_N[before:].max())


def stale(engine: VllmEngine, policy: Policy, asked: Sequence[GenerationRequest]) -> Any:
    """The gap, or the error, where a publish leaves the features of the former tower."""
    engine._llm.llm_engine.reset_encoder_cache = lambda: None
    change_tower(policy)
    published(engine, policy, 4)
    return outcome(lambda: own_gap(policy, asked, sampled(engine, asked)))


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except RuntimeError as error:
        return str(error)


def of_all(family: str, directory: Path) -> dict[str, Any]:
    """A policy trained whole."""
    policy = load_policy(directory, device=CPU, disable_dropout=True).eval()
    engine = started(directory, policy)
    spec = spec_of(directory)
    asked = requests_with_images(policy, spec, directory)
    found: dict[str, Any] = {"first": published(engine, policy, 0)}
    done = sampled(engine, asked)
    found["gap"] = own_gap(policy, asked, done)
    found["without"] = own_gap(policy, asked[-2:], done[-2:])
    again = sampled(engine, asked)
    found["again"] = (
        own_gap(policy, asked, again),
        [p.token_ids for p in again] == [p.token_ids for p in done],
    )
    blue = image_of(spec, BLUE)
    found["swapped"] = own_gap(policy, [swapped(r, blue) for r in asked[:2]], done[:2])
    found["one text"] = own_gap(policy, (alike := of_one_text(policy, spec)), sampled(engine, alike))
    found["mistaken"] = mistaken_gap(engine, policy, spec)
    change_tower(policy)
    found["former tower"] = own_gap(policy, asked, done)
    found["second"] = published(engine, policy, 1)
    found["gap of the second"] = own_gap(policy, asked, sampled(engine, asked))
    found["while running"] = while_running(engine, policy, asked)
    found["stale"] = stale(engine, policy, asked)
    engine.close()
    return found


def of_adapter(directory: Path) -> dict[str, Any]:
    """An adapter on the language model, which vLLM applies."""
    policy = load_adapted(
        directory,
        LoraSettings(rank=RANK, alpha=6, frozen=frozenset(("vit", "aligner"))),
        adapter=None,
        seed=0,
        compute_dtype=torch.float32,
        device=CPU,
        disable_dropout=True,
    ).eval()
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.2)
    engine = started(directory, policy, lora_rank=RANK)
    assert policy.adapter is not None
    named = dict(policy.model.named_parameters())
    matrices = dict(adapter_weights(named.items(), policy.adapter.settings.scaling, torch.float32))
    given = {**dict(base_weights(named.items())), **matrices}
    receipt = engine.publish(iter(given.items()), 0)
    asked = requests_with_images(policy, spec_of(directory), directory)
    found = {
        "agrees": agrees(receipt, given),
        "matrices": len(matrices),
        "read": len(matrices.keys() & receipt.fingerprints.keys()),
        "gap": own_gap(policy, asked, sampled(engine, asked)),
    }
    engine.close()
    return found


def of_raw_pixels(directory: Path) -> Any:
    """What a vLLM says that would normalize pixels."""
    given = library.arguments_of

    def arguments(own: Any) -> dict[str, Any]:
        return {**given(own), "mm_device_do_normalize": True}

    library.arguments_of = arguments
    return outcome(lambda: VllmEngine(settings(model=str(directory), media_limits=LIMITS)))


def main(family: str, path: Path) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = save_model(family, Path(folder), head=HEAD)
        found = {
            "all": of_all(family, directory),
            "adapter": of_adapter(directory),
            "raw": of_raw_pixels(directory),
        }
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
