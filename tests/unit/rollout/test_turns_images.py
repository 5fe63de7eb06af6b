"""Episodes whose environments and tools give images: placeholders between turns, never trained, and exact."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from covey.activity import Activity
from covey.data.text import TextCodec, load_codec
from covey.environments.protocol import Opened, Stepped
from covey.environments.tools import start_tools
from covey.models.load import choose_stream, load_policy
from covey.models.policy import Policy
from covey.rollout.native.engine import NativeEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.token_streams import Row
from covey.types import Episode, Origin, Outcome, Prompt, SamplingParams, Source, TokenSequence
from support.agents import agents_for, episodes_of, prompt_of
from support.vision import IMAGE, own_logprobs, picture

TOOL = """
from PIL import Image


def look(colour: int) -> object:
    \"\"\"Look at a picture.

    Args:
        colour: Its red.
    \"\"\"
    image = Image.new("RGB", (24, 16), (colour, 0, 0))
    return [image, "seen <|image_pad|>", image] if colour > 100 else image
"""


@pytest.fixture(scope="module")
def codec(vision_model: Path) -> TextCodec:
    return load_codec(vision_model)


@pytest.fixture(scope="module")
def policy(vision_model: Path) -> Policy:
    policy = load_policy(vision_model, device=torch.device("cpu"), disable_dropout=True)
    choose_stream(policy)
    return policy.eval()


class Looks:
    """An environment of three turns, each of which begins with a picture; `seen` has the rows."""

    name, has_step, has_tools, has_reward, takes_seed = "Looks", True, False, False, True
    schemas = ()

    def __init__(self) -> None:
        self.turn: dict[int, int] = {}
        self.seen: list[Any] = []

    def open(self, key: int, row: Any, seed: int, done: Callable[[Any], None]) -> None:
        self.turn[key] = 0
        self.seen.append(row)
        done(Opened(added=[{"type": "text", "text": "First"}, self.block(0)]))

    def step(self, key: int, turn: Any, done: Callable[[Any], None]) -> None:
        self.turn[key] += 1
        content = [self.block(self.turn[key]), {"type": "text", "text": "And now?"}]
        messages = ({"role": "user", "content": content},)
        done(Stepped(messages=messages, is_done=self.turn[key] == 3, reward=1.0))

    def block(self, number: int) -> dict[str, Any]:
        content = picture((90 * number, 10, 200), (24, 16) if number % 2 else (32, 24))
        return {"type": "image", "image": Image.open(BytesIO(content))}

    def release(self, keys: Any) -> None: ...

    def close(self) -> None: ...


def begin(codec: TextCodec) -> Prompt:
    """A prompt with an image of its own."""
    from covey.data.rows import prompt_table

    rows = [{"messages": [{"role": "user", "content": "<image>Look."}], "images": [picture((9, 200, 9))]}]
    return prompt_table(rows, codec, max_length=None).take(0, Origin(epoch=0, rollout=0))


def row_of(sequence: TokenSequence) -> Row:
    return Row(
        token_ids=sequence.token_ids,
        is_trained=sequence.is_trained,
        prompt_length=sequence.prompt_length,
        prompt_key=0,
        media=sequence.media,
    )


def played(codec: TextCodec, policy: Policy, environment: Looks) -> list[Episode]:
    plan = CollectPlan(
        num_generations=2,
        sampling=SamplingParams(
            temperature=1.0,
            max_new_tokens=200,
            # A random model ends its turns soon by chance.
            stop_token_ids=tuple(range(0, 300, 4)),
            banned_token_ids=policy.head.banned,
        ),
        seed=1,
    )
    agents = agents_for(codec, environment=environment, max_tokens=300)  # type: ignore[arg-type]
    loop = TurnLoop(slots_of([begin(codec)], plan), NativeEngine(policy), codec, agents, Activity())
    found = dict(loop.episodes())
    return [found[number] for number in range(2)]


def test_an_environment_gives_images_and_is_given_those_of_its_row(codec: TextCodec, policy: Policy) -> None:
    environment = Looks()
    for episode in played(codec, policy, environment):
        assert episode.outcome is Outcome.SCORED, episode.failure
        assert len(episode.turns) == 3
        for sequence in episode.tokens:
            placeholders = int((sequence.token_ids == IMAGE).sum())
            assert placeholders == sum(medium.num_tokens for medium in sequence.media)
            assert not (sequence.is_trained & (sequence.token_ids == IMAGE)).any()
            with torch.no_grad():
                expected = own_logprobs(policy, row_of(sequence))
            policy.use_stream("prefix")
            gap = (torch.from_numpy(sequence.logprobs.copy()) - expected).abs().max()
            assert float(gap) < 1e-5
        # That of the prompt, of the reset, and of two steps.
        assert [medium.num_tokens for medium in episode.tokens[-1].media] == [6, 12, 6, 12]
    (image,) = environment.seen[0]["images"]
    assert image["covey_image"] is True


def test_a_tool_gives_images(codec: TextCodec, tmp_path: Path) -> None:
    """What it says beside them holds no control token."""
    (tmp_path / "tool.py").write_text(TOOL)
    tools, faults = start_tools(
        [f"{tmp_path / 'tool.py'}:look"], workers=1, timeout_s=30.0, memory_gb=None, max_result_chars=500
    )
    assert not faults
    numbers = count()

    def says(turn: Any) -> str:
        if turn.turn == 2:
            return "Red."
        call = f'{{"name": "look", "arguments": {{"colour": {100 + next(numbers)}}}}}'
        return f"<tool_call>\n{call}\n</tool_call>"

    try:
        agents = agents_for(codec, tools=tools)  # type: ignore[arg-type]
        prompt = prompt_of(codec, [{"role": "user", "content": "Look."}], [*tools.schemas.values()])
        (episode,), engine = episodes_of(codec, prompt, says, agents)
    finally:
        tools.close()
    assert episode.outcome is Outcome.SCORED, episode.failure
    (sequence,) = episode.tokens
    assert [medium.num_tokens for medium in sequence.media] == [6, 6, 6]
    assert int((sequence.token_ids == IMAGE).sum()) == 18
    assert len(sequence.media[0].key) and sequence.media[1] == sequence.media[2] != sequence.media[0]
    assert [len(request.media) for request in engine.requests] == [0, 1, 3]
    assert episode.turns[1].results[0].content == "[image]seen <|image_pad|>[image]"
    tool = [n for source, n in sequence.sources if source is Source.TOOL]
    assert tool[1] > tool[0]


def test_an_image_that_the_template_does_not_write_loses_the_episode(
    vision_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else '-' }}\n{% endfor %}a:"
    )
    codec = load_codec(vision_model, chat_template=str(tmp_path / "t.jinja"))
    prompt = prompt_of(codec, [{"role": "user", "content": "Look."}])
    (episode,), _ = episodes_of(codec, prompt, lambda turn: "Yes.", agents_for(codec, environment=Looks()))
    assert episode.outcome is Outcome.INFRASTRUCTURE
    assert "images: 1, places for them: 0" in episode.failure
