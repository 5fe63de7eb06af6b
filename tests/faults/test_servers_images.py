"""Rollout servers that see images, as `covey rollout` starts them: one that is killed, or started again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from covey.errors import EngineLost
from covey.media.sizes import preparation_of
from covey.models.lora import plain_weights
from covey.rollout.server import image_send
from covey.rollout.server.call import Caller
from covey.types import Medium
from support.engines import sampled
from support.image_requests import agrees, expected, requests_with_images, spec_of
from support.servers import engine_on, policy_of_server, processes
from support.vision import save_model

pytestmark = pytest.mark.multi


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each image was sent, by its key."""
    counts: Counter[str] = Counter()
    real = image_send._content

    def content(medium: Medium) -> bytes:
        counts[medium.key] += 1
        return real(medium)

    monkeypatch.setattr(image_send, "_content", content)
    return counts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_server_that_was_started_again_is_sent_its_images_again(
    family: str, tmp_path: Path, sent: Counter[str]
) -> None:
    directory = save_model(family, tmp_path / "model")
    policy = policy_of_server(directory)
    requests = requests_with_images(policy, spec_of(directory), tmp_path)
    own = expected(policy, requests)
    with processes(tmp_path, 1, "--dtype", "float32", model=str(directory)) as (first,):
        status = Caller(address=first.address, token=first.token, timeout_s=20.0).status()
        assert status.images == preparation_of(directory) and status.engine == "native"
        engine = engine_on([first.address], token=first.token)
        engine.publish(plain_weights(policy), 0)
        for _ in range(2):
            assert agrees(sampled(engine, requests), own)
            assert len(sent) == 3 and set(sent.values()) == {1}
        first.kill()
        with pytest.raises(EngineLost, match="F140"):
            sampled(engine, requests)
    with processes(tmp_path, 1, "--dtype", "float32", port=first.port, model=str(directory)):
        engine.publish(plain_weights(policy), 0)
        assert agrees(sampled(engine, requests), own)
        assert set(sent.values()) == {2}
        engine.close()


def test_the_work_of_a_server_that_is_killed_goes_to_another_one_with_its_images(
    tmp_path: Path, sent: Counter[str]
) -> None:
    directory = save_model("qwen2_5_vl", tmp_path / "model")
    policy = policy_of_server(directory)
    requests = requests_with_images(policy, spec_of(directory), tmp_path)
    own = expected(policy, requests)
    with processes(tmp_path, 2, "--dtype", "float32", model=str(directory)) as servers:
        engine = engine_on([server.address for server in servers], token=servers[0].token)
        engine.publish(plain_weights(policy), 0)
        # Both have work, and the first images of it.
        real = engine.on_turn

        def kill_once_it_is_sent_images() -> None:
            real()
            if sent:
                servers[0].kill()

        engine.on_turn = kill_once_it_is_sent_images
        assert agrees(sampled(engine, requests), own)
        assert set(sent) == {medium.key for request in requests for medium in request.media}
        assert max(sent.values()) == 2
        engine.close()
