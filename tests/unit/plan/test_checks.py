"""Each check by the message it gives: code, option, words, and fixes that mend it."""

from dataclasses import replace
from typing import Any

import pytest

from covey.config import from_dict
from covey.config.schema import Config
from covey.plan import Facts, MissingColumn, ResumeFacts, UnreadableFile, checks
from covey.plan.check_run import protected_changes
from covey.types import Problem, Severity

BASE: dict[str, Any] = {
    "model": "models/tiny",
    "dataset": "train.jsonl",
    "reward_funcs": ["accuracy"],
    "output_dir": "runs/a",
}
GOOD = Facts(
    num_rows=1000,
    num_prompts=1000,
    num_prompts_too_long=0,
    longest_prompt=100,
    longest_prompt_in_data=100,
    columns=("prompt", "solution"),
    missing_columns=(),
    dataset_missing=(),
    dataset_unreadable=(),
    model_context=4096,
    output_dir_state="free",
    rewards_available=("accuracy", "format"),
    checkpoint_bytes=10**9,
    free_disk_bytes=10**12,
    cuda=True,
    nproc_available=8,
)


def config(**options: Any) -> Config:
    found = from_dict({**BASE, **options})
    assert found.problems == ()
    return found.config


def found(facts: Facts = GOOD, **options: Any) -> list[Problem]:
    return checks(config(**options), facts)


def one(facts: Facts = GOOD, **options: Any) -> Problem:
    (problem,) = found(facts, **options)
    return problem


def facts(**changes: Any) -> Facts:
    return replace(GOOD, **changes)


def test_nothing_is_wrong_with_a_good_run_or_with_unknown_facts() -> None:
    assert found() == []
    assert found(Facts()) == []
    assert found(beta=0.04, lr_scheduler_type="cosine", warmup_ratio=0.1, delta=4.0, num_iterations=2) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_length", 0),
        ("max_completion_length", 0),
        ("epsilon", 0),
        ("epsilon", -0.1),
        ("epsilon_high", 0),
        ("delta", 0),
        ("beta", -0.1),
        ("learning_rate", -1e-6),
        ("warmup_steps", -1),
        ("warmup_ratio", 1.5),
        ("adam_beta1", 1),
        ("adam_beta2", -0.1),
        ("adam_epsilon", 0),
        ("weight_decay", -1),
        ("max_grad_norm", -1),
        ("num_train_epochs", 0),
        ("max_steps", 0),
        ("max_steps", -2),
        ("stop_after_steps", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("data_seed", -1),
        ("nproc_per_node", 0),
        ("save_steps", 0),
        ("save_total_limit", 0),
        ("keep_trainer_state", -1),
        ("logging_steps", 0),
        ("rollout_log", 0),
        ("rollout_log_max_gb", 0),
    ],
)
def test_ranges(option: str, value: Any) -> None:
    (problem,) = (p for p in found(**{option: value}) if p.code == "E109")
    assert (problem.code, problem.option) == ("E109", option)
    assert f"{option} is {value}" in problem.seen.replace(".0", "")
    (fix,) = problem.fixes
    assert found(**{option: fix.edits[option]}) == []


