"""The interface of a rollout engine: tokens in, tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from covey.types import Completion, GenerationRequest, Receipt

if TYPE_CHECKING:
    from torch import Tensor

NamedWeights = Iterator[tuple[str, "Tensor"]]
"""A model's weights by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do; `noise_keys` says that the same key draws the same completion whatever its
    batch, `holds_weights` that it samples from a copy of the weights, which is as old as the last publish."""

    logprobs: bool
    noise_keys: bool
    holds_weights: bool = False


class Engine(Protocol):
    """Samples completions. Groups, environments and rewards are built on it in `collect`, once for all
    engines."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def given_up(self) -> str:
        """What the engine goes on without, and why; empty where nothing failed."""
        ...

    def submit(self, request: GenerationRequest) -> int:
        """Take a request and return its id; nothing is computed yet."""
        ...

    def results(self) -> Iterator[Completion]:
        """Run until nothing is left, giving each completion as it ends."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """End requests now; what they have comes from `results` with finish `abort`."""
        ...

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Serve these weights as `version` from now on; every sampled token carries it.

        `named_weights` gives tensors under transformers' names, gathered one by one as they are asked for; an
        engine on the learner's own weights asks for none.
        """
        ...

    def rest(self) -> None:
        """Called when a rollout or an evaluation is over: an engine that is built to rest frees its memory
        for what follows."""
        ...
