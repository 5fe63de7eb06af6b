"""Faults of images: what a sampler or a learner sees of them, and where their tokens stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from covey import token_streams
from covey.models.vision import tower
from covey.rollout import single_turns
from covey.rollout.native import engine
from covey.types import Completion, GenerationRequest, TokenSequence
from mutants.faults import Patch, before, changed
from mutants.harness import Mutant

SEEN = {
    "model": "quickstart-shapes",
    "dataset": ["quickstart-shapes#64"],
    "reward_funcs": ["accuracy"],
    "num_generations": 4,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 8,
    "max_tokens_per_micro_batch": 1000,
}


def _drops(patch: Patch) -> None:
    """A request arrives without its images."""
    before(engine.NativeEngine, "submit", lambda self, request: (self, replace(request, media=())))(patch)


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


def _samples_a_placeholder(patch: Patch) -> None:
    """The first token of a completion stands for an image."""
    real = engine.NativeEngine._completion

    def completion(self: Any, row: Any, finish: Any) -> Any:
        done = real(self, row, finish)
        ids = done.token_ids.copy()
        ids[0] = row.request.media[0].token_id
        return replace(done, token_ids=ids)

    patch.setattr(engine.NativeEngine, "_completion", completion)


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


# Some of them ask the same of pictures of one size.
_MANY = {"dataset": ["quickstart-shapes#512"], "per_device_train_batch_size": 128}

MUTANTS = (
    Mutant("drops images on the wire", "F115", 1, _drops, SEEN),
    Mutant("swaps an image within a group", "F112", 1, _of_another, SEEN, "different prompts"),
    Mutant(
        "counts positions of images as text",
        "F110",
        1,
        changed(token_streams, "media_stream", _positions_of_text),
        SEEN,
        "positions",
    ),
    Mutant("samples a placeholder", "F110", 0, _samples_a_placeholder, SEEN, "never to be sampled"),
    Mutant("shares the prefill of another image", "F115", 1, _one_prefix, {**SEEN, **_MANY}),
    Mutant("trains blindly", "F115", 1, changed(tower.Vision, "_features", _dim), SEEN),
)
