"""The memory of seeing: pixels, and what the vision tower works with and keeps.

A tower is a transformer over patches, each of which attends within its window or its image. An image is
encoded once a pass, whatever completions share it.
"""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.activations import FLOAT, PREFILL_TOKENS, Training, fullest_pass
from covey.plan.facts import Facts, VisionSizes
from covey.plan.memory_rollout import requests_of


def seeing_parts(config: Config, facts: Facts, how: Training, phase: str) -> dict[str, int]:
    """Return what the vision tower works with and keeps in a phase, by part; nothing without images."""
    model, prompt = facts.model.sizes, facts.prompts.longest
    if model is None or model.vision is None or not facts.prompts.most_patches or prompt is None:
        return {}
    group = max(1, config.num_generations)
    if phase == "rollout":
        # The built-in engine reads prompts up to so many tokens at once.
        asked = max((prompts for _, prompts in requests_of(config, facts)), default=1)
        prompts = max(1, min(asked, PREFILL_TOKENS // max(1, prompt)))
    elif phase in ("annotate", "update"):
        prompts = max(1, fullest_pass(config, facts, prompt).trained // (group * config.most_tokens))
    else:
        return {}
    patches = prompts * facts.prompts.most_patches
    kept = 0
    if phase == "update" and _trains_tower(facts):
        kept = kept_seeing_bytes(model.vision, patches, how)
    return {"images": kept + seeing_bytes(model.vision, patches, how)}


def seeing_bytes(vision: VisionSizes, patches: int, how: Training) -> int:
    """Return the most that a pass over so many patches takes of which nothing is kept."""
    e, hidden = how.element, vision.hidden
    # Queries and keys are turned in float32.
    attention = (4 * hidden + 3 * hidden) * e + 4 * hidden * FLOAT
    layer = max(attention, (2 * hidden + 3 * vision.intermediate) * e + hidden * FLOAT)
    return patches * (vision.patch_numbers * (FLOAT + e) + layer + vision.features * e)


def kept_seeing_bytes(vision: VisionSizes, patches: int, how: Training) -> int:
    """Return what is held of the tower for the backward pass where it is trained: of each layer the inputs of
    its norms and what they give, queries, keys and values, and the outputs of its MLP; with recomputation the
    input of each layer alone. Measured: 0.95 to 1.05 of it."""
    e, hidden = how.element, vision.hidden
    if how.recompute != "none":
        per_layer = hidden * e
    else:
        norms = 2 * hidden * (2 * FLOAT + e if vision.is_gated else 2 * e)
        mlp = (4 if vision.is_gated else 2 if vision.is_siglip else 3) * vision.intermediate * e
        per_layer = norms + (4 if vision.is_siglip else 2 + 3 + 2) * hidden * e + FLOAT * vision.heads + mlp
    merger = (hidden + 2 * vision.features) * e + hidden * FLOAT
    return patches * (vision.depth * per_layer + merger)


def _trains_tower(facts: Facts) -> bool:
    """Return whether a gradient goes back through the tower."""
    return any(part.part != "llm" and part.is_trained for part in facts.model.parts)