# What each check sees: facts, options -> code, option, a part of the words, number of fixes with values
CASES: list[tuple[Facts, dict[str, Any], str, str, str]] = [
    (GOOD, {"temperature": 0}, "E110", "temperature", "greedy"),
    (
        GOOD,
        {"warmup_steps": 5, "lr_scheduler_type": "linear", "warmup_ratio": 0.1},
        "E111",
        "warmup_ratio",
        "is 5",
    ),
    (GOOD, {"warmup_ratio": 0.05}, "E111", "warmup_ratio", "constant"),
    (GOOD, {"num_generations": 1}, "E201", "num_generations", "stands alone"),
    (GOOD, {"num_generations": 7}, "E202", "num_generations", "64 completions per rollout"),
    (
        GOOD,
        {"steps_per_generation": 4, "generation_batch_size": 64},
        "E203",
        "generation_batch_size",
        "is 64",
    ),
    (GOOD, {"generation_batch_size": 60}, "E204", "generation_batch_size", "no multiple of 1 process"),
    (
        GOOD,
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
        "E205",
        "steps_per_generation",
        "is 3",
    ),
    (
        GOOD,
        {"steps_per_generation": 3, "gradient_accumulation_steps": 6},
        "E206",
        "steps_per_generation",
        "2 rollouts",
    ),
    (facts(num_prompts=7), {}, "E207", "dataset", "7 usable prompts; one rollout takes 8"),
    (GOOD, {"num_iterations": 0}, "E208", "num_iterations", "is 0"),
    (GOOD, {"nproc_per_node": 9}, "E209", "nproc_per_node", "shows 8 GPUs"),
    (
        facts(num_prompts=100),
        {"num_train_epochs": 0.01},
        "E210",
        "num_train_epochs",
        "one rollout of 8 prompts",
    ),
    (facts(model_problem="no config.json"), {}, "E301", "model", "models/tiny: no config.json"),
    (
        facts(dataset_missing=("train.jsonl",), num_prompts=None),
        {},
        "E302",
        "dataset",
        "train.jsonl does not exist",
    ),
    (
        facts(dataset_unreadable=(UnreadableFile(path="train.jsonl", words="line 3"),), num_prompts=0),
        {},
        "E302",
        "dataset",
        "line 3",
    ),
    (GOOD, {"dataset": ["openai/gsm8k"]}, "E302", "dataset", "openai/gsm8k is no .jsonl"),
    (
        facts(
            missing_columns=(MissingColumn(column="solution", needed_by="the reward accuracy"),),
            columns=("prompt", "solutions"),
        ),
        {},
        "E303",
        "dataset",
        "No column solution, which the reward accuracy",
    ),
    (
        facts(num_prompts=0, num_prompts_too_long=1000, longest_prompt_in_data=300),
        {"max_length": 50},
        "E304",
        "max_length",
        "All 1,000 prompts are longer than max_length 50",
    ),
    (
        facts(num_prompts=0, num_prompts_too_long=1000, longest_prompt_in_data=3900),
        {},
        "E304",
        "max_length",
        "4096 - max_completion_length 1024 = 3072 tokens",
    ),
    (
        facts(longest_prompt=3500),
        {},
        "E305",
        "max_completion_length",
        "3500 + max_completion_length 1024 = 4524",
    ),
    (
        facts(longest_prompt=None),
        {"max_completion_length": 4096},
        "E305",
        "max_completion_length",
        "at least 1",
    ),
    (GOOD, {"reward_funcs": ["acuracy", "format"]}, "E306", "reward_funcs", "no reward acuracy"),
    (
        GOOD,
        {"reward_funcs": ["accuracy", "format"], "reward_weights": [1]},
        "E307",
        "reward_weights",
        "1 weight for 2 rewards",
    ),
    (GOOD, {"reward_weights": [0]}, "E308", "reward_weights", "Every weight is 0"),
    (facts(num_rows=3, num_prompts=0), {}, "E309", "dataset", "3 rows and no usable prompt"),
    (facts(output_dir_state="run"), {}, "E401", "output_dir", "already holds a run"),
    (facts(output_dir_state="not_empty"), {}, "E402", "output_dir", "no run"),
    (facts(output_dir_state="not_writable"), {}, "E403", "output_dir", "cannot be written"),
    (
        facts(resume=ResumeFacts(path="runs/a", problem="no checkpoint in it")),
        {"resume_from_checkpoint": "latest"},
        "E404",
        "resume_from_checkpoint",
        "runs/a: no checkpoint in it",
    ),
    (
        facts(resume=ResumeFacts(path="runs/a", step=5, config_changes=(("learning_rate", 1e-5, 1e-6),))),
        {"resume_from_checkpoint": "latest"},
        "E405",
        "resume_from_checkpoint",
        "learning_rate 1e-05 -> 1e-06",
    ),
    (
        facts(replay_problem="no rollout-*.jsonl in it"),
        {"replay_rollouts": "x"},
        "E406",
        "replay_rollouts",
        "x: no rollout",
    ),
    (facts(free_disk_bytes=2 * 10**9 + 5), {}, "E407", "save_total_limit", "take 3 GB; 2 GB are free"),
    (facts(cuda=False, nproc_available=2), {"nproc_per_node": 4}, "W101", "nproc_per_node", "2 cores"),
    (facts(cuda=False), {"torch_dtype": "bf16"}, "W102", "torch_dtype", "CPU"),
    (GOOD, {"learning_rate": 0}, "W103", "learning_rate", "is 0"),
    (GOOD, {"delta": 1.1}, "W104", "delta", "below 1 + epsilon_high = 1.28"),
    (
        facts(num_prompts=990, num_prompts_too_long=10),
        {"max_length": 100},
        "W105",
        "max_length",
        "10 prompts of 1000",
    ),
    (GOOD, {"num_iterations": 9}, "W106", "num_iterations", "9 optimizer steps"),
    (
        GOOD,
        {"warmup_steps": 500, "lr_scheduler_type": "cosine"},
        "W107",
        "warmup_steps",
        "has 125 optimizer steps",
    ),
]


@pytest.mark.parametrize(
    ("given", "options", "code", "option", "words"), CASES, ids=lambda c: c if isinstance(c, str) else ""
)
def test_messages(given: Facts, options: dict[str, Any], code: str, option: str, words: str) -> None:
    problem = one(given, **options)
    assert (problem.code, problem.option) == (code, option)
    assert words in problem.seen
    assert problem.why and problem.cause and problem.fixes
    assert (problem.severity is Severity.WARNING) == code.startswith("W")


# These fixes mend what is gathered anew with the edited options.
FACTS_CHANGE = {"E301", "E304", "E401", "E402", "E404", "E209", "E305"}


