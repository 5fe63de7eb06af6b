"""Episodes that a function makes: those of an engine where it only samples, turns, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.activity import Activity
from covey.codes import CODES
from covey.data.rows import prompt_table
from covey.data.text import TextCodec
from covey.errors import EngineLost, RunFailed
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rewards.protocol import Scored
from covey.rollout.by_function import FunctionEpisodes
from covey.rollout.function_context import RolloutContext, RolloutFunction
from covey.rollout.native.engine import NativeEngine
from covey.rollout.single_turns import SingleTurns
from covey.rollout.slots import CollectPlan, Slot, slots_of
from covey.training.scoring import step_tokens
from covey.trl.experimental.openenv import generate_rollout_completions
from covey.types import (
    Completion,
    Episode,
    Finding,
    GenerationRequest,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Source,
)
from support.checks import config

MOST = 12
NAMES = ("prompt_ids", "completion_ids", "logprobs")
Function = Callable[[list[Any], RolloutContext], Any]


def gathered(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a function returns of completions."""
    return {name: [result[name] for result in results] for name in NAMES}


def once(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
    return gathered(trainer.generate(prompts))


def one_by_one(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
    return gathered([result for prompt in prompts for result in trainer.generate([prompt])])


def of_trl(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
    return gathered(generate_rollout_completions(trainer, prompts, as_chat=True))


def turns(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
    """Two turns with three tokens of the environment between them, and two behind."""
    first = trainer.generate(prompts, max_tokens=4)
    asked = [[*f["prompt_ids"], *f["completion_ids"], 65, 66, 67] for f in first]
    second = trainer.generate(asked)
    pairs = list(zip(first, second, strict=True))
    return {
        "prompt_ids": [f["prompt_ids"] for f in first],
        "completion_ids": [
            [*f["completion_ids"], 65, 66, 67, *s["completion_ids"], 68, 69] for f, s in pairs
        ],
        "logprobs": [[*f["logprobs"], 0.0, 0.0, 0.0, *s["logprobs"], 0.0, 0.0] for f, s in pairs],
        "env_mask": [
            [*[1] * len(f["completion_ids"]), 0, 0, 0, *[1] * len(s["completion_ids"]), 0, 0]
            for f, s in pairs
        ],
    }


@pytest.fixture(scope="module")
def prompts(quickstart_codec: TextCodec) -> list[Prompt]:
    table = prompt_table(task.training_rows()[:3], quickstart_codec, max_length=None)
    return [table.take(number, Origin(epoch=0, rollout=3)) for number in range(3)]


@pytest.fixture
def play(
    quickstart_policy: Policy, quickstart_codec: TextCodec, prompts: list[Prompt]
) -> Callable[..., list[Episode]]:
    """The episodes of two siblings of each prompt; without a function those of one turn. `sampling` changes
    how they are drawn."""

    def run(
        function: Function | None,
        *,
        split: str = "train",
        engine: Any = None,
        context: int | None = None,
        own: list[Prompt] = prompts,
        **sampling: Any,
    ) -> list[Episode]:
        drawn = SamplingParams(
            temperature=1.0, max_new_tokens=MOST, stop_token_ids=quickstart_codec.stop_token_ids
        )
        plan = CollectPlan(num_generations=2, sampling=replace(drawn, **sampling), seed=11, split=split)
        slots = slots_of(own, plan)
        engine = engine or NativeEngine(quickstart_policy, tokenizer=quickstart_codec.tokenizer)
        with torch.no_grad():
            loop = _loop(slots, engine, function, quickstart_policy, quickstart_codec, context)
            found = dict(loop.episodes())
        return [replace(found[number], seconds=0.0) for number in range(len(slots))]

    return run


def _loop(
    slots: Sequence[Slot],
    engine: Any,
    function: Function | None,
    policy: Policy,
    codec: TextCodec,
    context: int | None,
) -> FunctionEpisodes | SingleTurns:
    if function is None:
        return SingleTurns(slots, engine, codec, Activity())
    held = RolloutFunction(
        call=function, args=config(), policy=policy, load_tokenizer=object, model_context=context
    )
    return FunctionEpisodes(slots, engine, codec, held, Activity())


# -- what the engine draws


@pytest.mark.parametrize("split", ["train", "eval/held"])
@pytest.mark.parametrize("function", [once, one_by_one, of_trl])
@pytest.mark.parametrize(
    "sampling",
    [{"max_new_tokens": 4}, {"temperature": 0.7, "top_p": 0.8}, {"stop_strings": ("</answer>",)}],
    ids=str,
)
def test_a_function_that_only_samples_gives_the_episodes_of_the_engine(
    function: Function, sampling: dict[str, Any], split: str, play: Callable[..., list[Episode]]
) -> None:
    alone = play(None, split=split, **sampling)
    assert play(function, split=split, **sampling) == alone
    assert (Outcome.TRUNCATED in {e.outcome for e in alone}) == ("max_new_tokens" in sampling)
    assert (alone[0].tokens[0].kept is not None) == (split == "train" and "top_p" in sampling)


def test_text_prompts_are_given_as_they_stand(
    prompts: list[Prompt], quickstart_codec: TextCodec, play: Callable[..., list[Episode]]
) -> None:
    seen: list[Any] = []

    def function(given: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        seen.extend(given)
        return once(given, trainer)

    raw = [replace(p, messages=None) for p in prompts]
    assert play(function, own=raw) == play(None, own=raw)
    assert seen == [p.text for p in raw for _ in range(2)]
    seen.clear()
    play(function)
    assert seen == [[dict(m) for m in p.messages or ()] for p in prompts for _ in range(2)]


def test_turns_train_what_the_model_wrote(
    prompts: list[Prompt], play: Callable[..., list[Episode]], quickstart_codec: TextCodec
) -> None:
    outcomes: set[Outcome] = set()
    for sampling in ({"max_new_tokens": 4}, {"top_k": 5}):
        episodes = play(turns, **sampling)
        firsts = play(None, **{**sampling, "max_new_tokens": 4})
        for episode, first in zip(episodes, firsts, strict=True):
            (own,), (before,) = episode.tokens, first.tokens
            a = before.num_trained
            kinds = [source for source, _ in own.sources]
            assert kinds == [
                *(Source.PROMPT, Source.MODEL, Source.ENVIRONMENT, Source.MODEL, Source.ENVIRONMENT)
            ]
            assert own.token_ids[: before.length].tolist() == before.token_ids.tolist()
            assert own.logprobs[:a].tolist() == before.logprobs.tolist()
            assert own.trained_ids.tolist() == [
                *before.trained_ids.tolist(),
                *own.token_ids[before.length + 3 : -2].tolist(),
            ]
            assert own.versions == ((0, own.num_trained),)
            assert episode.text == quickstart_codec.decode(own.completion_ids.tolist())
            ends = own.trained_ids[-1] in quickstart_codec.stop_token_ids
            assert episode.outcome is (Outcome.SCORED if ends else Outcome.TRUNCATED)
            if "top_k" in sampling:
                assert own.kept is not None and own.kept.lacks(own.trained_ids) == []
                assert own.kept.counts.tolist() == [5] * own.num_trained
        outcomes |= {e.outcome for e in episodes}
    assert outcomes == {Outcome.SCORED, Outcome.TRUNCATED}


def test_each_request_has_noise_of_its_own(
    play: Callable[..., list[Episode]], quickstart_policy: Policy
) -> None:
    asked: list[GenerationRequest] = []

    class Watched(NativeEngine):
        def submit(self, request: GenerationRequest) -> int:
            asked.append(request)
            return super().submit(request)

    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        trainer.generate(prompts[:2])
        return once(prompts, trainer)

    play(function, engine=Watched(quickstart_policy))
    ids = [request.turn for request in asked]
    assert len({turn.text for turn in ids}) == len(ids) == 8
    assert [(t.prompt_id, t.sibling, t.turn) for t in ids] == [
        *((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (0, 0, 1), (0, 1, 1)),
    ]


def test_threads_of_a_function_take_turns(play: Callable[..., list[Episode]]) -> None:
    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda prompt: trainer.generate([prompt]), prompts))
        return gathered([row for rows in found for row in rows])

    episodes, alone = play(function), play(None)
    assert [e.tokens[0].prompt_ids.tolist() for e in episodes] == [
        e.tokens[0].prompt_ids.tolist() for e in alone
    ]
    assert all(e.outcome is Outcome.SCORED for e in episodes)


def test_what_the_context_says(play: Callable[..., list[Episode]], quickstart_policy: Policy) -> None:
    seen: list[Any] = []

    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        seen.append((trainer.num_generations, trainer.is_eval, trainer.step, trainer.state.global_step))
        assert trainer.args.reward_funcs == ["accuracy"] and type(trainer.processing_class) is object
        found = trainer.generate(prompts)
        for result in found[:2]:
            before, ids = len(result["prompt_ids"]), [*result["prompt_ids"], *result["completion_ids"]]
            logits = trainer.model(torch.tensor([ids])).logits[0, before - 1 : -1]
            own = logits.log_softmax(-1).gather(1, torch.tensor(result["completion_ids"])[:, None])[:, 0]
            assert own.tolist() == pytest.approx(result["logprobs"], abs=1e-4)
        return gathered(found)

    stream = quickstart_policy.stream
    assert play(function) == play(None) and play(function, split="eval/held") == play(None, split="eval/held")
    assert seen == [(2, False, 0, 0), (2, True, 0, 0)] and quickstart_policy.stream == stream != "padded"


def test_steps_end_behind_tokens_of_the_model(
    prompts: list[Prompt], play: Callable[..., list[Episode]], quickstart_codec: TextCodec
) -> None:
    def function(given: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        (said,) = quickstart_codec.encode(["one\n\ntwo\n\nthree"])
        masks = [[int(index % 2 == 0) for index in range(len(said))] for _ in given]
        values = [[-1.0] * len(said)] * len(given)
        ids = [[1]] * len(given)
        return {
            **{"prompt_ids": ids, "completion_ids": [list(said)] * len(given), "logprobs": values},
            "env_mask": masks,
        }

    (episode, *_) = play(function)
    ends = step_tokens(quickstart_codec, "\n\n")(Scored.of(prompts[0], episode))
    num = quickstart_codec.tokens_until(
        episode.completion_ids, episode.text, [len("one\n\n"), len("one\n\ntwo\n\n")]
    )
    assert ends == (*((count + 1) // 2 for count in num), episode.num_trained)
    assert 0 < ends[0] < ends[1] < ends[2]


# -- what generate takes


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"temperature": 0.5}, r"temperature 0\.5, but the run samples with 1:"),
        ({"top_k": 3}, "top_k 3, but the run samples with 0:"),
        ({"n": 4}, "n 4, but the run samples with 1:"),
        ({"seed": 1}, "does not take seed; it takes max_completion_length, max_tokens, max_new_tokens, stop"),
        ({"max_tokens": 0}, "max_tokens 0; it is at least 1"),
        ({"as_chat": False}, "as_chat is False, but the prompts say otherwise"),
    ],
    ids=str,
)
def test_an_override_that_would_make_other_probabilities_is_refused(
    overrides: dict[str, Any], words: str, play: Callable[..., list[Episode]]
) -> None:
    with pytest.raises(ValueError, match=words):
        play(lambda prompts, trainer: trainer.generate(prompts, **overrides))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "without tokens"),
        ([5, 10**6], "ids outside of"),
        ([7] * 30, "a prompt of 30 tokens, but model and engine hold 30"),
        ([{"role": "assistant", "content": "4"}], "end with one of the assistant"),
    ],
    ids=["empty", "unknown", "long", "assistant"],
)
def test_a_prompt_that_cannot_be_sampled_behind_is_refused(
    prompt: Any, words: str, play: Callable[..., list[Episode]]
) -> None:
    with pytest.raises(ValueError, match=words):
        play(lambda prompts, trainer: trainer.generate([prompt]), context=30)
    with pytest.raises(ValueError, match="a list of prompts"):
        play(lambda prompts, trainer: trainer.generate("What is 1+1?"))


