"""The plan in lines and as one object."""

import json
from dataclasses import replace
from typing import Any

import pytest

from covey.checks.batch import batch_plan
from covey.options.schema import OPTIONS
from covey.plan.facts import EvalSet, Facts, GoldFacts, LeftOut
from covey.plan.report import report_json, report_lines
from covey.types import Problem
from support.checks import GOOD, config, facts
from support.layouts import OFFLOADED, elsewhere

GB = 10**9


def lines(given: Facts = GOOD, **options: Any) -> list[str]:
    asked = config(**options)
    return report_lines(asked, given, batch_plan(asked, 1, given.prompts.num_used))


def section(word: str, given: Facts = GOOD, **options: Any) -> list[str]:
    """The lines behind one word, without it."""
    shown: list[str] = []
    current = ""
    for line in lines(given, **options):
        current = line[:10].strip() or current
        if current == word:
            shown.append(line[10:])
    return shown


def test_a_plan_of_full_training_whole() -> None:
    given = facts(
        template={"stop_tokens": "<|im_end|> (314; template)"},
        prompts={"first": "<|im_start|>user\nWhat is 1+1?"},
        output={"checkpoint_bytes": 4 * GB, "model_bytes": GB, "free_bytes": 20 * GB},
    )
    assert lines(given) == [
        "model     models/tiny: 600.00 M parameters, context 4096 tokens",
        "          all weights are trained",
        "ends at   <|im_end|> (314; template)",
        "data      1,000 rows, 1,000 prompts used, the longest of 100 tokens",
        "rewards   1 x accuracy",
        "batch     1 rollout = 8 prompts x 8 completions = 64 completions",
        "          1 optimizer step = 1 process x 8 completions x 8 forward passes = 64 completions = "
        "8 prompts",
        "          1 optimizer step per rollout: on-policy",
        "          1 epoch = 1,000 prompts = 125 rollouts = 125 optimizer steps; 0 prompts left over",
        "          the run = 125 optimizer steps",
        "same run  other per_device_train_batch_size x gradient_accumulation_steps "
        "that give the same run, with other memory and speed:",
        "          1 x 64, 2 x 32, 4 x 16, 8 x 8, 16 x 4, 32 x 2",
        "disk      one checkpoint 4 GB = model 1 GB + 3 GB of resume state (newest checkpoints only)",
        "          2 checkpoints kept plus the one being written: at most 9 GB; 20 GB are free",
        r"prompt 0  '<|im_start|>user\nWhat is 1+1?'",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert section("model", Facts()) == ["models/tiny", "all weights are trained"]
    for word in ("ends at", "eval", "disk", "prompt 0"):
        assert section(word, Facts()) == []
    assert section("model", facts(model={"num_parameters": 7_615_616_512}), model_revision="main")[0] == (
        "models/tiny at main: 7.62 B parameters, context 4096 tokens"
    )


@pytest.mark.parametrize(
    ("options", "trained", "line"),
    [
        ({}, 12_000_000, "LoRA on all-linear, rank 16, alpha 32; 12.00 M parameters trained (2.00%)"),
        (
            {"use_dora": True, "target_modules": ["q_proj", "v_proj"], "lora_rank": 8, "lora_alpha": 16.5},
            600_000,
            "LoRA (DoRA) on q_proj v_proj, rank 8, alpha 16.5; 0.60 M parameters trained (0.10%)",
        ),
        ({"use_rslora": True}, None, "LoRA (rsLoRA) on all-linear, rank 16, alpha 32"),
    ],
)
def test_adapters(options: dict[str, Any], trained: int | None, line: str) -> None:
    shown = section("model", facts(model={"num_trained": trained}), tuner_type="lora", **options)
    assert shown[1] == line


def test_rows_that_are_left_out_by_reason() -> None:
    given = facts(
        data={
            "num_rows": 1_010,
            "left_out": (
                LeftOut(reason="no_prompt", count=3, rows=(4, 9, 11)),
                LeftOut(reason="too_long", count=6, rows=(1, 2)),
                LeftOut(reason="wrong_type", count=1),
                LeftOut(reason="cut", count=2, rows=(5, 6)),
                LeftOut(reason="something_new", count=1, rows=(7,)),
            ),
            "notes": ("b.csv: read as text",),
        },
        prompts={"num_used": 1_000},
    )
    assert section("data", given) == [
        "1,010 rows, 1,000 prompts used, the longest of 100 tokens",
        "left out: 3 rows without a prompt (row 4, 9, 11)",
        "left out: 6 rows longer than max_length (row 1, 2 ...)",
        "left out: 1 row with a prompt that is neither text nor a list of messages",
        "2 rows cut on the left to max_length (row 5, 6)",
        "left out: 1 row something_new (row 7)",
        "b.csv: read as text",
    ]


def test_streams_and_replays_count_no_rows() -> None:
    stream = facts(data={"num_rows": None}, prompts={"num_used": None})
    assert section("data", stream, streaming=True, max_steps=7) == [
        "read when it is needed; prompts that are too long are left out on the way"
    ]
    assert section("batch", stream, streaming=True, max_steps=7)[-1] == "the run = 7 optimizer steps"
    assert section("data", stream, replay_rollouts="runs/a/rollouts") == [
        "replay of the rollouts in runs/a/rollouts; nothing is sampled"
    ]


def test_sampling() -> None:
    assert section("sampling") == [] and section("sampling", top_k=-1) == []
    assert section("sampling", top_p=0.9, top_k=50, min_p=0.05, temperature=0.7) == [
        "at temperature 0.7 with top_p 0.9, top_k 50, min_p 0.05",
        "the tokens that filters keep are recorded, and the loss uses the probabilities among them",
    ]
    own = facts(
        model={
            "unused_sampling": (
                ("temperature", 0.7),
                ("top_p", 0.8),
                ("top_k", 20),
                ("repetition_penalty", 1.1),
            )
        }
    )
    assert section("sampling", own) == [
        "from all tokens at temperature 1; ignored from generation_config.json: temperature 0.7, top_p 0.8, "
        "top_k 20, repetition_penalty 1.1",
        "to sample as it says: --temperature 0.7 --top_p 0.8 --top_k 20",
    ]
    # An engine that does not record sets is not asked for them.
    alone = facts(model={"unused_sampling": (("top_p", 0.8),)}, machine={"cuda": False})
    assert len(section("sampling", alone)) == 2 and len(section("sampling", alone, use_vllm=True)) == 1
    assert section("sampling", facts(model={"unused_sampling": (("repetition_penalty", 1.1),)}))[1:] == []
    assert section("sampling", facts(model={"unused_sampling": (("temperature", 0.0),)}))[1:] == []


def test_rewards() -> None:
    options = {"reward_funcs": ["accuracy", "format", "r.py:f"], "reward_weights": [1, 0.25, 2]}
    assert section("rewards", facts(rewards={"notes": ("r.py:f runs here",)}), **options) == [
        "1 x accuracy + 0.25 x format + 2 x r.py:f",
        "r.py:f runs here",
    ]


SETS = facts(
    data={"eval_sets": (EvalSet(name="gsm8k", num_prompts=1_319), EvalSet(name="math", num_prompts=1))}
)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {},
            "gsm8k (1,319 prompts), math (1 prompt): before the first step, every 100 steps and at the end; "
            "1 completion a prompt at temperature 1",
        ),
        (
            {"eval_steps": 20, "eval_on_start": False, "num_generations_eval": 4, "eval_temperature": 0.6},
            "gsm8k (1,319 prompts), math (1 prompt): every 20 steps and at the end; 4 completions a prompt "
            "at temperature 0.6",
        ),
        (
            {"eval_strategy": "epoch", "temperature": 0.9, "top_p": 0.8, "eval_top_k": 20},
            "gsm8k (1,319 prompts), math (1 prompt): before the first step, after each epoch and at the "
            "end; 1 completion a prompt at temperature 0.9, top_p 0.8, top_k 20",
        ),
        (
            {"eval_temperature": 0.0, "top_p": 0.8},
            "gsm8k (1,319 prompts), math (1 prompt): before the first step, every 100 steps and at the end; "
            "1 completion a prompt at temperature 0",
        ),
        (
            {"eval_strategy": "epoch", "temperature": 0.9},
            "gsm8k (1,319 prompts), math (1 prompt): before the first step, after each epoch and at the "
            "end; 1 completion a prompt at temperature 0.9",
        ),
    ],
)
def test_evaluation(options: dict[str, Any], line: str) -> None:
    assert section("eval", SETS, val_dataset=["a.jsonl", "b.jsonl"], **options) == [line]
    assert section("eval", SETS, val_dataset=["a.jsonl"], eval_strategy="no") == []
    assert section("eval", val_dataset=["a.jsonl"]) == []


