"""Reward models in their worker: each row gets the logit that it would get alone, whatever is beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.rewards.apart import ModelEntry, conversations
from covey.rewards.callee import RowFault
from covey.rewards.protocol import TrainerState
from covey.rewards.reward_model import Conversation, RewardModel, UnusableModel
from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import answered
from covey.types import Origin, Prompt, Status
from support.reward_models import plain_reward, write_reward_model

TEXTS = (
    "What is 1+2?",
    "3",
    "a much longer text than the others are, with 12 words in it",
    "no",
    "3+4",
    "7 7 7",
)


def opened(directory: Path, rows: int = 8, tokens: int = 8192) -> RewardModel:
    return RewardModel(SimpleNamespace(directory=str(directory), rows=rows, tokens=tokens))


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "What is 1+2?"}, {"role": "assistant", "content": text}]


def numbers(values: Sequence[float | RowFault]) -> list[float]:
    assert not any(isinstance(v, RowFault) for v in values)
    return [v for v in values if not isinstance(v, RowFault)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("pad", [None, 315, 314])
def test_each_row_gets_what_it_would_get_alone(tmp_path: Path, family: str, pad: int | None) -> None:
    """With the model's own padding, with none, and with one that ends every turn."""
    directory = write_reward_model(tmp_path, family, pad_token_id=pad)
    rows: list[Conversation] = [*TEXTS, *(talk(text) for text in TEXTS)]
    expected = [plain_reward(directory, row) for row in rows]
    assert max(expected) - min(expected) > 0.1
    for batch in (1, 3, 8):
        assert numbers(opened(directory, rows=batch)(conversations=rows)) == pytest.approx(expected, abs=1e-5)
    mixed = list(reversed(rows))[:7]
    assert numbers(opened(directory)(conversations=mixed)) == pytest.approx(expected[:-8:-1], abs=1e-5)


def test_a_pass_is_bounded_in_rows_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(write_reward_model(tmp_path), rows=4, tokens=60)
    seen: list[list[int]] = []
    scores = model._scores

    def watched(rows: Sequence[Sequence[int]]) -> list[float]:
        seen.append([len(ids) for ids in rows])
        return scores(rows)

    monkeypatch.setattr(model, "_scores", watched)
    model(conversations=list(TEXTS) * 3)
    assert sum(map(len, seen)) == 18
    assert all(len(part) <= 4 and (len(part) == 1 or len(part) * max(part) <= 60) for part in seen)
    assert max(map(len, seen)) == 4


def test_a_row_beyond_the_context_is_a_fault_and_never_cut(tmp_path: Path) -> None:
    directory = write_reward_model(tmp_path, max_position_embeddings=20)
    short, long, nothing = opened(directory)(conversations=["1+2", "1+2" * 30, ""])
    assert short == pytest.approx(plain_reward(directory, "1+2"), abs=1e-5)
    assert isinstance(long, RowFault) and "exceed the reward model's context of 20" in long.words
    assert isinstance(nothing, RowFault)


def test_a_head_that_was_never_trained_is_refused(tmp_path: Path) -> None:
    file = write_reward_model(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        UnusableModel, match=r"no weights for score\.weight: the model was not trained to give scores"
    ):
        opened(tmp_path)


def test_dropout_is_off_and_numbers_are_float32(tmp_path: Path) -> None:
    directory = write_reward_model(tmp_path, attention_dropout=0.5, dtype="bfloat16")
    model = opened(directory)
    twice = numbers(model(conversations=["1+2"] * 2))
    assert twice == pytest.approx([plain_reward(directory, "1+2")] * 2, abs=1e-5)
    assert {p.dtype for p in model._model.parameters()} == {torch.float32}


def prompt(messages: tuple[dict[str, str], ...] | None, text: str) -> Prompt:
    return Prompt(
        id=0,
        messages=messages,
        text=text,
        token_ids=(1,),
        columns={"level": 3},
        origin=Origin(epoch=0, rollout=0),
        opened="<think>\n",
    )


def test_what_is_read_is_the_conversation_or_the_plain_text() -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"})
    templated = answered(prompt(messages, "<|user|>1+2?<think>\n"), "3", 0)
    templated = replace(templated, prompt=replace(templated.prompt, opened="<think>\n"))
    plain = answered(prompt(None, "1+2="), "3", 0)
    begun = (*messages, {"role": "assistant", "content": "<think>\n"})
    continued = replace(templated, prompt=replace(templated.prompt, messages=begun))
    turns = [*messages, {"role": "assistant", "content": "<think>\n3"}]
    assert conversations([templated, continued, plain]) == {"conversations": [turns, turns, "1+2=3"]}


def test_a_model_runs_in_a_process_of_its_own_and_ends_with_the_set(tmp_path: Path) -> None:
    directory = write_reward_model(tmp_path / "tiny-rm")
    entry = ModelEntry(entry=str(directory), name="tiny-rm", directory=str(directory))
    rows = [answered(prompt(None, "1+2="), text, 0) for text in ("3", "4", "5" * 600)]
    with RewardSet.start(["format", entry]) as rewards:
        assert rewards.names == ("format", "tiny-rm") and rewards.apart == ("tiny-rm",)
        assert rewards.without(["tiny-rm"]).names == ("format",)
        assert rewards.pids == ()
        judged = rewards.score(rows, TrainerState())
        (pid,) = rewards.pids
        parts = [row.parts[1] for row in judged.rows]
    assert [p.value for p in parts[:2]] == pytest.approx(
        [plain_reward(directory, f"1+2={t}") for t in "34"], abs=1e-5
    )
    assert parts[2].status is Status.ERROR and "context" in parts[2].message
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    entries = [ModelEntry(entry=f"{n}/rm", name="rm", directory=str(tmp_path / n)) for n in ("a", "b")]
    with RewardSet.start(entries) as rewards:
        assert rewards.names == ("a.rm", "b.rm")


def test_a_model_that_cannot_be_loaded_fails_on_every_row(tmp_path: Path) -> None:
    entry = ModelEntry(entry="gone", name="gone", directory=str(tmp_path / "gone"))
    with RewardSet.start([entry]) as rewards:
        judged = rewards.score([answered(prompt(None, "1"), "2", 0)], TrainerState())
    part = judged.rows[0].parts[0]
    assert part.status is Status.ERROR and "RewardModel could be created" in part.message
