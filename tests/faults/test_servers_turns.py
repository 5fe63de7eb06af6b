"""Conversations on two servers: what a server has computed of one is not computed again on the other.

Each server counts the tokens that it computes, of prompts and of completions. A conversation whose next turn
goes to another server is computed there from its first token on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from covey.activity import Activity
from covey.data.text import TextCodec, load_codec
from covey.models.lora import plain_weights
from covey.quickstart import task
from covey.rewards.protocol import Scored
from covey.rollout.ahead import Sampler
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.call import Caller
from covey.rollout.server.client import ServerEngine
from covey.rollout.shares import Share
from covey.rollout.slots import CollectPlan, slots_of
from covey.types import Origin, Prompt, SamplingParams, Score
from support.servers import Process, engine_on, policy_of_server, processes
from support.sums import TURNS, Played, play, sum_prompts, sums_agents

pytestmark = pytest.mark.multi

# Each server decodes four completions side by side, and is given eight of the 40.
ROWS, PROMPTS, SIBLINGS = ("--max_rows", "4"), 10, 4


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(task.MODEL_DIR)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    with processes(tmp_path_factory.mktemp("servers"), 2, *ROWS) as found:
        yield found


@pytest.fixture
def engine(servers: list[Process]) -> Iterator[ServerEngine]:
    engine = engine_on([server.address for server in servers], token=servers[0].token)
    engine.publish(plain_weights(policy_of_server()), 0)
    with closing(engine):
        yield engine


def computed_by(servers: Sequence[Process]) -> list[int]:
    """The tokens that each server has computed, by its own count."""
    found = []
    for server in servers:
        caller = Caller(address=server.address, token=server.token, timeout_s=10.0)
        with caller.open("GET", "/metrics", None) as answer:
            said = answer.response.read().decode()
        found += map(int, re.findall(r"computed_tokens_total (\d+)", said))
    return found


def assert_computed_once(played: Played, before: list[int], after: list[int]) -> None:
    """Both servers have sampled, and no conversation was computed anew for a further turn."""
    computed = [now - then for now, then in zip(after, before, strict=True)]
    extended = [request for request in played.requests if request.extends is not None]
    assert len(extended) == PROMPTS * SIBLINGS * (TURNS - 1)
    # Siblings that sample the same tokens are computed together.
    assert 0.9 * played.num_unknown < sum(computed) <= played.num_unknown
    assert min(computed) > 0.25 * sum(computed)
    assert sum(len(request.prompt_token_ids) for request in extended) > played.num_unknown


def test_further_turns_are_sampled_where_a_conversation_began(
    servers: list[Process], engine: ServerEngine, codec: TextCodec
) -> None:
    """Also where that server has more to do than the other one."""
    prompts, agents = sum_prompts(codec, PROMPTS), sums_agents(codec)
    before = computed_by(servers)
    played = play(engine, prompts, codec, agents, siblings=SIBLINGS)
    assert_computed_once(played, before, computed_by(servers))
    expected = play(NativeEngine(policy_of_server()), prompts, codec, agents, siblings=SIBLINGS)
    assert played.tokens == expected.tokens


def test_so_are_those_of_rollouts_that_are_sampled_ahead(
    servers: list[Process], engine: ServerEngine, codec: TextCodec
) -> None:
    """Two rollouts run side by side, as with `--max_staleness 1`."""
    prompts, agents, played = sum_prompts(codec, PROMPTS), sums_agents(codec, max_tokens=96), Played([])
    submit = engine.submit
    engine.submit = lambda r: (played.requests.append(r), submit(r))[1]  # type: ignore[method-assign]
    before = computed_by(servers)
    with closing(Sampler(engine, codec, agents)) as sampler:
        half = PROMPTS // 2
        shares = [share_of(part, n, codec) for n, part in enumerate((prompts[:half], prompts[half:]))]
        for share in shares:
            sampler.begin(share)
        for share in shares:
            sampler.wait(share, Activity())
    played.episodes = [share.ended[n] for share in shares for n in range(half * SIBLINGS)]
    assert_computed_once(played, before, computed_by(servers))


def share_of(prompts: Sequence[Prompt], rollout: int, codec: TextCodec) -> Share:
    """The share of a rank that samples a whole rollout."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=96, stop_token_ids=codec.stop_token_ids)
    own = [replace(prompt, origin=Origin(epoch=0, rollout=rollout)) for prompt in prompts]
    plan = CollectPlan(num_generations=SIBLINGS, sampling=sampling, seed=1)
    return Share(slots_of(own, plan), score, None)


def score(rows: Sequence[Scored]) -> Callable[[], list[Score]]:
    return lambda: [Score(total=1.0, parts=()) for _ in rows]
