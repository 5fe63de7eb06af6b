"""Nine faults of episodes of several turns that other trainers had in 2026, each with its smallest input.

T trl, N NeMo-RL, M miles, V verl, S ms-swift; the numbers are those of their issues and pull requests.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.activity import Activity
from covey.batching.credit import row_credits
from covey.batching.samples import to_samples
from covey.comm import LocalComm
from covey.data.text import TextCodec, load_codec
from covey.environments.call_formats.registry import CALL_FORMATS
from covey.environments.protocol import Lost, Opened, Stepped
from covey.environments.template_calls import format_of
from covey.quickstart.task import MODEL_DIR
from covey.rewards.registry import build, score_rows
from covey.rollout.collect import collect
from covey.rollout.scripted import Script, ScriptedEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import Completion, Episode, Outcome, ScoredGroup, Source, ToolCall
from covey.types.arrays import constant_floats, ints
from journeys.helpers import covey, flags, rollouts, small, write_jsonl
from support.agents import CALL, SCHEMA, AnsweringTools, agents_for, plan_of, prompt_of
from support.options import credit
from support.tool_templates import TOOL_TEMPLATES, with_template
from support.turn_hosts import Environments, asks

USER = {"role": "user", "content": "What is 2*3?"}
SAYS = '''"""Environments."""

import random
import time


class Says:
    """As TRL has it: what reset returns goes on from the prompt; the reward is async."""

    def reset(self, **columns):
        return "say 7"

    async def get_reward(self) -> float:
        return 0.75


class Draws:
    def reset(self, **columns):
        return f"Guess {random.random()}"

    def get_reward(self) -> float:
        return random.random()


class Silent:
    def reset(self, row, seed):
        return row["prompt"]

    def step(self, turn):
        time.sleep(600)
'''


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR, chat_template="chatml-tools")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs.py").write_text(SAYS)
    rows = [{"messages": [{"role": "user", "content": "> "}], "solution": "7"} for _ in range(16)]
    write_jsonl(tmp_path / "short.jsonl", rows)
    return tmp_path


def trained(name: str, data: str = "quickstart#64", **changes: Any) -> list[dict[str, Any]]:
    """The records of a run of one step in an environment."""
    options = small(
        data,
        "run",
        environment_factory=f"envs.py:{name}",
        reward_funcs=["environment"],
        chat_template="chatml-tools",
        max_steps=1,
        **changes,
    )
    done = covey("train", *flags(options))
    assert done.code == 0, done.err
    (records,) = rollouts(Path("run"))
    return records


def scored(
    codec: TextCodec, environment: Environments, siblings: int = 4, script: Script = lambda turn: "Six."
) -> ScoredGroup:
    """A group whose rewards are those of its environments."""
    plan = CollectPlan(
        num_generations=siblings,
        sampling=plan_of(codec).sampling,
        seed=1,
        weights={"environment": 1.0},
    )

    def score(rows: Any) -> Any:
        return lambda: score_rows(build(["environment"]), [1.0], rows)

    engine, agents = ScriptedEngine(codec, script), agents_for(codec, None, environment)
    found = collect([prompt_of(codec, [USER])], engine, score, codec, plan, LocalComm(), agents)
    (group,) = found.groups
    return group


def advantages(group: ScoredGroup) -> list[float | None]:
    """The advantage of each completion; None where it is in no loss."""
    found = row_credits([group], to_samples([group]), credit(scale_rewards="none"))
    return [None if row.masked else row.advantage for row in found]


def played(
    codec: TextCodec, script: Script, engine: Any = ScriptedEngine, prompt: str = "What is 2*3?", **hosts: Any
) -> tuple[Episode, Any]:
    """One episode, and the engine."""
    plan, asked = plan_of(codec), {"role": "user", "content": prompt}
    prompts = [prompt_of(codec, [asked], [SCHEMA] if "tools" in hosts else ())]
    made = engine(codec, script)
    loop = TurnLoop(slots_of(prompts, plan), made, codec, agents_for(codec, **hosts), Activity())
    ((_, episode),) = loop.episodes()
    return episode, made


@pytest.mark.usefixtures("here")
def test_1_what_reset_returns_is_in_the_prompt_and_an_async_reward_counts() -> None:
    """T#6067: the model saw nothing of it, and the reward was always 0."""
    records = trained("Says", "short.jsonl")
    assert {r["prompt"] for r in records} == {"<|im_start|>user\n> say 7<|im_end|>\n<|im_start|>assistant\n"}
    assert {r["reward"] for r in records} == {0.75}


