"""Images of requests on a server whose engine is vLLM: logprobs are those of the learner's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.models.lora import plain_weights
from support.engines import sampled
from support.image_requests import own_gap, requests_with_images, spec_of
from support.servers import engine_on, policy_of_server, processes
from support.vision import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.multi]

WORDS = (
    *("--engine", "vllm", "--dtype", "float32", "--vllm_max_model_len", "256", "--max_rows", "16"),
    *("--vllm_enforce_eager", "true"),
)


def test_vllm_on_a_server_sees_the_images_of_the_learner(tmp_path: Path) -> None:
    # vLLM imports transformers' processor for tensors.
    pytest.importorskip("torchvision")
    directory = save_model("qwen2_5_vl", tmp_path / "model", head=32)
    policy = policy_of_server(directory)
    requests = requests_with_images(policy, spec_of(directory), tmp_path)
    with processes(tmp_path, 1, *WORDS, model=str(directory)) as (server,):
        engine = engine_on([server.address], token=server.token, noise_keys=False, timeout_s=100.0)
        engine.publish(plain_weights(policy), 0)
        found = sampled(engine, requests)
        assert own_gap(policy, requests, found) < 1e-4
        engine.close()
