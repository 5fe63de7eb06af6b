"""Episodes of several turns on vLLM: exact, beside answers that come late, and on two ranks that are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.data.text import load_codec
from covey.quickstart import task
from covey.rollout.vllm.engine import VllmEngine
from support.sums import TURNS, Played, forward_gaps, play, sum_prompts, sums_agents, thinking
from support.vllm_learner import Learner
from support.vllm_ranks import on_ranks

pytestmark = pytest.mark.vllm

# Float32 is 3e-5 from float64 on this model; a wrong position or a stale block is above 1e-2.
WORST, MEAN = 1e-4, 1e-5


def soon(key: int, turn: int) -> float:
    return 0.01 * ((7 * key + 3 * turn) % 9)


@pytest.fixture(scope="module")
def truth() -> Any:
    return AutoModelForCausalLM.from_pretrained(task.MODEL_DIR, dtype=torch.float64).eval()


def sampled(engine: VllmEngine, drops_thoughts: bool, delay: Any = soon) -> Played:
    codec = load_codec(task.MODEL_DIR)
    codec = thinking(codec) if drops_thoughts else codec
    return play(engine, sum_prompts(codec, 4), codec, sums_agents(codec, delay), siblings=4, most=96)


@pytest.mark.parametrize("drops_thoughts", [False, True], ids=["user", "user, thoughts dropped"])
def test_one_process(drops_thoughts: bool, start: Any, learner: Learner, truth: Any) -> None:
    """The same tokens whether answers come at once or late, and vLLM computes no turn again."""
    with start() as engine:
        engine.publish(learner.weights(), 0)
        cached, step = [], engine._llm.llm_engine.step

        def counting() -> Any:
            outputs = step()
            cached.extend(output.num_cached_tokens for output in outputs if output.finished)
            return outputs

        engine._llm.llm_engine.step = counting
        found = sampled(engine, drops_thoughts)
        again = sampled(engine, drops_thoughts, None)
        engine._llm.llm_engine.step = step
        assert not engine._llm.llm_engine.has_unfinished_requests()
    assert found.tokens == again.tokens
    assert forward_gaps(truth, found.sequences).worst < WORST
    assert forward_gaps(truth, found.sequences).mean < MEAN
    assert max(len(episode.turns) for episode in found.episodes) == TURNS
    several = sum(len(episode.sequences) > 1 for episode in found.episodes)
    assert several > 8 if drops_thoughts else several == 0
    # Blocks of 32 tokens of the former turns.
    assert max(cached) >= 32


@pytest.mark.multi
def test_two_ranks_that_are_one_vllm(tmp_path: Path, start: Any, learner: Learner, truth: Any) -> None:
    """The first plays all episodes while the second steps with it; tokens are those of one process."""
    first, second = on_ranks(Path(__file__).with_name("turns_program.py"), tmp_path, 2)
    with start() as engine:
        engine.publish(learner.weights(), 0)
        alone = sampled(engine, False)
    assert first["tokens"] == alone.tokens and second["tokens"] == []
    assert first["gap"] < WORST and first["late"] == first["tokens"]
    assert first["computed"] == second["computed"] > 0
    assert [own["in step"] for own in (first, second)] == [True, True]
    # A signal to the second rank, and the first one waits for answers.
    for own in (first, second):
        assert own["stopped"] == "Stopped" and own["seconds"] < 20