def test_1_what_reset_returns_is_all_of_an_empty_prompt(codec: TextCodec) -> None:
    says = Environments(reset=lambda n: Opened(added="say 7"), step_=asks(1))
    _, engine = played(codec, lambda turn: "Seven.", prompt="", environment=says)
    (request,) = engine.requests
    assert codec.written_out(request.prompt_token_ids) == codec.render([{"role": "user", "content": "say 7"}])


@pytest.mark.usefixtures("here")
def test_2_siblings_draw_the_same_and_groups_do_not() -> None:
    """OpenEnv#1078: the rollouts of a group were given different words."""
    random.seed(time.time())
    records = trained("Draws")
    starts = {(r["group"], r["prompt"]) for r in records}
    assert len(starts) == 2 and len({prompt for _, prompt in starts}) == 2


def test_3_doing_nothing_is_not_reinforced(codec: TextCodec) -> None:
    """T#6427: a reward that is not set counted as 0, which is more than -1."""
    rewards = (None, -1.0, -1.0, None)
    environment = Environments(step_=lambda n, turn: Stepped(is_done=True, reward=rewards[n]))
    group = scored(codec, environment)
    assert tuple(score.total for score in group.scores) == rewards
    assert advantages(group) == [None, 0.0, 0.0, None]


def test_4_an_episode_that_failed_is_in_no_baseline(codec: TextCodec) -> None:
    """N#3589: one that raised became an empty text with reward 0. Of 0, 1 and 5 the mean is 2."""

    def step(number: int, turn: Any) -> Any:
        rewards = (0.0, 1.0, 0.0, 5.0)
        return Lost(words="OSError") if number == 2 else Stepped(is_done=True, reward=rewards[number])

    assert advantages(scored(codec, Environments(step_=step))) == [-2.0, -1.0, None, 3.0]


@pytest.mark.usefixtures("here")
def test_4_an_environment_that_never_answers_wedges_nothing() -> None:
    began = time.monotonic()
    options = small(
        "quickstart#64",
        "run",
        environment_factory="envs.py:Silent",
        reward_funcs=["environment"],
        tool_timeout_s=0.5,
        max_steps=1,
    )
    refused = covey("train", *flags(options))
    assert refused.code == 2 and "E393 environment_factory" in refused.err
    done = covey("train", *flags({**options, "reward_trial": False}))
    assert done.code == 3 and "F138 at step 1" in done.err
    assert "8 × Silent.step() returned nothing within 0.5 s" in " ".join(done.err.split())
    assert time.monotonic() - began < 20


