"""Episodes of several turns are the same on every engine, and every recorded logprob is that of a forward
pass over the whole sequence, however late the answers between the turns come.

Float32 itself is 3e-5 from float64 on the built-in model, whose logits are large. A random model says that
1e-5 holds where they are not; an error of one position or one cached token is above 1e-2 on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.data.text import TextCodec, load_codec
from covey.environments.agents import Agents
from covey.kernels.choose import choose_kernels
from covey.models.load import choose_stream, load_policy
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.native.kept import KeptRow, KeptRows
from covey.types import Finish, Outcome, Source
from support.agents import SCHEMA
from support.models import save_model
from support.needs import need
from support.servers import engine_on, policy_of_server, running
from support.sums import (
    TURNS,
    Played,
    forward_gaps,
    play,
    sum_prompts,
    sums_agents,
    thinking,
    tool_agents,
)

CPU = torch.device("cpu")
# A random model ends its turns with one token in ten, and the built-in one what it says behind tools.
ENDS = tuple(range(3, 300, 10))
WORST = {"built-in": 1e-4, "random": 1e-5}
MEAN = {"built-in": 1e-5, "random": 2e-6}


@dataclass(frozen=True)
class Subject:
    """A model in three forms: as a policy, in float64, and its files."""

    name: str
    policy: Policy
    truth: Any
    directory: Path
    codec: TextCodec


@pytest.fixture(scope="module", params=WORST)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    is_random = request.param == "random"
    directory = tmp_path_factory.mktemp("model") / "model"
    directory = save_model("qwen2", directory) if is_random else task.MODEL_DIR
    policy = load_policy(directory, device=CPU, disable_dropout=True)
    choose_stream(policy)
    truth = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    return Subject(request.param, policy.eval(), truth, directory, load_codec(task.MODEL_DIR))


def soon(key: int, turn: int) -> float:
    """Answers come in another order than the turns ended, and while others decode."""
    return 0.002 * ((7 * key + 3 * turn) % 9)


def agents_and_codec(kind: str, subject: Subject, delay: Any) -> tuple[Agents, TextCodec, list[Any]]:
    codec = subject.codec if kind == "user" else thinking(subject.codec)
    if kind == "tools":
        return tool_agents(codec, delay), codec, sum_prompts(codec, 4, tools=[SCHEMA])
    return sums_agents(codec, delay), codec, sum_prompts(codec, 4)


# What answers, and what the template makes of earlier turns: it goes on from them, or drops their thoughts.
KINDS = ("user", "user, thoughts dropped", "tools")


MOST = dict(zip(KINDS, (160, 160, 110), strict=True))


def played(kind: str, subject: Subject, engine: Any, delay: Any = None, **changes: Any) -> Played:
    agents, codec, prompts = agents_and_codec(kind, subject, delay)
    ends = ENDS if subject.name == "random" or kind == "tools" else ()
    return play(engine, prompts, codec, agents, most=MOST[kind], more_ends=ends, **changes)


@contextmanager
def on_servers(subject: Subject, count: int) -> Iterator[tuple[Any, Callable[[], int]]]:
    """An engine on so many servers, and what these have computed."""
    with ExitStack() as stack:
        policies = [policy_of_server(subject.directory) for _ in range(count)]
        servers = [stack.enter_context(running(policy)) for policy in policies]
        engine = engine_on([server.address for server in servers])
        engine.publish(plain_weights(subject.policy), 0)
        yield engine, lambda: sum(server.engine.num_computed for server in servers)
        engine.close()
        assert [server.failed for server in servers] == [[]] * count


def assert_exact(found: Played, subject: Subject, kind: str) -> None:
    gaps = forward_gaps(subject.truth, found.sequences)
    assert gaps.worst < WORST[subject.name] and gaps.mean < MEAN[subject.name], gaps
    # Several turns, and what others wrote between them is not trained.
    assert sum(len(episode.turns) > 1 for episode in found.episodes) > 3
    for sequence in found.sequences:
        model = sum(n for source, n in sequence.sources if source is Source.MODEL)
        assert model == sequence.num_trained
    if kind == "user, thoughts dropped" and subject.name == "built-in":
        assert sum(len(episode.sequences) > 1 for episode in found.episodes) > 8
    if kind != "user, thoughts dropped":
        # A random model may write the end of a thought, in front of which the template cuts the turn.
        may_be_cut = kind == "tools" and subject.name == "random"
        ends = [may_be_cut and any("</think>" in turn.text for turn in e.turns) for e in found.episodes]
        whole = [e for e, is_cut in zip(found.episodes, ends, strict=True) if not is_cut]
        assert whole and {len(episode.sequences) for episode in whole} == {1}


@pytest.fixture(scope="module")
def expected(subject: Subject) -> dict[str, Played]:
    """Of each kind the episodes that the native engine samples with answers that come at once."""
    return {kind: played(kind, subject, NativeEngine(subject.policy)) for kind in KINDS}


@pytest.mark.parametrize(("kernels", "stride"), [("compiled", 1), ("compiled", 3), ("torch", 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_native_with_its_cache_extended(
    kind: str,
    kernels: str,
    stride: int,
    subject: Subject,
    expected: dict[str, Played],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what is new is computed, also where results come while other rows decode."""
    if kernels == "compiled":
        need("a C compiler")
    how = choose_kernels("auto" if kernels == "compiled" else "torch", "cpu")
    late = NativeEngine(subject.policy, max_rows=5, stride=stride, kernels=how)
    taken, beside = counting_takes(monkeypatch), []
    found = played(kind, subject, late, soon, on_completion=lambda c: beside.append(len(late._rows)))
    assert found.tokens == expected[kind].tokens
    assert_exact(found, subject, kind)
    extended = [request for request in found.requests if request.extends is not None]
    assert sum(row is not None for row in taken) == len(extended) > 0
    assert sum(beside) > len(beside), "no row decoded beside those that ended"
    if stride == 1 and kind != "user, thoughts dropped":
        # With one token a step nothing is computed beyond the end of a turn.
        assert late.num_computed == found.num_unknown
    # Every turn anew costs more.
    anew = NativeEngine(subject.policy, max_rows=5, stride=stride, kernels=how)
    submit = anew.submit
    anew.submit = lambda request: submit(replace(request, extends=None))  # type: ignore[method-assign]
    assert played(kind, subject, anew).tokens == found.tokens
    assert anew.num_computed > late.num_computed