@pytest.mark.parametrize(
    ("given", "options", "code", "option", "words"), CASES, ids=lambda c: c if isinstance(c, str) else ""
)
def test_fixes_mend(given: Facts, options: dict[str, Any], code: str, option: str, words: str) -> None:
    typed = {*BASE, *options}
    (problem,) = checks(config(**options), given, typed)
    for fix in problem.fixes:
        if fix.edits and code not in FACTS_CHANGE and not (code == "E405" and "learning_rate" in fix.edits):
            assert found(given, **{**options, **fix.edits}) == []


def test_fixes_of_lengths_have_room() -> None:
    problem = one(facts(longest_prompt=3500))
    assert [dict(fix.edits) for fix in problem.fixes] == [
        {"max_completion_length": 596},
        {"max_length": 3072},
        {},
    ]
    problem = one(facts(num_prompts=0, num_prompts_too_long=9, longest_prompt_in_data=300), max_length=50)
    assert problem.fixes[0].edits == {"max_length": 300}
    problem = one(facts(num_prompts=0, num_prompts_too_long=9, longest_prompt_in_data=3900))
    assert problem.fixes[0].edits == {"max_length": 3900, "max_completion_length": 196}


def test_fixes_of_directories_and_names() -> None:
    held = facts(output_dir_state="run")
    assert [dict(fix.edits) for fix in one(held, output_dir="runs/a-007/").fixes] == [
        {"resume_from_checkpoint": "latest"},
        {"output_dir": "runs/a-008"},
        {"overwrite_output_dir": True},
    ]
    assert one(held, output_dir="runs/a").fixes[1].edits == {"output_dir": "runs/a-002"}
    assert found(held, overwrite_output_dir=True) == []
    assert found(held, resume_from_checkpoint="latest") == []
    misspelt = one(GOOD, reward_funcs=["acuracy", "format"])
    assert misspelt.fixes[0].edits == {"reward_funcs": ["accuracy", "format"]}
    assert "accuracy, format" in misspelt.fixes[1].text
    assert one(facts(missing_columns=CASES[17][0].missing_columns, columns=("solutions",))).fixes[0].text == (
        "rename solutions to solution"
    )


def test_a_hub_name_is_not_also_reported_as_missing_rows() -> None:
    problems = found(facts(dataset_missing=("a/b",), num_prompts=0), dataset=["a/b"])
    assert {problem.code for problem in problems} == {"E302"}


def test_all_at_once_errors_first() -> None:
    problems = found(
        facts(cuda=False, model_problem="not there"),
        num_generations=1,
        temperature=0,
        torch_dtype="bf16",
        reward_funcs=["x"],
    )
    assert [problem.code for problem in problems] == ["E301", "E306", "E201", "E110", "W102"]


def resume_changes(*changes: tuple[str, Any, Any], **options: Any) -> set[str]:
    return {name for name, _, _ in protected_changes(config(**options), changes)}


def test_what_may_change_on_resume() -> None:
    free = [
        ("logging_steps", 1, 5),
        ("save_steps", 5, 100),
        ("output_dir", "a", "b"),
        ("rollout_log", "all", 2),
    ]
    assert resume_changes(*free) == set()
    protected = [
        ("temperature", 0.9, 1.0),
        ("seed", 1, 42),
        ("dataset", ["a"], ["b"]),
        ("engine", "generate", "native"),
    ]
    assert resume_changes(*free, *protected) == {"temperature", "seed", "dataset", "engine"}


def test_a_run_is_lengthened_only_where_the_learning_rate_does_not_depend_on_it() -> None:
    longer = ("max_steps", 100, 200)
    assert resume_changes(longer, max_steps=200) == set()
    assert (
        resume_changes(longer, max_steps=200, lr_scheduler_type="constant_with_warmup", warmup_steps=5)
        == set()
    )
    assert resume_changes(longer, max_steps=200, lr_scheduler_type="linear") == {"max_steps"}
    ratio = {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1}
    assert resume_changes(longer, max_steps=200, **ratio) == {"max_steps"}


def test_the_same_step_may_be_split_otherwise() -> None:
    b, a, s = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"
    options = {b: 4, a: 16, s: 16}
    assert resume_changes((b, 8, 4), (a, 8, 16), (s, 8, 16), **options) == set()
    assert resume_changes((b, 8, 4), (a, 16, 16), (s, 16, 16), **options) == {b, a, s}
    assert resume_changes(("nproc_per_node", 2, 1), (a, 8, 16), (s, 8, 16), **options) == set()
    assert resume_changes((a, 8, 16), **options) == {a}


def test_changes_are_allowed_by_name() -> None:
    changed = facts(resume=ResumeFacts(path="runs/a", step=5, config_changes=(("seed", 1, 42),)))
    assert one(changed, resume_from_checkpoint="latest").fixes[1].edits == {"allow_changes": True}
    assert found(changed, resume_from_checkpoint="latest", allow_changes=True) == []


def test_processes_are_those_of_the_facts() -> None:
    found_two = from_dict({**BASE, "nproc_per_node": 2}, 2)
    assert checks(found_two.config, facts(num_processes=2), found_two.typed_names) == []
    assert checks(found_two.config, facts(num_processes=1))[0].code == "E203"
