"""The embedded model, tiny random ones, and requests to sample from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from covey.data.text import TextCodec, load_codec
from covey.models.load import choose_stream, load_policy
from covey.models.policy import Policy
from covey.quickstart import task
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import Plain, plain
from support.vision import save_model

VOCAB = 96
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def quickstart_policy() -> Policy:
    """The embedded model, ready to sample from."""
    policy = load_policy(task.MODEL_DIR, device=CPU, disable_dropout=True)
    choose_stream(policy)
    return policy.eval()


@pytest.fixture(scope="session")
def quickstart_codec() -> TextCodec:
    """The embedded tokenizer and chat template."""
    return load_codec(task.MODEL_DIR)


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small model that sees images; nothing is written there."""
    return save_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_policy() -> Callable[[str], Policy]:
    """A random model of a family, its logits far from equal; windows are shorter than prompts."""

    def make(family: str) -> Policy:
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        t = transformers
        config: Any = {
            "llama": lambda: t.LlamaConfig(**sizes),
            "gemma2": lambda: t.Gemma2Config(head_dim=8, sliding_window=7, query_pre_attn_scalar=8, **sizes),
            "gpt2": lambda: t.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=128,
                bos_token_id=1,
                eos_token_id=2,
            ),
            "gpt_oss": lambda: t.GptOssConfig(
                head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7, **sizes
            ),
        }[family]()
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        return Policy(model, stream="prefix")

    return make


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[GenerationRequest]]:
    """`siblings` requests for each prompt, each with a noise key of its own."""

    def make(
        prompts: Sequence[Sequence[int]],
        siblings: int = 4,
        *,
        stop: Sequence[int] = (),
        max_new_tokens: int = 12,
        temperature: float = 1.0,
        rollout: int = 0,
    ) -> list[GenerationRequest]:
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop)
        )
        return [
            GenerationRequest(
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                turn=TurnId(
                    seed=1, split="train", rollout=rollout, attempt=0, prompt_id=number, sibling=sibling
                ),
            )
            for number, prompt in enumerate(prompts)
            for sibling in range(siblings)
        ]

    return make


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """Prompts of given lengths over the tiny models' vocabulary."""

    def make(*lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]

    return make


@pytest.fixture(scope="session")
def run_engine() -> Callable[..., list[Plain]]:
    """Submit requests and return their completions in the order of submission."""

    def run(engine: Any, requests: Sequence[GenerationRequest]) -> list[Plain]:
        numbers = [engine.submit(r) for r in requests]
        done = {c.request_id: plain(c) for c in engine.results()}
        assert sorted(done) == sorted(numbers)
        return [done[n] for n in numbers]

    return run
