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
from covey.rollout.engine import Engine
from covey.rollout.generate import GenerateEngine
from covey.rollout.native.engine import NativeEngine
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.token_streams import Row
from covey.types import Episode, Origin, Outcome, Prompt, SamplingParams, Source, TokenSequence
from support import squares, vision
from support.agents import agents_for, episodes_of, prompt_of
from support.schedulers import scheduling
from support.vision import IMAGE, picture

# The placeholders of an image of 24 x 16 pixels, and of one of 32 x 24.
FAMILIES = {"qwen2_5_vl": (6, 12), "gemma3": (4, 4), "smolvlm": (28, 40)}
TOOL = """
from PIL import Image


def look(colour: int) -> object:
    \"\"\"Look at a picture.

    Args:
        colour: Its red.
    \"\"\"
    image = Image.new("RGB", (24, 16), (colour, 0, 0))
    return [image, "seen MARK", image] if colour > 100 else image
"""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_model = squares.save_model if family in squares.FAMILIES else vision.save_model
    return save_model(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def codec(model: Path) -> TextCodec:
    return load_codec(model)


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    policy = load_policy(model, device=torch.device("cpu"), disable_dropout=True)
    choose_stream(policy)
    return policy.eval()


class Looks:
    """An environment of three turns, each of which begins with a picture; `seen` has the rows."""

    name, has_step, has_tools, has_reward, takes_seed = "Looks", True, False, False, True
    keeps_history = False
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


def own_logprobs(policy: Policy, family: str, row: Row) -> torch.Tensor:
    """Return the logprobs (N,) of the trained tokens of a row by the model's own forward pass."""
    stream, own = policy.stream, squares if family in squares.FAMILIES else vision
    with torch.no_grad():
        found = own.own_logprobs(policy, row)
    policy.use_stream(stream)
    return found


def played(codec: TextCodec, policy: Policy, environment: Any) -> list[Episode]:
    plan = CollectPlan(
        num_generations=2,
        sampling=SamplingParams(
            temperature=1.0,
            max_new_tokens=300,
            # A random model ends its turns soon by chance.
            stop_token_ids=tuple(range(0, 300, 4)),
            banned_token_ids=policy.head.banned,
        ),
        seed=1,
    )
    agents = agents_for(codec, environment=environment, max_tokens=400)
    # Rows of Gemma are padded, and `generate` alone samples them.
    engine: Engine = GenerateEngine(policy) if policy.stream == "padded" else NativeEngine(policy)
    loop = TurnLoop(slots_of([begin(codec)], plan), engine, codec, agents, Activity())
    found = dict(loop.episodes())
    return [found[number] for number in range(2)]


def test_an_environment_gives_images_and_is_given_those_of_its_row(
    codec: TextCodec, policy: Policy, family: str
) -> None:
    environment = Looks()
    small, large = FAMILIES[family]
    for episode in played(codec, policy, environment):
        assert episode.outcome is Outcome.SCORED, episode.failure
        assert len(episode.turns) == 3
        for sequence in episode.tokens:
            placeholders = int((sequence.token_ids == IMAGE).sum())
            assert placeholders == sum(medium.num_tokens for medium in sequence.media)
            assert not (sequence.is_trained & (sequence.token_ids == IMAGE)).any()
            expected = own_logprobs(policy, family, row_of(sequence))
            gap = (torch.from_numpy(sequence.logprobs.copy()) - expected).abs().max()
            assert float(gap) < 1e-5
        # That of the prompt, of the reset, and of two steps.
        assert [one.num_tokens for one in episode.tokens[-1].media] == [small, large, small, large]
    (image,) = environment.seen[0]["images"]
    assert image["covey_image"] is True


def test_a_scheduler_gives_images(codec: TextCodec, policy: Policy, family: str) -> None:
    """Each `<image>` of its messages stands for one of `images` of the request, in their order."""
    small, _ = FAMILIES[family]
    with scheduling("Looks") as host:
        episodes = played(codec, policy, host)
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED, episode.failure
        assert len(episode.turns) == 2
        (sequence,) = episode.tokens
        first, second = sequence.media
        assert first.key == second.key and first.num_tokens == small
        assert int((sequence.token_ids == IMAGE).sum()) == 2 * small
        expected = own_logprobs(policy, family, row_of(sequence))
        assert float((torch.from_numpy(sequence.logprobs.copy()) - expected).abs().max()) < 1e-5


def test_a_tool_gives_images(codec: TextCodec, family: str, tmp_path: Path) -> None:
    """What it says beside them holds no control token."""
    assert codec.vision is not None
    mark, num = codec.vision.opening or codec.vision.token, FAMILIES[family][0]
    (tmp_path / "tool.py").write_text(TOOL.replace("MARK", mark))
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
    assert [medium.num_tokens for medium in sequence.media] == [num] * 3
    assert int((sequence.token_ids == IMAGE).sum()) == 3 * num
    assert len(sequence.media[0].key) and sequence.media[1] == sequence.media[2] != sequence.media[0]
    assert [len(request.media) for request in engine.requests] == [0, 1, 3]
    assert episode.turns[1].results[0].content == f"[image]seen {mark}[image]"
    tool = [n for source, n in sequence.sources if source is Source.TOOL]
    assert tool[1] > tool[0]


def test_an_image_that_the_template_does_not_write_loses_the_episode(model: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else '-' }}\n{% endfor %}a:"
    )
    codec = load_codec(model, chat_template=str(tmp_path / "t.jinja"))
    prompt = prompt_of(codec, [{"role": "user", "content": "Look."}])
    (episode,), _ = episodes_of(codec, prompt, lambda turn: "Yes.", agents_for(codec, environment=Looks()))
    assert episode.outcome is Outcome.INFRASTRUCTURE
    assert "images: 1, places for them: 0" in episode.failure
