"""Faults of images: what a sampler or a learner sees of them, and where their tokens stand.

They are planted into runs of the built-in model, one of Qwen2.5-VL, and of small models of random weights of
Gemma 3 and SmolVLM2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from covey import token_streams
from covey.models.vision import squares, tower
from covey.rollout import single_turns
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.types import Completion, GenerationRequest, TokenSequence
from mutants.faults import Patch, Plant, before, changed
from mutants.harness import Mutant

SIZES = {
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 8,
    "max_tokens_per_micro_batch": 1000,
}
SHAPES = {
    **SIZES,
    "model": "quickstart-shapes",
    "dataset": ["quickstart-shapes#64"],
    "reward_funcs": ["accuracy"],
}
FAMILIES = ("gemma3", "smolvlm")


def _engine(family: str) -> Any:
    """What samples a family."""
    return GenerateEngine if family == "gemma3" else NativeEngine


def _drops(family: str) -> Plant:
    """A request arrives without its images."""
    return before(_engine(family), "submit", lambda self, request: (self, replace(request, media=())))


def _of_another(patch: Patch) -> None:
    """One of a group is recorded with the image of another prompt."""
    real, seen = TokenSequence.of_turn.__func__, []  # type: ignore[attr-defined]

    def of_turn(cls: Any, ids: Any, drawn: Completion, media: Any = ()) -> Any:
        others = [own for own in seen if own != media and own[0].grid == media[0].grid]
        seen.append(media)
        return real(cls, ids, drawn, others[0] if others else media)

    patch.setattr(single_turns.TokenSequence, "of_turn", classmethod(of_turn))


def _positions_of_text(found: Any, *args: Any) -> Any:
    """Positions count on by one, also within images."""
    return replace(found, positions_T=found.positions_T[0] * 0 + _counted(args[2]))


def _counted(column_T: Any) -> Any:
    import torch

    return torch.from_numpy(column_T)


def _samples_a_placeholder(family: str) -> Plant:
    """The first token of a completion stands for an image."""

    def change(done: Completion, self: Any, first: Any, second: Any, *others: Any) -> Completion:
        request = second if family == "gemma3" else first.request
        ids = done.token_ids.copy()
        ids[0] = request.media[0].token_id
        return replace(done, token_ids=ids)

    return changed(_engine(family), "_completion", change)


def _one_prefix(patch: Patch) -> None:
    """Prompts of equal tokens are read once, whatever their images are."""
    first: dict[Any, Any] = {}

    def prefix(self: GenerationRequest) -> Any:
        return self.prompt_token_ids, first.setdefault(self.prompt_token_ids, self.media)

    patch.setattr(GenerationRequest, "prefix", property(prefix))


def _dim(found: Any, self: Any, *args: Any) -> Any:
    """The learner sees half as much."""
    import torch

    features_FD, deep = found
    return (features_FD * 0.5 if torch.is_grad_enabled() else features_FD), deep


def _as_text(found: dict[str, Any], *args: Any) -> dict[str, Any]:
    """The learner masks the tokens of an image like those of a text."""
    import torch

    return {name: kinds * (not torch.is_grad_enabled()) for name, kinds in found.items()}


def _keeps_features(patch: Patch) -> None:
    """What samples keeps the features of images from one rollout to the next."""
    import torch

    real, kept = tower.Vision._features, dict[bytes, Any]()

    def features(self: Any, backbone: Any, pixels: Any, device: Any) -> Any:
        found, key = real(self, backbone, pixels, device), pixels.patches_PC.numpy().tobytes()
        return found if torch.is_grad_enabled() else kept.setdefault(key, found)

    patch.setattr(tower.Vision, "_features", features)


# Runs of the built-in model in which some pictures of one size are asked the same, and one that has the same
# four in each rollout.
_MANY = {**SHAPES, "dataset": ["quickstart-shapes#512"], "per_device_train_batch_size": 128}
_FEW = {**SHAPES, "dataset": ["quickstart-shapes#4"], "dataset_shuffle": False}


def _planted(
    name: str,
    code: str,
    step: int,
    plant: Callable[[str], Plant],
    says: str = "",
    shapes: Mapping[str, Any] = SHAPES,
    **options: Any,
) -> Iterator[Mutant]:
    """The same fault in runs of each family with these options; `shapes` are those of the built-in model."""
    yield Mutant(name, code, step, plant(""), {**shapes, **options}, says)
    for family in FAMILIES:
        own = {**SIZES, **options}
        yield Mutant(f"{name} of {family}", code, step, plant(family), own, says, family=family)


MUTANTS = (
    *_planted("drops images on the wire", "F115", 1, _drops),
    *_planted("swaps an image within a group", "F112", 1, lambda _: _of_another, "different prompts"),
    *_planted("samples a placeholder", "F110", 0, _samples_a_placeholder, "never to be sampled"),
    *_planted("trains blindly", "F115", 1, lambda _: changed(tower.Vision, "_features", _dim)),
    *_planted(
        "keeps features of former weights",
        "F115",
        2,
        lambda _: _keeps_features,
        shapes=_FEW,
        learning_rate=3e-3,
    ),
    Mutant(
        "counts positions of images as text",
        "F110",
        1,
        changed(token_streams, "media_stream", _positions_of_text),
        SHAPES,
        "positions",
    ),
    Mutant("shares the prefill of another image", "F115", 1, _one_prefix, _MANY),
    # Rows of Gemma share no prefill.
    Mutant("shares the prefill of another image of smolvlm", "F115", 1, _one_prefix, SIZES, family="smolvlm"),
    Mutant(
        "masks an image like text",
        "F115",
        1,
        changed(squares.GemmaVision, "beside_text", _as_text),
        SIZES,
        family="gemma3",
    ),
)
