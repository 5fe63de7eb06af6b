"""Small models of random weights whose towers take squares, Gemma 3 and SmolVLM2, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from covey.media.sizes import ImageLimits
from covey.models.policy import Policy
from covey.models.vision.tower import Pixels
from covey.token_streams import Row
from covey.types import Medium
from support.vision import IMAGE as IMAGE
from support.vision import START, TEMPLATE, VOCAB, hash_of, logprobs_in, random_model, row_of, save_text_files

FAMILIES = ("gemma3", "smolvlm")
OPENS, CLOSES = 320, 321
"""The ids around an image of Gemma 3."""

SIDE, PATCH, TOKENS = 16, 4, 4
LIMITS = {
    "gemma3": ImageLimits(PATCH, 2, 1, SIDE**2, SIDE**2, SIDE),
    "smolvlm": ImageLimits(PATCH, 2, 1, (3 * SIDE) ** 2, (3 * SIDE) ** 2, SIDE),
}
MARKS = {
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "smolvlm": ["<fake_token_around_image>", "<global-img>", "<image>"]
    + [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)],
}
_OF_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
_IF_TEXT = "{%- if message.content is string %}{{ message.content }}{% else %}"
# As those of the families do: Gemma's takes texts and blocks, SmolVLM's blocks alone.
TEMPLATES = {
    "gemma3": TEMPLATE.replace(_OF_QWEN, "<start_of_image>"),
    "smolvlm": TEMPLATE.replace(_OF_QWEN, "<image>").replace(_IF_TEXT, "{%- if true %}"),
}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 315,
    "eos_token_id": 314,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def config_of(family: str) -> Any:
    """Return the configuration of a small model. The window of Gemma's is shorter than its prompts."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"patch_size": PATCH, "image_size": SIDE}
    if family == "smolvlm":
        text: dict[str, Any] = {**_TEXT, "model_type": "llama"}
        return AutoConfig.for_model(
            family, text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2
        )
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return AutoConfig.for_model(
        family,
        text_config={**_TEXT, "sliding_window": 6, "layer_types": layers},
        vision_config={**vision, "vision_use_head": False},
        mm_tokens_per_image=TOKENS,
        image_token_index=IMAGE,
        boi_token_index=OPENS,
        eoi_token_index=CLOSES,
        tie_word_embeddings=False,
    )


def save_model(family: str, directory: Path, seed: int = 1) -> Path:
    """Save a random model with the built-in tokenizer, a template and an image processor beside it."""
    random_model(config_of(family), seed).save_pretrained(directory)
    if family == "gemma3":
        processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    else:
        processor = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 3 * SIDE}}
        processor |= {"max_image_size": {"longest_edge": SIDE}}
    # The tokenizer has each id that such a model may sample.
    others = [f"<unused{number}>" for number in range(START + len(MARKS[family]), VOCAB)]
    return save_text_files(directory, [*MARKS[family], *others], TEMPLATES[family], processor)


def medium(family: str, key: str, down: int = 1, across: int = 1) -> Medium:
    """Return an image of so many squares."""
    limits, patches = LIMITS[family], SIDE // PATCH
    grid = (1, down * patches, across * patches)
    return Medium(key=key, token_id=IMAGE, num_tokens=limits.num_tokens(grid), grid=grid, extent=None)


def pixels_of(media: Sequence[Medium]) -> Pixels:
    """Return random squares, the same for the same key."""
    squares = [
        torch.randn(one.num_tokens // TOKENS, 3, SIDE, SIDE, generator=generator)
        for one in media
        for generator in [torch.Generator().manual_seed(hash_of(one.key))]
    ]
    return Pixels(torch.cat(squares), torch.tensor([one.grid for one in media]))


def policy_of(family: str, seed: int = 1) -> Policy:
    """Return a policy that sees such images."""
    policy = Policy(random_model(config_of(family), seed), stream="padded")
    assert policy.vision is not None
    policy.vision.read = pixels_of
    return policy


def squares_seen(policy: Policy) -> list[int]:
    """Return a list that is given the number of squares of each pass through the tower from now on."""
    assert policy.vision is not None
    seen: list[int] = []
    tower = policy.vision.towers(policy.model)[0]
    tower.register_forward_hook(lambda module, given, out: seen.append(len(out.last_hidden_state)))
    return seen


def row(parts: Sequence[int | Medium], completion: Sequence[int], key: str) -> Row:
    """Return a row of a prompt of ids and images with a trained completion behind it."""
    ids: list[int] = []
    for part in parts:
        # Another token stands between the squares of an image.
        runs = [] if isinstance(part, int) else [[*[IMAGE] * TOKENS, 15]] * (part.num_tokens // TOKENS)
        ids += [part] if isinstance(part, int) else [OPENS, *(i for run in runs for i in run), CLOSES]
    return row_of(ids, parts, completion, key)


def own_logprobs(policy: Policy, one: Row) -> Tensor:
    """Return the logprobs (N,) of the trained tokens of a row by the model's own forward pass from pixels."""
    policy.use_stream("padded")
    ids_1L = torch.tensor([one.token_ids.tolist()])
    is_gemma = policy.model.config.model_type == "gemma3"  # type: ignore[union-attr]
    given: dict[str, Any] = {"token_type_ids": (ids_1L == IMAGE).int()} if is_gemma else {}
    if one.media:
        assert policy.vision is not None
        squares = policy.vision.read(one.media).patches_PC
        given["pixel_values"] = squares if is_gemma else squares[None]
    logit_LV = policy.model(input_ids=ids_1L, use_cache=False, **given).logits[0].float().clone()
    return logprobs_in(logit_LV, policy, one)
