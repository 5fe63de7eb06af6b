"""Options that were typed and would have no effect."""

from collections.abc import Sequence

import pytest

from covey.checks.judge import checks
from covey.config import from_dict
from covey.plan.facts import Facts, GoldFacts
from covey.types import Problem, Severity
from support.checks import BASE, facts

VAL = {"val_dataset": ["v.jsonl"]}
READ = facts(
    rewards={
        "options": {
            "accuracy": (),
            "cosine": ("cosine_max_len", "cosine_min_len_value_wrong"),
            "get_repetition_penalty_reward": ("repetition_n_grams",),
            "repetition": ("repetition_n_grams",),
        }
    }
)
TEXT = facts(prompts={"are_text": True}, template={"is_there": False})


def said(options: dict[str, object], given: Facts | None = None) -> list[Problem]:
    resolved = from_dict({**BASE, **options})
    return checks(resolved.config, given or facts(), resolved.typed_names)


CASES: Sequence[tuple[dict[str, object], Facts, str, str, str]] = [
    ({"lora_rank": 16}, facts(), "E115", "lora_rank", "--lora_rank 16 is set, but all weights are trained"),
    ({"use_dora": True, "lora_alpha": 8.0}, facts(), "E115", "lora_alpha", "--use_dora true are"),
    ({"tuner_type": "full", "lora_rank": 8}, facts(), "W108", "lora_rank", "there is no adapter"),
    ({"rlhf_type": "grpo", "tuner_type": "full", "lora_rank": 64}, facts(), "W108", "lora_rank", "rank 64"),
    ({"tuner_type": "lora", "lora_dropout": 0.05}, facts(), "W108", "lora_dropout", "nothing is dropped"),
    ({"eval_steps": 7}, facts(), "W108", "eval_steps", "--eval_steps 7 is set, but nothing is evaluated"),
    ({**VAL, "eval_strategy": "no", "num_generations_eval": 4}, facts(), "W108", "num_generations_eval", ""),
    ({"log_completions": True}, facts(), "W108", "log_completions", "a table of 8 completions in a tracker"),
    ({"cosine_max_len": 5}, READ, "W108", "cosine_max_len", "no reward of this run reads it: accuracy."),
    ({"repetition_n_grams": 5, "reward_weights": [2]}, READ, "W108", "repetition_n_grams", "5 is set, but"),
    (
        {"gold_lists": "all"},
        facts(rewards={"golds": GoldFacts(num_checked=64, num_bad=0)}),
        "W108",
        "gold_lists",
        "--gold_lists all is set, but no gold answer is a list",
    ),
    ({"system": "Be brief."}, TEXT, "E115", "system", "'Be brief.' is set, but the column prompt holds text"),
    ({"chat_template": "chatml"}, TEXT, "E115", "chat_template", "the column prompt holds text"),
]


@pytest.mark.parametrize(("options", "given", "code", "option", "words"), CASES, ids=lambda v: str(v)[:40])
def test_said_and_mended(
    options: dict[str, object], given: Facts, code: str, option: str, words: str
) -> None:
    problems = [p for p in said(options, given) if p.code != "W113"]
    (problem,) = problems
    assert (problem.code, problem.option) == (code, option)
    assert words in problem.seen and problem.why and problem.cause and problem.fixes
    assert (problem.severity is Severity.WARNING) == code.startswith("W")
    for fix in problem.fixes:
        if fix.edits and "report_to" not in fix.edits:
            after = facts(prompts={"are_text": False}) if "apply_chat_template" in fix.edits else given
            assert code not in [p.code for p in said({**options, **fix.edits}, after)]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"tuner_type": "lora", "lora_rank": 8, "modules_to_save": ["lm_head"], "use_rslora": True}, facts()),
        ({"tuner_type": "full", "lora_rank": 16}, facts()),
        ({"rlhf_type": "grpo", "tuner_type": "full"}, facts()),
        ({"tuner_type": "lora", "lora_dropout": 0.05, "disable_dropout": False}, facts()),
        ({**VAL, "eval_steps": 7}, facts()),
        ({"log_completions": 4, "report_to": ["tensorboard"]}, facts()),
        (
            {
                "reward_funcs": ["cosine", "trl.rewards.get_repetition_penalty_reward"],
                "cosine_max_len": 5,
                "repetition_n_grams": 2,
            },
            READ,
        ),
        ({"reward_funcs": ["accuracy", "mine.py:f"], "cosine_max_len": 5}, READ),  # a function may read it
        ({"repetition_n_grams": 3, "cosine_max_len": 1024}, READ),  # what they are anyway
        ({"system": "Be brief."}, facts()),
        ({"system": "Be brief.", "apply_chat_template": True}, TEXT),
    ],
    ids=lambda v: str(v)[:40],
)
def test_nothing_is_said_of_what_has_an_effect(options: dict[str, object], given: Facts) -> None:
    assert said(options, given) == []


def test_a_whole_file_of_values_says_nothing() -> None:
    """config.yaml of a run names every option, also those that follow from others."""
    resolved = from_dict({**BASE, "temperature": 0.7, "save_steps": 30})
    whole = resolved.config.model_dump()
    assert said(whole) == []


def test_the_reward_that_reads_an_option_is_offered_with_a_weight() -> None:
    (problem,) = said({"repetition_n_grams": 5, "reward_weights": [2]}, READ)
    edits = {"reward_funcs": ["accuracy", "repetition"], "reward_weights": [2.0, 1.0]}
    assert (problem.fixes[0].text, dict(problem.fixes[0].edits)) == ("add repetition", edits)


def test_options_that_belong_to_a_server_of_vllm_are_said() -> None:
    own = {"vllm_enforce_eager": True, "vllm_max_num_seqs": 8, "vllm_tensor_parallel_size": 2}
    words = {"server": "vllm_mode server does not use it", "colocate": None}
    for mode, why in words.items():
        warned = {
            p.option: p.seen for p in said({"use_vllm": True, "vllm_mode": mode, **own}) if p.code == "W108"
        }
        assert warned.keys() == ({"vllm_enforce_eager", "vllm_max_num_seqs"} if why else set())
        assert all(str(why) in seen for seen in warned.values())
