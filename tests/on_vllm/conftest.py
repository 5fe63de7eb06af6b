"""A learner of the built-in model, and vLLM beside it in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from covey.data.text import load_codec
from covey.models.load import load_policy
from covey.models.lora import plain_weights
from covey.quickstart import task
from covey.rollout.vllm.engine import VllmEngine
from support.vllm_learner import Learner, settings

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def learner() -> Learner:
    """The built-in model in float32."""
    policy = load_policy(task.MODEL_DIR, device=CPU, disable_dropout=True)
    given = {name: tensor.detach().clone() for name, tensor in plain_weights(policy)}
    return Learner(policy.eval(), given)


@pytest.fixture(scope="session")
def start() -> Callable[..., Any]:
    """Starts a vLLM for a `with` block; one at a time is in this process."""

    @contextmanager
    def started(**changes: Any) -> Iterator[VllmEngine]:
        engine = VllmEngine(settings(**changes), tokenizer=load_codec(task.MODEL_DIR).tokenizer)
        try:
            yield engine
        finally:
            engine.close()
            gc.collect()

    return started
