"""ms-swift's schedulers on real templates: what stands in front of each turn is the conversation as the
scheduler has left it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest

from covey.data.text import TextCodec, load_codec
from covey.environments.environment_host import HostedEnvironments
from covey.types import Source
from support.real import real
from support.schedulers import Played, play_rows, scheduling

USER = {"role": "user", "content": "What is 2*3?"}
# Of each the tokenizer, and what it is told of thinking.
CODECS = {
    "qwen3": ("qwen3", None),
    "qwen3 does not think": ("qwen3", False),
    "llama3_1": ("llama3_1", None),
    "gemma3": ("gemma3", None),
    "smollm2": ("smollm2", None),
}
THOUGHT = "<think>\nI add, which is 5.\n</think>\n\nIt is <answer>5</answer>."
PLAIN = "I add, which is 5. It is <answer>5</answer>."


@pytest.fixture(scope="module")
def host() -> Iterator[HostedEnvironments]:
    with scheduling() as host:
        yield host


# A tokenizer takes hundreds of megabytes.
@lru_cache(maxsize=2)
def codec_of(name: str) -> TextCodec:
    tokenizer, thinking = CODECS[name]
    return load_codec(real(tokenizer), enable_thinking=thinking)


def said(name: str) -> str:
    return THOUGHT if name == "qwen3" else PLAIN


def played(host: HostedEnvironments, name: str, kind: str) -> Played:
    row = {"kind": kind, "solution": "6"}
    return play_rows(host, codec_of(name), lambda turn: said(name), [row], messages=[USER])


@pytest.mark.parametrize("name", CODECS)
def test_a_doubt_stands_behind_the_very_tokens(name: str, host: HostedEnvironments) -> None:
    codec = codec_of(name)
    found = played(host, name, "math_tip_trick")
    first, second = found.requests
    prompt = codec.render([USER])
    kept = said(name)[: said(name).index("</think>" if name == "qwen3" else "<answer>")]
    doubt = "But wait... It seems I made a mistake,"
    assert codec.written_out(second.prompt_token_ids) == prompt + kept + doubt
    assert first.prompt_token_ids == codec.encode([prompt])[0]
    (sequence,) = found.one.sequences
    (_, before), (_, num_kept), (_, _), (_, last) = sequence.sources
    sampled = codec.encode([said(name)])[0]
    assert sequence.token_ids.tolist()[before : before + num_kept] == list(sampled[:num_kept])
    assert [source for source, _ in sequence.sources] == [
        *(Source.PROMPT, Source.MODEL, Source.ENVIRONMENT, Source.MODEL),
    ]
    assert sequence.num_trained == num_kept + last and last == len(sampled) + 1
    assert found.notes == []


@pytest.mark.parametrize("name", CODECS)
def test_a_turn_behind_a_turn_is_the_whole_rendering(name: str, host: HostedEnvironments) -> None:
    """Qwen 3 takes earlier thoughts out, so that its second turn begins a sequence."""
    codec = codec_of(name)
    found = played(host, name, "thinking_tips_scheduler")
    tip = "Your answer is not right. Check your reasoning very carefully, and answer again."
    messages = [USER, {"role": "assistant", "content": said(name)}, {"role": "user", "content": tip}]
    rendered = codec.render(messages)
    assert found.requests[1].prompt_token_ids == codec.encode([rendered])[0]
    assert len(found.one.sequences) == (2 if "qwen3" in name else 1)
    # An output of each turn, whose history is without thoughts.
    first, second = found.one.columns["trajectory_inputs"]["outputs"]
    plain = "It is <answer>5</answer>." if name == "qwen3" else PLAIN
    assert [m["content"] for m in second["messages"]] == [USER["content"], plain, tip, said(name)]
    assert [m["content"] for m in first["messages"]] == [USER["content"], said(name)]


@pytest.mark.parametrize("name", CODECS)
def test_a_turn_that_another_one_has_begun_is_rendered_up_to_its_words(
    name: str, host: HostedEnvironments
) -> None:
    codec = codec_of(name)
    found = played(host, name, "Prefills")
    asked = [{"role": "user", "content": "What?"}]
    prompt = codec.written_out(found.requests[1].prompt_token_ids)
    assert prompt.endswith("It is") and prompt.startswith(codec.render(asked).split("What?")[0] + "What?")
    assert len(found.one.sequences) == 2