def test_overrides_end_completions(play: Callable[..., list[Episode]], quickstart_codec: TextCodec) -> None:
    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        own = {"temperature": 1.0, "top_p": None, "top_k": -1, "repetition_penalty": 1.0}
        plain = trainer.generate(prompts, max_new_tokens=5, **own)
        assert {len(r["completion_ids"]) for r in plain} <= {1, 2, 3, 4, 5}
        assert [quickstart_codec.decode(r["completion_ids"]) for r in plain] == [r["text"] for r in plain]
        stopped = trainer.generate(prompts, stop=["<answer>"])
        assert any(r["text"].endswith("<answer>") for r in stopped)
        assert all(r["text"].partition("<answer>")[2] == "" for r in stopped)
        return gathered(stopped)

    episodes = play(function)
    assert all(e.outcome is Outcome.SCORED for e in episodes if e.text.endswith("<answer>"))
    by_text = play(lambda prompts, trainer: once(["What is 2+2? "] * len(prompts), trainer))
    (ids,) = quickstart_codec.encode(["What is 2+2? "], add_special_tokens=True)
    assert {tuple(e.tokens[0].prompt_ids.tolist()) for e in by_text} == {ids}
    assert by_text[0].prompt_text == "What is 2+2? "


# -- what a function returns


def changed(**changes: Any) -> Function:
    """A function that returns something else of its completions, by what makes it of a row or of all."""

    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        found = once(prompts, trainer)
        for name, change in changes.items():
            if callable(change):
                found[name] = [change(*row) for row in zip(*(found[n] for n in NAMES), strict=True)]
            else:
                found[name] = change
        return {name: value for name, value in found.items() if value is not None}

    return function