def test_5_one_lost_sandbox_of_eight_costs_one_completion(codec: TextCodec) -> None:
    """M#2800: whole groups were dropped, a third of all rollouts for 5 % of lost sandboxes."""
    lost = Environments(
        reset=lambda n: Lost(words="no sandbox") if n == 3 else Opened(),
        step_=lambda n, turn: Stepped(is_done=True, reward=float(n % 2)),
    )
    group = scored(codec, lost, siblings=8)
    found = advantages(group)
    assert [value is None for value in found] == [n == 3 for n in range(8)]
    assert sum(value for value in found if value is not None) == pytest.approx(0.0, abs=1e-6)
    assert [e.outcome is Outcome.INFRASTRUCTURE for e in group.group.episodes] == [n == 3 for n in range(8)]


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
def test_6_text_of_the_model_is_not_evaluated(name: str, tmp_path: Path) -> None:
    """V#6542: a parser called eval on what the model wrote as an argument."""
    bad = f"__import__('os').mkdir({str(tmp_path / 'made')!r})"
    form = CALL_FORMATS[name]
    for arguments in ({"items": [bad]}, {"items": bad}, {"items": f"[{bad}]"}, {bad: 1}):
        written = form.write([ToolCall(name="add", arguments=arguments)])
        calls = [*form.parse(written).calls, *form.parse(written.replace('"', "")).calls]
        assert calls
        read = calls[0].arguments
        assert calls[0].fault or {str(k): str(v) for k, v in read.items()} == {
            str(k): str(v) for k, v in arguments.items()
        }
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_7_two_turns_of_chatml_are_the_whole_rendering(kind: str, codec: TextCodec) -> None:
    """V#6921: the line break behind `<|im_end|>` was lost at each turn, as turns were rendered alone."""
    form = format_of(codec)
    assert form is not None
    if kind == "tools":
        say = lambda turn: "Six." if turn.turn else form.write([CALL])  # noqa: E731
        episode, engine = played(codec, say, tools=AnsweringTools())
    else:
        episode, engine = played(codec, lambda turn: "Six.", environment=Environments(step_=asks(2)))
    first, second = engine.requests
    messages = [USER, *(m for turn in episode.turns[:1] for m in turn.messages())]
    whole = codec.render(messages, tools=[SCHEMA] if kind == "tools" else ())
    assert codec.written_out(second.prompt_token_ids) == whole
    assert second.prompt_token_ids == codec.encode([whole])[0]
    assert "<|im_end|>\n<|im_start|>" in whole[len(codec.written_out(first.prompt_token_ids)) :]


class Spelling(ScriptedEngine):
    """Samples every character of its text as a token of its own, as a policy may."""

    def results(self) -> Iterator[Completion]:
        for done in super().results():
            text = self._script(self.requests[done.request_id - 1].turn) or ""
            ids = [token for char in text for token in self._codec.encode([char])[0]]
            ids.append(done.token_ids.tolist()[-1])
            yield replace(
                done, token_ids=ints(ids), logprobs=constant_floats(0.0, len(ids)), versions=((0, len(ids)),)
            )


def test_8_the_ids_that_were_sampled_are_trained_and_stay_in_the_prompt(codec: TextCodec) -> None:
    """S#10012: turns were encoded again, so that "a" and "b" became the token "ab"."""
    word = "assistant"
    assert len(codec.encode([word])[0]) == 1
    spelt = [token for char in word for token in codec.encode([char])[0]]
    episode, engine = played(codec, lambda turn: word, Spelling, environment=Environments(step_=asks(3)))
    (own,) = episode.tokens
    sampled = [*spelt, codec.stop_token_ids[0]]
    assert own.trained_ids.tolist() == sampled * 3
    first, second, third = (list(request.prompt_token_ids) for request in engine.requests)
    assert second[: len(first) + len(sampled)] == first + sampled
    assert third[: len(second) + len(sampled)] == second + sampled
    assert engine.requests[2].extends == engine.requests[1].turn


@pytest.mark.parametrize("turns", [1, 3])
def test_9_the_last_trained_token_of_a_turn_is_one_that_stops(turns: int, codec: TextCodec) -> None:
    """T#5988: the template of GLM ends a turn with the first token of the next message, which the model was
    never trained to write."""
    glm = with_template(load_codec(MODEL_DIR, chat_template="chatml-tools"), TOOL_TEMPLATES["glm"])
    marks = ("<|user|>", "<|observation|>", "<|assistant|>")
    glm.tokenizer.add_special_tokens(list(marks))
    stops = tuple(glm.tokenizer.token_to_id(mark) for mark in marks[:2])
    glm = replace(glm, stop_token_ids=stops)
    episode, _ = played(glm, lambda turn: "\nSix.<|user|>", environment=Environments(step_=asks(turns)))
    (own,) = episode.tokens
    start, ends = 0, []
    for source, count in own.sources:
        start += count
        if source is Source.MODEL:
            ends.append(int(own.token_ids[start - 1]))
            assert own.is_trained[start - 1]
    assert ends == [stops[0]] * turns
