"""Engines that hold weights of their own, in this process: what a server or vLLM is to the publisher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.checksums import checksum
from covey.models.adapter_shapes import is_of_adapter, plain_name
from covey.models.policy import Policy
from covey.rollout.engine import Capabilities, NamedWeights
from covey.rollout.native.engine import NativeEngine
from covey.rollout.receipts import Sent
from covey.types import Completion, Finding, Finish, GenerationRequest, Receipt
from covey.types.arrays import each


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A completion as tuples of numbers, which compare and hash; one version for each token."""

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    seconds: float = field(compare=False)


def plain(completion: Completion) -> Plain:
    """A completion as tuples of numbers."""
    return Plain(
        request_id=completion.request_id,
        token_ids=tuple(completion.token_ids.tolist()),
        logprobs=tuple(completion.logprobs.tolist()),
        versions=tuple(each(completion.versions)),
        finish=completion.finish,
        seconds=completion.seconds,
    )


def sampled(
    engine: Any, requests: Sequence[GenerationRequest], then: Callable[[], object] = lambda: None
) -> list[Plain]:
    """Completions in the order of the requests, each exactly once; `then` happens after the first."""
    numbers = [engine.submit(request) for request in requests]
    found: list[Plain] = []
    for completion in engine.results():
        if not found:
            then()
        found.append(plain(completion))
    assert sorted(c.request_id for c in found) == sorted(numbers)
    by_number = {c.request_id: c for c in found}
    return [by_number[number] for number in numbers]


class CopyEngine:
    """A native engine on a copy of a policy; a publish copies every tensor into it, and reads back what is
    there. With an `adapter` off the copy, its base takes the merged weights."""

    given_up = ""

    def __init__(
        self, policy: Policy, *, dtype: torch.dtype | None = None, is_shared: bool = False, sends: bool = True
    ) -> None:
        assert policy.adapter is None, "weights are published with the adapter added"
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)
        if dtype is not None:
            self.policy.to(dtype)
        self.capabilities = Capabilities(
            logprobs=True, noise_keys=True, holds_weights=True, is_shared=is_shared, dtype=dtype
        )
        self.members: Mapping[str, CopyEngine] = {}
        self.sends = sends
        self.engine = NativeEngine(self.policy)
        self.num_publishes = 0

    def submit(self, request: GenerationRequest) -> int:
        return self.engine.submit(request)

    def results(self) -> Iterator[Completion]:
        return self.engine.results()

    def abort(self, ids: Sequence[int]) -> None:
        self.engine.abort(ids)

    def held_base(self) -> str:
        return ""

    def rest(self) -> None:
        self.engine.rest()

    def take_notices(self) -> list[Finding]:
        return []

    def close(self) -> None:
        """Nothing is held but memory."""

    def use_members(self, names: Collection[str]) -> None:
        """Nobody but the first rank asks the members."""

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Take the tensors one by one."""
        self.num_publishes += 1
        if not self.sends:
            return self.engine.publish(iter(()), version)
        for name, weight in named_weights:
            self.take(name, weight)
        self.engine.publish(iter(()), version)
        return Receipt(version=version, fingerprints=self.fingerprints())

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> None:
        """Copy one tensor into the engine's model."""
        self.held()[name].copy_(weight)

    def held(self) -> dict[str, Tensor]:
        """The tensors of the engine's model, a tied head under both names."""
        return {plain_name(n): p for n, p in self.policy.model.named_parameters(remove_duplicate=False)}

    def fingerprints(self) -> dict[str, int]:
        """What it holds now."""
        return {name: checksum(tensor) for name, tensor in self.held().items()}


class AdapterEngine(CopyEngine):
    """One that applies adapters up to a rank: it keeps their base, and samples from the sum."""

    name = "adapters"

    def __init__(self, policy: Policy, rank: int = 8) -> None:
        super().__init__(policy)
        self.capabilities = replace(self.capabilities, adapter_rank=rank)
        self.base: dict[str, Tensor] = {}
        self.matrices: dict[str, Tensor] = {}
        self.given: list[str] = []

    @property
    def num_computed(self) -> int:
        """Tokens since it started."""
        return self.engine.num_computed

    @property
    def on_turn(self) -> Callable[[], None]:
        """Called between two steps, as a server asks it."""
        return self.engine.on_turn

    @on_turn.setter
    def on_turn(self, call: Callable[[], None]) -> None:
        self.engine.on_turn = call

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Take a base, matrices, or both; ValueError where there is no base for them."""
        self.num_publishes += 1
        weights = list(named_weights)
        self.given = [name for name, _ in weights]
        if not is_of_adapter(self.given[0]):
            self.base = {}
        elif not self.base:
            raise ValueError("there is no base")
        self.base |= {n: t.clone() for n, t in weights if not is_of_adapter(n)}
        self.use({n: t.clone() for n, t in weights if is_of_adapter(n)})
        self.engine.publish(iter(()), version)
        return Receipt(version=version, fingerprints=self.fingerprints())

    def use(self, matrices: dict[str, Tensor]) -> None:
        """Sample with another adapter from now on."""
        self.matrices = matrices
        for name, weight in self.base.items():
            self.take(name, weight + self.update(name))

    def update(self, name: str) -> Tensor | float:
        """What the adapter adds to a weight."""
        at = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (self.matrices.get(f"{at}.lora_{kind}.weight") for kind in "AB")
        return 0.0 if a is None or b is None else b @ a

    def fingerprints(self) -> dict[str, int]:
        """Of base and matrices as it holds them."""
        return {name: checksum(tensor) for name, tensor in {**self.base, **self.matrices}.items()}

    def held_base(self) -> str:
        """As of what it was sent."""
        own = {name: checksum(tensor) for name, tensor in self.base.items()}
        return Sent(version=0, fingerprints=own).digest if own else ""


class Fleet(CopyEngine):
    """Several engines behind one, each of which is sent every tensor."""

    def __init__(self, members: Mapping[str, CopyEngine]) -> None:
        first = next(iter(members.values()))
        self.capabilities, self.members = replace(first.capabilities, is_shared=True), members
        self.engine, self.policy = first.engine, first.policy
        self.num_publishes = 0

    def publish(self, named_weights: NamedWeights, version: int) -> Receipt:
        """Each tensor to each of them."""
        weights = list(named_weights)
        receipts = {name: engine.publish(iter(weights), version) for name, engine in self.members.items()}
        return Receipt(version=version, members=receipts)

    def held_base(self) -> str:
        """What all of them hold."""
        held = {engine.held_base() for engine in self.members.values()}
        return held.pop() if len(held) == 1 else ""