def test_what_cannot_be_trained_is_named(play: Callable[..., list[Episode]]) -> None:
    with pytest.raises(RunFailed, match="prompt_ids has 3 entries for 6 prompts") as caught:
        play(lambda prompts, trainer: once(prompts[::2], trainer))
    finding = caught.value.finding
    assert finding.code == "F145" and finding.why == CODES["F145"].why and finding.step == 0
    with pytest.raises(RunFailed, match=r"row 0: it has [0-9]+ tokens, but the model holds 100"):
        play(changed(prompt_ids=lambda p, c, lp: p * 50), context=100)


def test_under_filters_a_completion_is_returned_whole(play: Callable[..., list[Episode]]) -> None:
    cut = changed(completion_ids=lambda p, c, lp: c[:2], logprobs=lambda p, c, lp: lp[:2])
    assert all(e.tokens[0].num_trained <= 2 for e in play(cut))
    with pytest.raises(RunFailed, match="row 0: top_p, top_k or min_p leave out tokens"):
        play(cut, top_k=5)
    assert play(cut, top_k=5, split="eval/held")[0].tokens[0].kept is None


def test_logprobs_may_be_those_of_the_model_or_have_others_beside(play: Callable[..., list[Episode]]) -> None:
    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        found = once(prompts, trainer)
        ids, values = found["completion_ids"], found["logprobs"]
        found["logprobs"] = [[[-9.0, v] for v in row] for row in values]
        found["logprob_token_ids"] = [[[i + 1, i] for i in row] for row in ids]
        return {name: tuple(value) for name, value in found.items()}

    def of_tensors(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        found = once(prompts, trainer)
        return {n: [torch.tensor(row) for row in v] for n, v in found.items()}

    def of_model(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        found = turns(prompts, trainer)
        pairs = zip(found["logprobs"], found["env_mask"], strict=True)
        found["logprobs"] = [[v for v, own in zip(*pair, strict=True) if own] for pair in pairs]
        return found

    single = changed(
        logprobs=lambda p, c, lp: [[v] for v in lp], logprob_token_ids=lambda p, c, lp: [[i] for i in c]
    )
    assert play(function) == play(of_tensors) == play(single) == play(None)
    assert play(of_model) == play(turns)


def test_what_is_given_beside_the_tokens_goes_to_the_rewards(
    prompts: list[Prompt], play: Callable[..., list[Episode]]
) -> None:
    episodes = play(changed(won=[1, 0, 1, 0, 1, 0], score=torch.arange(6), level="easy"))
    rows = [Scored.of(prompts[number // 2], episode) for number, episode in enumerate(episodes)]
    assert [(r.prompt.columns["won"], r.prompt.columns["score"]) for r in rows] == [
        *((1, 0), (0, 1), (1, 2), (0, 3), (1, 4), (0, 5))
    ]
    assert {r.prompt.columns["level"] for r in rows} == {"easy"}
    assert rows[2].prompt.columns["solution"] == prompts[1].columns["solution"]


def test_a_prompt_of_the_function_opens_what_its_text_ends_with(
    prompts: list[Prompt], play: Callable[..., list[Episode]], quickstart_codec: TextCodec
) -> None:
    own = [replace(p, opened="<think>\n") for p in prompts]
    for text, expected in (("Think. <think>\n", "<think>\n"), ("Think.", "")):
        (episode, *_) = play(lambda given, trainer, text=text: once([text] * len(given), trainer), own=own)
        row = Scored.of(own[0], episode)
        assert row.text == expected + episode.text and row.prompt.messages == own[0].messages


# -- what fails


def test_an_error_of_the_function_is_its_own(
    play: Callable[..., list[Episode]], quickstart_policy: Policy
) -> None:
    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        trainer.generate(prompts)
        raise KeyError("sandbox")

    stream = quickstart_policy.stream
    with pytest.raises(KeyError, match="sandbox"):
        play(function)
    assert quickstart_policy.stream == stream


class Gone(NativeEngine):
    """Loses what it has after three completions."""

    def results(self) -> Iterator[Completion]:
        for number, completion in enumerate(super().results()):
            if number == 3:
                raise EngineLost(Finding(code="F140", seen="no server is left", why="", cause=""))
            yield completion


@pytest.mark.parametrize("is_caught", [False, True])
def test_where_nothing_is_left_to_sample_the_episodes_are_lost(
    is_caught: bool, play: Callable[..., list[Episode]], quickstart_policy: Policy
) -> None:
    def function(prompts: list[Any], trainer: RolloutContext) -> dict[str, Any]:
        try:
            return once(prompts, trainer)
        except Exception as error:
            if is_caught:
                return {}
            raise ValueError("it does not answer") from error

    episodes = play(function, engine=Gone(quickstart_policy))
    assert {(e.outcome, e.failure) for e in episodes} == {(Outcome.INFRASTRUCTURE, "no server is left")}
    assert len(episodes) == 6 and not any(e.sequences for e in episodes)
