"""The built-in model as a learner, requests for it, and the settings of a vLLM beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.checksums import checksum
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.settings import VllmSettings
from covey.types import Completion, GenerationRequest, Receipt, SamplingParams, TurnId
from support.engines import Plain, sampled


def settings(**changes: Any) -> VllmSettings:
    """Those of the built-in model, with blocks of 32 tokens."""
    given = {"model": str(task.MODEL_DIR), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 16}
    given |= {"on_gpu": False, "cache_bytes": 64 << 20, "enforce_eager": True, "extra": {"block_size": 32}}
    return VllmSettings(**{**given, **changes})


def request_of(prompt: Sequence[int], sibling: int = 0, **changes: Any) -> GenerationRequest:
    """A request of some prompt, with noise of its own for each sibling."""
    sampling = {"temperature": 0.7, "max_new_tokens": 12, "stop_token_ids": ()} | changes
    return GenerationRequest(
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=sibling),
    )


def prompts(number: int = 6) -> list[list[int]]:
    """Prompts of lengths from 5 to 70 tokens: some of more than a block."""
    draw = random.Random(3)
    return [[draw.randrange(300) for _ in range(5 + 13 * i)] for i in range(number)]


@dataclass
class Learner:
    """Weights by name, and what they say of a completion."""

    policy: Policy
    given: dict[str, Tensor]

    def weights(self, *without: str) -> Iterator[tuple[str, Tensor]]:
        """All weights but some."""
        return ((n, t) for n, t in self.given.items() if n not in without)

    def changed(self, seed: int) -> Learner:
        """The same model with other weights."""
        generator = torch.Generator().manual_seed(seed)
        noise = {n: 0.02 * torch.randn(t.shape, generator=generator) for n, t in self.given.items()}
        return Learner(self.policy, {n: t + noise[n] for n, t in self.given.items()})

    def gap(self, request: GenerationRequest, completion: Completion | Plain) -> float:
        """The largest difference of the engine's log-probabilities from these weights'."""
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
        before = len(request.prompt_token_ids)
        tied = {"lm_head.weight": self.given["model.embed_tokens.weight"]}
        with torch.no_grad():
            out = torch.func.functional_call(self.policy.model, {**self.given, **tied}, (ids,))
        logits_NV = out.logits[0, before - 1 : -1].float() / request.sampling.temperature
        logprob_N = logits_NV.log_softmax(-1).gather(1, ids[0, before:, None])[:, 0]
        return float((logprob_N - torch.tensor(completion.logprobs)).abs().max())

    def gaps(self, engine: VllmEngine, requests: Sequence[GenerationRequest]) -> float:
        """The largest over all that the engine samples."""
        return max(self.gap(r, c) for r, c in zip(requests, sampled(engine, requests), strict=True))

    def agrees_with(self, receipt: Receipt) -> bool:
        """Whether every tensor that was read back is the one that was sent, and no name is missing."""
        is_named = receipt.fingerprints.keys() | set(receipt.unread) == self.given.keys()
        return is_named and all(checksum(self.given[n]) == c for n, c in receipt.fingerprints.items())
