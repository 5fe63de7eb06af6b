"""One thread, a tiny policy, a rollout, and a comparison that proves of itself that it can fail."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from covey.models.policy import Policy
from covey.types import Finish, Score, ScoredGroup, Status
from support.groups import episode, scored


@pytest.fixture(scope="session")
def tiny_policy() -> Callable[..., Policy]:
    """A new random Qwen2 with a vocabulary of 96, the same at every call."""

    def make(stream: str = "prefix") -> Policy:
        config = Qwen2Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.05)
        return Policy(model, stream=stream).train()

    return make


@pytest.fixture(scope="session")
def random_rollout() -> list[ScoredGroup]:
    """Four groups of four, lengths 1 to 20: a failed and a truncated row, one group without signal."""
    rng = random.Random(8)
    groups = []
    for number in range(4):
        prompt = tuple(rng.randrange(3, 96) for _ in range(rng.randint(2, 12)))
        episodes, scores = [], []
        for sibling in range(4):
            own = tuple(rng.randrange(3, 96) for _ in range(rng.randint(1, 20)))
            logprobs = tuple(-4.5 - rng.random() for _ in own)
            is_cut = (number, sibling) == (1, 3)
            episodes.append(
                episode(
                    prompt,
                    own,
                    number=number,
                    sibling=sibling,
                    logprobs=logprobs,
                    finish=Finish.LENGTH if is_cut else Finish.STOP,
                )
            )
            is_failed = (number, sibling) == (0, 1)
            scores.append(
                Score(
                    total=None if is_failed else 1.0 if number == 3 else rng.random(),
                    parts=(),
                    status=Status.ERROR if is_failed else Status.OK,
                )
            )
        groups.append(scored(episodes, scores, number=number))
    return groups
