"""Engines that hold weights of their own, in this process: what a server or vLLM is to the publisher."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from covey.checksums import checksum
from covey.models.lora import plain_name
from covey.models.policy import Policy
from covey.rollout.engine import Capabilities, NamedWeights
from covey.rollout.native.engine import NativeEngine
from covey.types import Completion, Finding, GenerationRequest, Receipt


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