def counting_takes(monkeypatch: pytest.MonkeyPatch) -> list[KeptRow | None]:
    """The rows that requests which extend one were given."""
    taken: list[KeptRow | None] = []
    real = KeptRows.take

    def take(self: KeptRows, requests: Any) -> KeptRow | None:
        row = real(self, requests)
        taken.extend(row for request in requests if request.extends is not None)
        return row

    monkeypatch.setattr(KeptRows, "take", take)
    return taken


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind: str, subject: Subject, expected: dict[str, Played]) -> None:
    found = played(kind, subject, GenerateEngine(subject.policy, max_rows=5), soon)
    assert found.tokens == expected[kind].tokens
    assert_exact(found, subject, kind)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_servers(kind: str, count: int, subject: Subject, expected: dict[str, Played]) -> None:
    """Each turn goes to the server that has the former one, so that its cache is extended."""
    with on_servers(subject, count) as (engine, num_computed):
        found = played(kind, subject, engine, soon)
        computed = num_computed()
    assert found.tokens == expected[kind].tokens
    assert_exact(found, subject, kind)
    if kind == "user":
        assert computed == found.num_unknown


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "top_k": 30}], ids=["plain", "filters"])
def test_temperature_and_filters(filters: dict[str, Any], subject: Subject) -> None:
    """Logprobs are those of the temperature, and within the sets of what was kept, in each turn."""
    found = played("user", subject, NativeEngine(subject.policy), soon, temperature=0.7, filters=filters)
    gaps = forward_gaps(subject.truth, found.sequences, 0.7)
    assert gaps.worst < 2 * WORST[subject.name] and gaps.mean < 2 * MEAN[subject.name]
    assert forward_gaps(subject.truth, found.sequences, 0.75).worst > 1e-2
    assert all((sequence.kept is not None) is bool(filters) for sequence in found.sequences)


def test_the_comparison_is_not_blind(subject: Subject, expected: dict[str, Played]) -> None:
    """A bridge that the model was not given, or logprobs of the next turn, would show."""
    sequence = next(s for s in expected["user"].sequences if len(s.turn_ends) > 1)
    before, model, bridge = (count for _, count in sequence.sources[:3])
    ids = sequence.token_ids.copy()
    ids[before + model + bridge - 4] = 5
    assert forward_gaps(subject.truth, [replace(sequence, token_ids=ids)]).worst > 1e-2
    shifted = replace(sequence, logprobs=sequence.logprobs[::-1].copy())
    assert forward_gaps(subject.truth, [shifted]).worst > 1e-2


def test_one_prefill_for_the_siblings_of_a_group(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment begins alike for siblings, so that their first prompt is one."""
    engine, admitted = NativeEngine(subject.policy), []
    claim = engine._claim_slots

    def claimed() -> Any:
        fresh = claim()
        admitted.extend((len(family.prompt), len(family.waiting), family.num_begun) for family in fresh)
        return fresh

    monkeypatch.setattr(engine, "_claim_slots", claimed)
    found = played("user", subject, engine, soon, siblings=4)
    first = {tuple(episode.sequences[0].token_ids[:9].tolist()) for episode in found.episodes}
    assert [waiting for _, waiting, begun in admitted if not begun] == [4] * 4 and len(first) <= 4
    assert all(begun for _, _, begun in admitted[4:])


def test_environments_are_released_once_each(subject: Subject) -> None:
    agents, codec, prompts = agents_and_codec("user", subject, soon)
    found = play(NativeEngine(subject.policy), prompts, codec, agents, most=160, more_ends=ENDS)
    host: Any = agents.environment
    assert sorted(host.released) == list(range(len(found.episodes)))
    ended = {episode.outcome for episode in found.episodes}
    assert ended <= {Outcome.SCORED, Outcome.TRUNCATED, Outcome(Finish.LENGTH)}
    assert max(len(episode.turns) for episode in found.episodes) == TURNS
