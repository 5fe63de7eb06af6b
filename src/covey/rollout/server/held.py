"""The built-in engine on weights of its own, which a publish writes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from covey.checksums import checksum
from covey.models.load import tensors_by_name
from covey.models.policy import Policy
from covey.rollout.engine import NO_MEMBERS, Capabilities, NamedWeights
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.types import Completion, Finding, GenerationRequest, Receipt

_SHOWN = 3


class HeldEngine:
    """Samples from `policy`, whose weights are nobody else's. Where the model cannot run as a stream,
    `generate` of transformers samples."""

    capabilities = Capabilities(logprobs=True, noise_keys=True, holds_weights=True, swaps=True)
    members = NO_MEMBERS

    def __init__(self, policy: Policy, *, max_rows: int, tokenizer: Tokenizer | None = None) -> None:
        self._policy = policy
        kind = GenerateEngine if policy.stream == "padded" else NativeEngine
        self._engine: GenerateEngine | NativeEngine = kind(policy, max_rows=max_rows, tokenizer=tokenizer)

    @property
    def name(self) -> str:
        """Which engine it is, as `--engine` names it."""
        return "generate" if isinstance(self._engine, GenerateEngine) else "native"

    @property
    def given_up(self) -> str:
        """What the engine goes on without, and why."""
        return self._engine.given_up

    @property
    def on_turn(self) -> Callable[[], None]:
        """Called between two steps within `results`; it may submit, abort and publish."""
        return self._engine.on_turn

    @on_turn.setter
    def on_turn(self, call: Callable[[], None]) -> None:
        self._engine.on_turn = call

    @property
    def num_computed(self) -> int:
        """Tokens computed since it started."""
        return self._engine.num_computed

    def submit(self, request: GenerationRequest) -> int:
        """Queue a request."""
        return self._engine.submit(request)

    def results(self) -> Iterator[Completion]:
        """Sample until every request has ended."""
        return self._engine.results()

    def abort(self, ids: Sequence[int]) -> None:
        """End requests now."""
        self._engine.abort(ids)

    @torch.no_grad()
    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Copy the weights into the policy and read their checksums back from it.

        Raises ValueError where a name is unknown, has another shape or dtype, or is missing at the end: the
        policy then holds a mixture, which serves no version. A tied head may come under its own name or not
        at all.
        """
        held = tensors_by_name(self._policy)
        sent: list[str] = []
        for name, tensor in named_weights:
            target = held.get(name)
            if target is None:
                raise ValueError(f"the model of this server has no tensor {name}")
            if target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise ValueError(f"{name} is {_kind(target)} here, and {_kind(tensor)} was sent")
            target.copy_(tensor)
            sent.append(name)
        if missing := _missing(held, sent):
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(f"weights that were not sent: {', '.join(missing[:_SHOWN])}{more}")
        self._engine.publish(iter(()), version)
        return Receipt(version=version, fingerprints={name: checksum(held[name]) for name in sent})

    def held_base(self) -> str:
        """It takes whole weights alone."""
        return ""

    def rest(self) -> None:
        """The cache stays for the next rollout."""

    def take_notices(self) -> list[Finding]:
        """Nothing happens to it."""
        return []

    def close(self) -> None:
        """It holds no process and no connection."""


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _missing(held: Mapping[str, Tensor], sent: Sequence[str]) -> list[str]:
    """Names of which nothing was sent, nor of another name of the same tensor."""
    written = {held[name].data_ptr() for name in sent}
    return [name for name, tensor in held.items() if tensor.data_ptr() not in written]
