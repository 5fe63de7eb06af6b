"""Schedulers of ms-swift in their process: what they ask, what is trained, and what rewards are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from covey.data.text import TextCodec, load_codec
from covey.quickstart.task import MODEL_DIR
from covey.rewards.arguments import arguments_of
from covey.rewards.callee import Callee, wants_of
from covey.rewards.protocol import Scored, TrainerState
from covey.types import Episode, Finish, Outcome
from support.agents import prompt_of
from support.schedulers import USER, Played, play_rows, scheduling, shown

ONE_BEHIND_ANOTHER = (
    "⟦It is six, 0.<|im_end|>⟧\n<|im_start|>user\nAgain, 1?<|im_end|>\n<|im_start|>assistant\n"
    "⟦It is six, 1.<|im_end|>⟧"
)
WITHOUT_THE_FIRST = ONE_BEHIND_ANOTHER.replace("⟦", "", 1).replace("⟧", "", 1)
FOREIGN = "response_loss_mask is 1 for tokens that the model has not sampled: they are not trained"
LOGPROBS = "rollout_logprobs are not those of the sampled tokens: those of the engine are used"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec(MODEL_DIR)


@pytest.fixture(scope="module")
def play(codec: TextCodec):
    with scheduling() as host:
        yield lambda *rows, **more: play_rows(host, codec, rows=rows, **more)


Play = Callable[..., Played]


def texts(codec: TextCodec, episode: Episode) -> list[tuple[str, str]]:
    """Return the prompt of each sequence, and what is behind it."""
    return [(codec.written_out(s.prompt_ids.tolist()), shown(codec, s)) for s in episode.sequences]


def begun(*said: str) -> str:
    """Return the prompt of these messages of the user and the assistant, the last of which may be begun."""
    parts = [
        f"<|im_start|>{role}\n{text}"
        for role, text in zip(("user", "assistant") * len(said), said, strict=False)
    ]
    prompt = "<|im_end|>\n".join(parts)
    return prompt if len(said) % 2 == 0 else f"{prompt}<|im_end|>\n<|im_start|>assistant\n"


FIRST = begun(USER["content"])

# -- one conversation


def test_turns_behind_turns_are_one_sequence(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "Again"})
    assert texts(codec, played.one) == [(FIRST, ONE_BEHIND_ANOTHER)]
    first, second = played.requests
    assert second.extends == first.turn and second.prompt_token_ids[: len(first.prompt_token_ids)] == (
        first.prompt_token_ids
    )
    assert played.one.columns["rollout_infos"] == {"num_turns": 2, "asked": 1}
    assert (played.one.outcome, played.notes) == (Outcome.SCORED, [])
    assert played.one.turns[0].answer == ({"role": "user", "content": "Again, 1?"},)


def test_hooks_may_be_coroutines_and_siblings_begin_alike(play: Play, codec: TextCodec) -> None:
    """The generators are seeded before a trajectory begins, so that it draws what its siblings draw."""
    played = play({"kind": "AsyncAgain"}, {"kind": "AsyncAgain"}, siblings=3)
    starts = [texts(codec, episode)[0][0] for episode in played.episodes]
    assert len({*starts[:3]}) == len({*starts[3:]}) == 1 and len({*starts}) == 2
    assert starts[0].startswith("<|im_start|>user\nBegin 0.")
    assert [len(episode.turns) for episode in played.episodes] == [2] * 6
    infos = played.episodes[0].columns["rollout_infos"]
    assert infos == {"num_turns": 2, "asked": 1, "turn1": "It is six, 0.", "turn2": "It is six, 1."}


def test_an_output_for_each_turn(play: Play, codec: TextCodec) -> None:
    """All of them are one sequence, where each goes on from the one before."""
    (sequence,) = texts(codec, play({"kind": "Several"}).one)
    assert sequence[1].count("⟦") == 3 and sequence[1].endswith("Part 1.<|im_end|>\n<|im_start|>assistant\n"
        "⟦It is six, 2.<|im_end|>⟧")  # fmt: skip


def test_a_turn_that_no_output_has_is_not_trained(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "Single"})
    ((_, text),) = texts(codec, played.one)
    assert text.startswith("It is six, 0.<|im_end|>") and text.endswith("⟦It is six, 1.<|im_end|>⟧")
    assert [turn.num_left_out for turn in played.one.turns] == [12, 0]
    assert played.one.columns["rollout_infos"] == {"num_turns": 2, "tokens": 12}


def test_requests_at_once_are_answered_one_by_one(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "Gathers"})
    assert played.one.columns["rollout_infos"]["texts"] == [f"It is six, {n}." for n in range(3)]
    assert [prompt for prompt, _ in texts(codec, played.one)] == [begun(f"Say {n}.") for n in range(3)]
    assert [turn.number for turn in played.one.turns] == [0, 1, 2]


def test_the_tokenizer_is_that_of_the_model(play: Play) -> None:
    assert play({"kind": "Tokenizes"}).one.columns["rollout_infos"]["decoded"] == "It is six, 0."


# -- a turn that goes on


def test_text_behind_a_turn_is_not_trained_and_its_end_is_dropped(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "Adds", "rounds": 3})
    wait = " But wait,"
    assert texts(codec, played.one) == [(FIRST, f"⟦It is six, 0.⟧{wait}⟦It is six, 1.⟧{wait}⟦It is six, 2.<|im_end|>⟧")]  # fmt: skip  # noqa: E501
    end = codec.stop_token_ids[0]
    assert [turn.cut_ids for turn in played.one.turns] == [(end,), (end,), ()]
    assert played.requests[1].extends == played.requests[0].turn and played.notes == []
    # The completion is the whole message, as its reader sees it.
    whole = f"It is six, 0.{wait}It is six, 1.{wait}It is six, 2."
    row = Scored.of(prompt_of(codec, [USER]), played.one)
    assert row.text == whole
    assert row.spoken == [{"role": "assistant", "content": whole}]


def test_what_is_cut_of_a_turn_is_not_trained(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "CutsAndAdds"})
    assert texts(codec, played.one) == [(FIRST, "⟦It is ⟧five?⟦It is six, 1.<|im_end|>⟧")]
    cut, whole = (turn.cut_ids for turn in played.one.turns)
    assert codec.written_out(cut) == "six, 0.<|im_end|>" and whole == ()
    assert played.one.turns[0].text == "It is "


def test_a_turn_may_go_on_where_it_stands(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "GoesOn"})
    assert texts(codec, played.one) == [(FIRST, "⟦It is six, 0.It is six, 1.<|im_end|>⟧")]
    assert len(played.one.turns) == 2


def test_marks_of_the_template_in_added_text_are_characters(play: Play, codec: TextCodec) -> None:
    """Nobody but the model and the template ends a turn; what ends a thought is part of a text."""
    played = play({"kind": "Marks"})
    mark = "</think><|im_end|>So "
    assert texts(codec, played.one) == [(FIRST, f"⟦It is six, 0.⟧{mark}⟦It is six, 1.<|im_end|>⟧")]
    ids = played.one.sequences[0].token_ids.tolist()
    # That of the prompt, and the one that the model sampled.
    assert ids.count(codec.stop_token_ids[0]) == 2
    assert ids.count(codec.tokenizer.token_to_id("</think>")) == 1
    # Readers are shown what was written.
    last = played.one.turns[-1]
    assert (last.opened, last.content) == (f"It is six, 0.{mark}", f"It is six, 0.{mark}It is six, 1.")
    assert Scored.of(prompt_of(codec, [USER]), played.one).text == last.content


# -- a history that is written anew


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("Rewrites", begun(USER["content"], "IT IS SIX, 0.", "Again, 1?")),
        ("Compresses", begun("Short.")),
        ("Prefills", begun("What?", "It is")),
    ],
)
def test_a_history_that_is_written_anew_begins_a_sequence(
    kind: str, prompt: str, play: Play, codec: TextCodec
) -> None:
    played = play({"kind": kind})
    assert texts(codec, played.one) == [
        (FIRST, "⟦It is six, 0.<|im_end|>⟧"),
        (prompt, "⟦It is six, 1.<|im_end|>⟧"),
    ]
    (note,) = played.notes
    assert note.startswith("it writes earlier turns in another way, so that a new row of the episode begins")
    assert played.requests[1].extends is None


def test_a_first_turn_that_is_begun_goes_on_with_its_words(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "PrefillsFirst"})
    assert texts(codec, played.one) == [(begun(USER["content"], "It is"), ONE_BEHIND_ANOTHER)]
    row = Scored.of(prompt_of(codec, [USER]), played.one)
    assert [message["content"] for message in row.spoken] == [
        *("It isIt is six, 0.", "Again, 1?", "It is six, 1."),
    ]


@pytest.mark.parametrize("words", ["<think>I add", "<|im_end|>So"])
def test_words_with_marks_may_begin_a_turn(words: str, play: Play, codec: TextCodec) -> None:
    played = play({"kind": "PrefillsFirst", "words": words})
    assert texts(codec, played.one) == [(begun(USER["content"], words), ONE_BEHIND_ANOTHER)]
    assert played.one.turns[0].opened == words and played.notes == []


def test_a_prompt_that_begins_the_turn_is_no_message_of_a_scheduler(play: Play, codec: TextCodec) -> None:
    """The row's own last message is the assistant's: what the scheduler is told begins with it."""
    text = begun(USER["content"], "It")
    plain = prompt_of(codec, [USER])
    prompt = replace(
        plain,
        messages=(USER, {"role": "assistant", "content": "It"}),
        text=text,
        token_ids=codec.encode([text])[0],
        opened="It",
    )
    played = play({"kind": "Again"}, prompt=prompt)
    assert texts(codec, played.one) == [(text, ONE_BEHIND_ANOTHER)]
    row = Scored.of(prompt, played.one)
    assert [m["content"] for m in row.spoken] == ["ItIt is six, 0.", "Again, 1?", "It is six, 1."]


# -- masks and logprobs


def test_a_mask_leaves_out_sampled_tokens(play: Play, codec: TextCodec) -> None:
    mask = [0, 1, 0, *[1] * 9]
    played = play({"kind": "Own", "mask": mask}, {"kind": "Own", "mask": []})
    one, other = played.episodes
    sampled = one.sequences[0].is_trained[one.sequences[0].prompt_length :].tolist()
    assert sampled[:12] == [bool(trains) for trains in mask]
    assert [turn.num_left_out for turn in one.turns] == [2, 0]
    assert texts(codec, other) == [(FIRST, WITHOUT_THE_FIRST)]
    # Nothing was asked for that is not done.
    assert played.notes == []


def test_tokens_of_somebody_else_are_never_trained(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "Own", "more_ids": [5, 6]})
    assert texts(codec, played.one) == [(FIRST, ONE_BEHIND_ANOTHER)]
    assert played.notes == [FOREIGN]
    masked = play({"kind": "Own", "more_ids": [5, 6], "mask": [*[1] * 12, 0, 0]})
    assert texts(codec, masked.one) == [(FIRST, ONE_BEHIND_ANOTHER)] and masked.notes == []


def test_log_probabilities_are_those_of_the_engine(play: Play) -> None:
    played = play({"kind": "Own", "logprobs": [-1.0]}, {"kind": "Own", "logprobs": [0.0]})
    assert {*played.episodes[0].sequences[0].logprobs.tolist()} == {0.0}
    assert played.notes == [LOGPROBS]
    assert play({"kind": "Own", "logprobs": [0.0]}).notes == []


def test_the_last_round_alone_is_trained_unless_a_scheduler_masks_itself(
    play: Play, codec: TextCodec
) -> None:
    played = play(
        *({"kind": kind} for kind in ("Again", "Adds", "Several")),
        {"kind": "Own", "mask": [0, *[1] * 11]},
        trains_last=True,
    )
    left_out = [[turn.num_left_out for turn in episode.turns] for episode in played.episodes]
    # An output of each turn ends with it; and a mask of the scheduler counts alone.
    assert left_out == [[12, 0], [11, 0], [0, 0, 0], [1, 0]]


# -- what a request may change


def test_a_request_limits_its_tokens_and_ends_at_its_texts(play: Play, codec: TextCodec) -> None:
    played = play({"kind": "Configured", "config": {"max_tokens": 3, "stop": ["xyz", "!"]}})
    assert texts(codec, played.one) == [(FIRST, "⟦It is⟧")]
    assert (played.one.outcome, played.requests[0].sampling.max_new_tokens) == (Outcome(Finish.LENGTH), 3)
    assert played.requests[0].sampling.stop_strings == ("xyz", "!")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": 0.5}, "the request sets temperature to 0.5, but the run samples with 1.0"),
        ({"top_p": 0.9}, "the request sets top_p to 0.9, but the run samples with 1.0"),
        ({"n": 2}, "the request sets n to 2, but the run samples with 1"),
    ],
)
def test_a_request_may_not_sample_in_another_way(config: Any, words: str, play: Play) -> None:
    lost, other = play({"kind": "Configured", "config": config}, {"kind": "Again"}).episodes
    assert lost.outcome is Outcome.INFRASTRUCTURE and words in lost.failure
    assert other.outcome is Outcome.SCORED


def test_settings_that_a_scheduler_leaves_open_are_those_of_the_run(play: Play) -> None:
    played = play({"kind": "Unconfigured"})
    assert played.one.outcome is Outcome.SCORED
    assert played.requests[0].sampling.max_new_tokens == 4096


# -- limits


def test_a_limit_of_each_round_is_that_of_each_turn(play: Play) -> None:
    per_round = play({"kind": "Again", "rounds": 3}, max_tokens=14, is_per_turn=True, max_turns=4)
    assert [r.sampling.max_new_tokens for r in per_round.requests] == [14] * 3
    assert per_round.one.outcome is Outcome.SCORED
    total = play({"kind": "Again", "rounds": 9}, max_tokens=60)
    rooms = [r.sampling.max_new_tokens for r in total.requests]
    assert rooms[0] == 60 and rooms == sorted(rooms, reverse=True) and len({*rooms}) == len(rooms) > 1
    assert total.one.outcome is Outcome.TRUNCATED


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [({"max_tokens": 80}, Outcome.TRUNCATED), ({"max_turns": 3}, Outcome.POLICY_FAILURE)],
)
def test_a_scheduler_is_told_once_that_there_is_no_room(limits: Any, outcome: Outcome, play: Play) -> None:
    told = play({"kind": "Endless", "is_told": True}, **limits)
    assert told.one.outcome is outcome and told.notes == []
    infos = told.one.columns["rollout_infos"]
    assert infos["finishes"][-1] == "length" and infos["finishes"].count("length") == 1
    endless = play({"kind": "Endless"}, **limits)
    assert endless.one.outcome is outcome
    assert endless.notes == ["run() asks for more turns than there is room for, and does not end"]
    # The same tokens are trained.
    assert endless.one.sequences == told.one.sequences


# -- rewards


def test_rewards_see_the_trajectory(play: Play, codec: TextCodec) -> None:
    """By the names that ms-swift passes it under; a trajectory by the id of its row."""
    played = play({"kind": "Several", "solution": "6"}, {"kind": "Again", "solution": "7"})
    columns = ({"solution": "6"}, {"solution": "7"})
    prompts = [replace(prompt_of(codec, [USER]), columns=own) for own in columns]
    rows = [Scored.of(*pair) for pair in zip(prompts, played.episodes, strict=True)]
    seen: dict[str, Any] = {}

    def reward(completions, request_id, num_turns, rollout_infos, trajectory_inputs, messages, **kwargs):
        seen.update(
            ids=request_id, turns=num_turns, infos=rollout_infos, inputs=trajectory_inputs, said=messages
        )
        return [float(len(trajectory_inputs[one])) for one in request_id]

    arguments = arguments_of(rows, "text", wants_of(reward), "\n\n")
    reply = Callee(reward).call(arguments, 2, TrainerState())
    assert [row[0] for row in reply["rows"]] == [3.0, 1.0]
    assert seen["turns"] == [3, 2] and len({*seen["ids"]}) == 2
    assert [infos.get("part") for infos in seen["infos"]] == [2, None]
    first, second = (seen["inputs"][one] for one in seen["ids"])
    assert [part["rollout_infos"]["part"] for part in first] == [0, 1, 2]
    assert [len(part["messages"]) for part in first] == [2, 4, 6]
    assert {part["solution"] for part in first} == {"6"} and second[0]["solution"] == "7"
    assert [m["content"] for m in second[0]["messages"]] == [
        *("What is 2*3?", "It is six, 0.", "Again, 1?", "It is six, 1."),
    ]
    assert seen["said"][1] == second[0]["messages"]
