"""Engines decode some episodes while tools and environments work on others.

An answer here comes when the engine has computed so many tokens more, so that it never comes where decoding
waits for it: nothing depends on a clock but how long a failure takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from covey.data.text import TextCodec
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from support.servers import engine_on, policy_of_server, running
from support.sums import SumsHost, play, sum_prompts, sums_agents

PATIENCE_S = 60.0
MORE = 40


class Waits(SumsHost):
    """Answers some episodes when the engine has computed more tokens, and the others at once; `waited` are
    the tokens that it computed meanwhile."""

    def __init__(self, num_computed: Callable[[], int], is_held: Callable[[int], bool]) -> None:
        super().__init__()
        self._num_computed, self._is_held = num_computed, is_held
        self.waited: list[int] = []

    def step(self, key: int, turn: Any, done: Callable[[Any], None]) -> None:
        if turn["number"] or not self._is_held(key):
            super().step(key, turn, done)
            return
        began, end = self._num_computed(), time.monotonic() + PATIENCE_S

        def wait() -> None:
            while self._num_computed() < began + MORE and time.monotonic() < end:
                time.sleep(0.001)
            self.waited.append(self._num_computed() - began)
            super(Waits, self).step(key, turn, done)

        threading.Thread(target=wait, daemon=True).start()


def held(engine: Any, num_computed: Callable[[], int], codec: TextCodec) -> tuple[Any, list[int]]:
    """A rollout of 4 prompts, of which the first siblings are answered late."""
    agents = sums_agents(codec)
    host = Waits(num_computed, lambda key: key % 4 == 0)
    object.__setattr__(agents, "environment", host)
    return play(engine, sum_prompts(codec, 4), codec, agents, siblings=4), host.waited


@pytest.mark.parametrize("kind", [NativeEngine, GenerateEngine])
def test_others_decode_while_answers_are_awaited(
    kind: type, quickstart_policy: Policy, quickstart_codec: TextCodec
) -> None:
    engine = kind(quickstart_policy)
    codec = quickstart_codec
    expected = play(kind(quickstart_policy), sum_prompts(codec, 4), codec, sums_agents(codec))
    found, waited = held(engine, lambda: engine.num_computed, codec)
    assert len(waited) == 4 and min(waited) >= MORE
    assert found.tokens == expected.tokens


def test_servers_decode_while_answers_are_awaited(
    quickstart_policy: Policy, quickstart_codec: TextCodec
) -> None:
    with running(policy_of_server()) as server:
        engine = engine_on([server.address])
        engine.publish(plain_weights(quickstart_policy), 0)
        _, waited = held(engine, lambda: server.engine.num_computed, quickstart_codec)
        engine.close()
    assert len(waited) == 4 and min(waited) >= MORE


def test_slow_answers_take_the_time_of_one_and_not_of_all(
    quickstart_policy: Policy, quickstart_codec: TextCodec
) -> None:
    """48 answers of 0.2 s, of which each episode has three, one after the other."""
    agents = sums_agents(quickstart_codec, lambda key, turn: 0.2)
    began = time.monotonic()
    found = play(NativeEngine(quickstart_policy), sum_prompts(quickstart_codec, 4), quickstart_codec, agents)
    took = time.monotonic() - began
    answers = sum(len(episode.turns) for episode in found.episodes)
    assert answers == 48 and 0.6 <= took < 0.5 * answers * 0.2