@pytest.mark.parametrize(
    ("per_device", "passes", "splits"),
    [
        (1, 8, "1 x 8, 2 x 4, 4 x 2, 8 x 1"),
        (1, 64, "1 x 64, 2 x 32, 4 x 16, 8 x 8, 16 x 4, 32 x 2"),
        (64, 1, "2 x 32, 4 x 16, 8 x 8, 16 x 4, 32 x 2, 64 x 1"),
        (16, 4, "2 x 32, 4 x 16, 8 x 8, 16 x 4, 32 x 2, 64 x 1"),
    ],
)
def test_equal_splits_around_the_chosen_one(per_device: int, passes: int, splits: str) -> None:
    found = section("same run", per_device_train_batch_size=per_device, gradient_accumulation_steps=passes)
    assert found[1:] == [splits]


def test_json() -> None:
    given = facts(
        data={"left_out": (LeftOut(reason="cut", count=2, rows=(5, 6)),), "eval_sets": SETS.data.eval_sets},
        rewards={"golds": GoldFacts(num_checked=2, num_bad=1, examples=((1, "x", "none"),))},
    )
    asked = config(val_dataset=["a.jsonl"])
    batch = batch_plan(asked, 1, 1000)
    note = Problem(code="W103", option="learning_rate", seen="s", why="w")
    content = report_json(asked, given, batch, [note])
    again = json.loads(json.dumps(content))
    assert set(again) == {"options", "batch", "in_words", "memory", "disk", "lines", "notes", "facts"}
    assert list(again["options"]) == list(OPTIONS)
    assert again["batch"]["total_steps"] == 125
    assert again["lines"] == report_lines(asked, given, batch)
    assert again["notes"] == [{"code": "W103", "option": "learning_rate", "seen": "s", "why": "w"}]
    cut = {"reason": "cut", "count": 2, "rows": [5, 6], "detail": "", "role": "", "where": ""}
    assert again["facts"]["left_out"] == [cut]
    assert again["facts"]["golds"]["examples"] == [[1, "x", "none"]]
    assert again["disk"]["num_kept"] == 3


def test_states_that_are_all_offloaded() -> None:
    """In words, and not as 0 kB; what is left of them is given in bytes. Layers are gathered in any case."""
    options = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "generation_batch_size": 64}
    asked = config(**options)
    for layout, words in (
        (OFFLOADED, "model states: all in the machine's memory, none on a GPU"),
        (replace(OFFLOADED, offload="optimizer"), "model states 8.191 GB per GPU; "),
    ):
        text = "\n".join(report_lines(asked, elsewhere(layout), batch_plan(asked, 8, 1000)))
        assert words in text
        assert "0 kB" not in text


def test_what_takes_the_place_of_groups_without_signal() -> None:
    """64 completions a rollout, and at most four times as many."""
    assert section("select") == []
    (drawn,) = section("select", dynamic_sample=True)
    assert drawn.endswith("in up to 3 further draws: a rollout samples 64 to 256 completions")
    drawn, replayed = section("select", dynamic_sample=True, max_resample_times=1, replay_buffer_size=1)
    assert drawn.endswith("in up to 1 further draw: a rollout samples 64 to 128 completions")
    assert replayed == (
        "groups that still have no signal are replaced by the 1 "
        "group of earlier rollouts with the most signal"
    )
