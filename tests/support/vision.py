"""Small vision language models of random weights, rows with images, and the model's own forward pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from covey.models.policy import Policy
from covey.models.prefix import share_prompt
from covey.models.probe import micro_of
from covey.models.vision.tower import Pixels
from covey.quickstart.task import MODEL_DIR
from covey.token_streams import Row
from covey.types import Medium
from covey.types.arrays import bools, ints

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VOCAB = 336
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = 320, 321, 322, 323
"""The ids around an image, and those that stand for one and for a video: of `MARKS`."""

TEMPLATE = """{% macro content(message) %}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}{% endmacro %}
{%- if tools %}{{ '<|im_start|>system\nTools:\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call><|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content(message) + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + content(message) }}
{%- for call in message.tool_calls or [] %}
{{- '\n' if loop.index > 1 or content(message) else '' }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""A template that writes images as those of Qwen do."""

_PATCH, _MERGE = 4, 2
_TEXT = {
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 315,
    "eos_token_id": 314,
    "bos_token_id": None,
}


def config_of(family: str, head: int = 16) -> Any:
    """Return the configuration of a small model, whose heads have this width; vLLM's build for CPUs takes
    none below 32."""
    width = head * _TEXT["num_attention_heads"]
    parts = [head // 8, 3 * head // 16, 3 * head // 16]
    sections = {"rope_type": "default", "mrope_section": parts, "rope_theta": 10000.0}
    text = {**_TEXT, "hidden_size": width, "rope_parameters": sections}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": _PATCH, "temporal_patch_size": 2}
    vision |= {"in_channels": 3, "in_chans": 3, "spatial_merge_size": _MERGE}
    match family:
        case "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": width, "mlp_ratio": 2}
        case "qwen2_5_vl":
            vision |= {"hidden_size": 32, "out_hidden_size": width, "intermediate_size": 48}
            vision |= {"window_size": 16}
            vision |= {"fullatt_block_indexes": [1]}
        case "qwen3_vl":
            text |= {"head_dim": head, "rope_parameters": {**sections, "mrope_interleaved": True}}
            vision |= {"hidden_size": 32, "out_hidden_size": width, "intermediate_size": 48}
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def model_of(family: str, seed: int = 1, head: int = 16) -> Any:
    """Return a model of random weights, large enough that images matter."""
    return random_model(config_of(family, head), seed)


def random_model(config: Any, seed: int) -> Any:
    """Return a model of a configuration, with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.any():
                parameter.mul_(4.0)
            elif parameter.dim() > 1:
                # transformers leaves the projection of Gemma's features at zero.
                parameter.normal_(std=0.3)
    return model


def save_model(family: str, directory: Path, seed: int = 1, head: int = 16) -> Path:
    """Save a random model with the built-in tokenizer, a template and an image processor beside it."""
    model_of(family, seed, head).save_pretrained(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": _PATCH,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": 4096,
    }
    return save_text_files(directory, MARKS, TEMPLATE, processor)


def save_text_files(
    directory: Path, marks: Sequence[str], template: str, processor: Mapping[str, Any]
) -> Path:
    """Save the built-in tokenizer with further `marks`, from START on, a template and an image processor."""
    tokenizer = json.loads((MODEL_DIR / "tokenizer.json").read_text("utf-8"))
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [{**last, "id": START + n, "content": mark} for n, mark in enumerate(marks)]
    written = {
        "tokenizer.json": tokenizer,
        "preprocessor_config.json": {**processor, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "generation_config.json": {"eos_token_id": 314, "pad_token_id": 315},
    }
    for name, content in written.items():
        (directory / name).write_text(json.dumps(content), "utf-8")
    (directory / "tokenizer_config.json").write_text((MODEL_DIR / "tokenizer_config.json").read_text("utf-8"))
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    return directory


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (24, 16)) -> bytes:
    """Return a PNG file of a picture that no other colour and size has."""
    width, height = size
    shade = np.linspace(0, 1, width * height * 3).reshape(height, width, 3)
    file = BytesIO()
    Image.fromarray((shade * np.array(colour)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def medium(key: str, rows: int, columns: int) -> Medium:
    """Return an image of so many placeholders down and across."""
    grid = (1, rows * _MERGE, columns * _MERGE)
    return Medium(key=key, token_id=IMAGE, num_tokens=rows * columns, grid=grid, extent=(1, rows, columns))


def pixels_of(media: Sequence[Medium]) -> Pixels:
    """Return random patches, the same for the same key."""
    patches = [
        torch.randn(int(np.prod(one.grid)), 3 * 2 * _PATCH**2, generator=generator)
        for one in media
        for generator in [torch.Generator().manual_seed(hash_of(one.key))]
    ]
    return Pixels(torch.cat(patches), torch.tensor([one.grid for one in media]))


def hash_of(key: str) -> int:
    """Return a number of a key, the same in every process."""
    return int.from_bytes(key.encode(), "little") % (1 << 31)


def policy_of(family: str, seed: int = 1, stream: Any = "prefix", head: int = 16) -> Policy:
    """Return a policy that sees such images."""
    policy = Policy(model_of(family, seed, head), stream=stream)
    assert policy.vision is not None
    policy.vision.read = pixels_of
    return policy


def row(parts: Sequence[int | Medium], completion: Sequence[int], key: str = "a") -> Row:
    """Return a row of a prompt of ids and images with a trained completion behind it."""
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else _written(part))]
    return row_of(ids, parts, completion, key)


def row_of(ids: Sequence[int], parts: Sequence[int | Medium], completion: Sequence[int], key: str) -> Row:
    """Return the row of a prompt's tokens."""
    return Row(
        token_ids=ints([*ids, *completion]),
        is_trained=bools([False] * len(ids) + [True] * len(completion)),
        prompt_length=len(ids),
        prompt_key=key,
        media=tuple(part for part in parts if isinstance(part, Medium)),
    )


def _written(medium: Medium) -> list[int]:
    return [START, *[IMAGE] * medium.num_tokens, END]


def own_logits(policy: Policy, one: Row) -> Tensor:
    """Return the logits (L, V) of a row by the model's own forward pass from pixels, positions and all."""
    policy.use_stream("padded")
    ids_1L = torch.tensor([one.token_ids.tolist()])
    given: dict[str, Any] = {}
    if one.media:
        assert policy.vision is not None
        pixels = policy.vision.read(one.media)
        given = {"pixel_values": pixels.patches_PC, "image_grid_thw": pixels.grid_I3}
        given["mm_token_type_ids"] = (ids_1L == IMAGE).int()
    return policy.model(input_ids=ids_1L, use_cache=False, **given).logits[0].float().clone()


def own_logprobs(policy: Policy, one: Row) -> Tensor:
    """Return the logprobs (N,) of the trained tokens of a row in the same way; nothing is left for tokens
    that are banned."""
    return logprobs_in(own_logits(policy, one), policy, one)


def logprobs_in(logit_LV: Tensor, policy: Policy, one: Row) -> Tensor:
    """Return the logprobs (N,) of the trained tokens of a row by its logits."""
    logit_LV[:, list(policy.head.banned)] = float("-inf")
    logprob_LV = logit_LV.log_softmax(-1)
    place_N = torch.from_numpy(np.flatnonzero(one.is_trained))
    token_N = torch.from_numpy(one.token_ids.astype(np.int64))[place_N]
    return logprob_LV[place_N - 1].gather(1, token_N[:, None])[:, 0]


def gradients(
    policy: Policy, kind: Any, cut: Sequence[Sequence[Row]], *, shares: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of logprobs, of rows that are cut so into passes, by name."""
    policy.use_stream(kind)
    policy.shares_prompts = shares
    policy.zero_grad()
    micros = [micro_of(part, kind, policy.device) for part in cut]
    for micro in share_prompt(micros) if shares else micros:
        logprob_N = policy(micro).logprob_N
        (logprob_N * torch.arange(1.0, 1.0 + len(logprob_N))).sum().backward()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
