"""Episodes of a scheduler on the native engine: the same as those of an environment that says the same, and
every recorded logprob is that of a forward pass over the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.data.text import TextCodec, load_codec
from covey.environments.environment_host import HostedEnvironments
from covey.quickstart.task import MODEL_DIR
from covey.rollout.native.engine import NativeEngine
from covey.types import Source
from support.agents import agents_for
from support.schedulers import assert_trains_what_was_sampled, scheduling
from support.sums import Played, forward_gaps, play, sum_prompts, sums_agents, thinking


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR)


@pytest.fixture(scope="module")
def host() -> Iterator[HostedEnvironments]:
    with scheduling("Sums") as host:
        yield host


def scheduled(
    host: HostedEnvironments, codec: TextCodec, engine: Any, *, adds: bool = False, **more: Any
) -> Played:
    agents = replace(agents_for(codec, environment=host, **more), format=None)
    prompts = [replace(p, columns={"adds": adds}) for p in sum_prompts(codec, 4)]
    return play(engine, prompts, codec, agents, most=160)


def without_extensions(engine: NativeEngine) -> NativeEngine:
    """Return an engine that takes each request for one of its own."""
    submit = engine.submit
    engine.submit = lambda request: submit(replace(request, extends=None))  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("rewrites", [False, True])
def test_messages_behind_turns_are_as_those_of_an_environment(
    rewrites: bool, codec: TextCodec, host: HostedEnvironments, quickstart_policy: Any
) -> None:
    """Bit for bit where rows decode one at a time; also where the template drops earlier thoughts."""
    own = thinking(codec) if rewrites else codec
    engines = [NativeEngine(quickstart_policy, max_rows=1) for _ in range(2)]
    by_scheduler = scheduled(host, own, engines[0])
    by_environment = play(engines[1], sum_prompts(own, 4), own, sums_agents(own), most=160)
    assert by_scheduler.sequences == by_environment.sequences
    assert by_scheduler.texts == by_environment.texts
    assert max(len(e.turns) for e in by_scheduler.episodes) == 3
    assert any(len(e.sequences) > 1 for e in by_scheduler.episodes) is rewrites
    if not rewrites:
        # Turns behind turns extend the cache; without that each is computed from its beginning.
        anew = without_extensions(NativeEngine(quickstart_policy, max_rows=1))
        assert scheduled(host, own, anew).tokens == by_scheduler.tokens
        assert anew.num_computed > 1.5 * engines[0].num_computed


@pytest.mark.parametrize("stride", [1, 3])
def test_a_turn_that_goes_on_is_what_the_model_was_given(
    stride: int, codec: TextCodec, host: HostedEnvironments, quickstart_policy: Any
) -> None:
    """Half of each turn is cut and the model goes on behind other words: what was cut is in no cache."""
    engine = NativeEngine(quickstart_policy, max_rows=5, stride=stride)
    found = scheduled(host, codec, engine, adds=True)
    truth = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float64).eval()
    gaps = forward_gaps(truth, found.sequences)
    assert gaps.worst < 1e-4 and gaps.mean < 1e-5, gaps
    assert sum(len(episode.turns) == 3 for episode in found.episodes) > 8
    for episode in found.episodes:
        assert_trains_what_was_sampled(episode)
        for sequence in episode.sequences:
            model = sum(n for source, n in sequence.sources if source is Source.MODEL)
            assert model == sequence.num_trained
    # A turn of one token, which a cut leaves nothing of, begins a new sequence.
    whole = [episode for episode in found.episodes if len(episode.sequences) == 1]
    assert len(whole) > 8
    assert all(turn.cut_ids for episode in whole for turn in episode.turns[:-1])
    # Nothing else is sampled where every turn is computed anew, and more is computed.
    anew = without_extensions(NativeEngine(quickstart_policy, max_rows=5, stride=stride))
    assert scheduled(host, codec, anew, adds=True).tokens == found.tokens
    assert anew.num_computed > 1.2 * engine.num_computed
