"""What is said of length, processes, directories, resuming, replaying and the disk."""

from typing import Any

import pytest

from covey.checks.run.judge import protected_changes
from covey.plan.disk import disk_plan
from covey.plan.facts import ResumeFacts
from support.checks import Case, assert_fixes_mend, assert_says, config, edits_of, facts, found, one

RESUME = {"resume_from_checkpoint": "latest"}
GB = 10**9


def resumed(*changes: tuple[str, Any, Any]) -> ResumeFacts:
    return ResumeFacts(path="runs/a", step=5, config_changes=changes)


CASES = [
    Case(code="W101", option="nproc_per_node", words="2 cores",
         facts=facts(machine={"cuda": False, "nproc_available": 2}), options={"nproc_per_node": 4}),
    Case(code="W107", option="warmup_steps", words="has only 125 optimizer steps",
         options={"warmup_steps": 500, "lr_scheduler_type": "cosine"}),
    Case(code="W107", option="warmup_steps", words="is 5, but the run has only 5 optimizer steps",
         options={"warmup_steps": 5, "max_steps": 5, "lr_scheduler_type": "linear"}),
    Case(code="W124", option="ref_model_sync_steps", words="every 512 optimizer steps, "
                                                           "but the run has only 125",
         options={"sync_ref_model": True, "beta": 0.1}),
    Case(code="W124", option="ref_model_sync_steps", words="every 5 optimizer steps, but the run has only 5",
         options={"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 5, "max_steps": 5}),
    Case(code="W153", option="guards", words="steps, rollouts and weights are not checked",
         options={"guards": False}),
    Case(code="W153", option="watchdog", words="is not ended", options={"watchdog": False}),
    Case(code="E401", option="output_dir", words="already holds a run", facts=facts(output={"state": "run"})),
    Case(code="E405", option="resume_from_checkpoint", words="learning_rate 1e-05 -> 2e-06",
         facts=facts(output={"resume": resumed(("learning_rate", 1e-5, 2e-6))}),
         options={**RESUME, "learning_rate": 2e-6}),
    Case(code="E405", option="resume_from_checkpoint",
         words="columns None -> {'q': 'question'}, dataset a.jsonl b.jsonl -> train.jsonl.",
         facts=facts(output={"resume": resumed(("columns", None, {"q": "question"}),
                                    ("dataset", ["a.jsonl", "b.jsonl"], ["train.jsonl"]))}),
         options={**RESUME, "columns": {"q": "question"}}),
    *(Case(code="E405", option="resume_from_checkpoint", words="use_adaptive_entropy True -> False",
           facts=facts(output={"resume": resumed(("use_adaptive_entropy", True, False))}),
           options={**RESUME, "allow_changes": allowed}) for allowed in (True, False)),
    Case(code="W161", option="resume_from_checkpoint", words="runs/a/config.yaml is missing",
         facts=facts(output={"resume": ResumeFacts(path="runs/a/checkpoint-5", step=5, is_compared=False)}),
         options=RESUME),
    Case(code="W164", option="resume_from_checkpoint", words="a is gone; b is gone.",
         facts=facts(output={
             "resume": ResumeFacts(path="runs/a/checkpoint-5", step=5, lost=("a is gone", "b is gone"))}),
         options=RESUME),
    Case(code="W163", option="reward_funcs", words="r.py:f has changed since runs/a/checkpoint-5 was",
         facts=facts(rewards={"texts": (("r.py:f", "a"), ("r.py:g", "b"), ("r.py:h", "c"))},
                     output={"resume": ResumeFacts(path="runs/a/checkpoint-5", step=5,
                                                   reward_texts=(("r.py:f", "z"), ("r.py:g", "b")))}),
         options=RESUME),
    Case(code="E406", option="replay_rollouts", words="x: no rollout",
         facts=facts(output={"replay_problem": "x: no rollout-*.jsonl in it"}),
         options={"replay_rollouts": "x"}),
    Case(code="E407", option="save_total_limit",
         words="2 checkpoints and the next one take 2.25 GB, but only 2 GB are free",
         facts=facts(output={"free_bytes": 2 * GB + 5})),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_functions_of_a_program_are_passed_and_not_typed() -> None:
    def fixes(old: list[str], *also: tuple[str, Any, Any], **options: Any) -> list[Any]:
        given = facts(
            output={"resume": resumed(("reward_funcs", old, ["accuracy"]), *also)},
            rewards={"available": ("accuracy", "format")},
        )
        return [fix.edits or fix.text for fix in one(given, **RESUME, **options).fixes]

    anyway = {"allow_changes": True}
    words = "pass the same functions in reward_funcs as when the run started: rank, lambda_2"
    assert fixes(["rank", "accuracy", "lambda_2"]) == [words, anyway]
    seed = ("seed", 1, 42)
    assert fixes(["rank", "accuracy", "lambda_2"], seed) == [{"seed": 1}, words, anyway]
    assert fixes(["format", "r.py:f", "pack.age.f"]) == [
        {"reward_funcs": ["format", "r.py:f", "pack.age.f"]},
        anyway,
    ]


def test_fixes_of_directories() -> None:
    held = facts(output={"state": "run"})
    assert edits_of(one(held, output_dir="runs/a-007/")) == [
        {"resume_from_checkpoint": "latest"},
        {"output_dir": "runs/a-008"},
        {"overwrite_output_dir": "true"},
    ]
    assert one(held, output_dir="runs/a").fixes[1].edits == {"output_dir": "runs/a-002"}
    assert one(held, output_dir="runs/a-999").fixes[1].edits == {"output_dir": "runs/a-1000"}
    assert found(held, overwrite_output_dir="true") == []
    assert found(held, resume_from_checkpoint="latest") == []
    # Files of somebody else's are not deleted for the asking.
    other = facts(output={"state": "not_empty"})
    assert one(other, overwrite_output_dir="true").code == "E402"


def test_processes_that_nobody_counted_are_not_too_many() -> None:
    assert found(facts(machine={"nproc_available": None}), nproc_per_node=64) == []
    assert found(facts(machine={"cuda": None}), nproc_per_node=64) == []
    assert found(nproc_per_node=8) == []
    assert edits_of(one(nproc_per_node=9)) == [{"nproc_per_node": 8}]
    assert edits_of(one(facts(machine={"nproc_available": 0}), nproc_per_node=1)) == []


FEWER, MODELS = {"save_total_limit": 1}, {"save_only_model": True}
BOTH = {**FEWER, **MODELS}


# Whole checkpoints of 4 GB, reduced ones of 1 GB; with save_total_limit 2 the peak is 4 + 4 + 1.
@pytest.mark.parametrize(
    ("free", "options", "first"),
    [
        (9 * GB - 1, {}, [FEWER, MODELS]),
        # 4 + 4 fits as it just is, and 1 + 1 + 1 does
        (8 * GB, {}, [FEWER, MODELS]),
        (8 * GB - 1, {}, [MODELS]),
        (3 * GB, {}, [MODELS]),
        # neither fits alone, 1 + 1 does
        (3 * GB - 1, {}, [BOTH]),
        (2 * GB, {}, [BOTH]),
        (2 * GB - 1, {}, []),
        # what is typed already is no way out
        (7 * GB, FEWER, [MODELS]),
        (2 * GB, FEWER, [MODELS]),
        (2 * GB, MODELS, [FEWER]),
        (GB, BOTH, []),
    ],
)
def test_fixes_of_the_disk_fit(free: int, options: dict[str, Any], first: list[dict[str, Any]]) -> None:
    given = facts(output={"checkpoint_bytes": 4 * GB, "model_bytes": GB, "free_bytes": free})
    *shown, directory, anyway = edits_of(one(given, **options))
    assert (directory, anyway) == ({}, {"ignore_memory_forecast": True})
    assert one(given, **options, **anyway).code == "W150"
    # Both together may be offered beside one alone, never where one of them is typed already.
    assert shown in ([first, [*first, BOTH]] if first and not options else [first])
    for edits in shown:
        peak = disk_plan(config(**{**options, **edits}), given).peak_bytes
        assert peak is not None and peak <= free


def test_a_disk_of_just_the_size_is_enough() -> None:
    given = facts(output={"checkpoint_bytes": 4 * GB, "model_bytes": GB, "free_bytes": 9 * GB})
    assert found(given) == []
    # The best checkpoint stays beside the newest.
    assert one(given, val_dataset=["v.jsonl"]).seen.startswith("3 checkpoints and the next one take 10 GB")
    assert found(facts(output={"free_bytes": None})) == []
    assert found(facts(output={"model_bytes": None, "free_bytes": 1})) == []


def resume_changes(*changes: tuple[str, Any, Any], **options: Any) -> set[str]:
    return {name for name, _, _ in protected_changes(config(**options), changes)}


def test_what_may_change_on_resume() -> None:
    free = [
        ("logging_steps", 1, 5),
        ("save_steps", 5, 100),
        ("output_dir", "a", "b"),
        ("rollout_log", "all", 2),
        ("val_dataset", [], ["v.jsonl"]),
        ("eval_strategy", "no", "steps"),
        ("report_to", ["none"], ["wandb"]),
        ("gradient_checkpointing", False, True),
        ("reward_workers", 2, 8),
        ("reward_timeout_s", 60.0, 5.0),
        ("max_minutes", None, 30.0),
    ]
    assert resume_changes(*free) == set()
    protected = [
        ("temperature", 0.9, 1.0),
        ("seed", 1, 42),
        ("dataset", ["a"], ["b"]),
        ("engine", "generate", "native"),
        ("tuner_type", "lora", "full"),
        ("lora_alpha", 16.0, 32.0),
        ("target_modules", ["q_proj"], ["all-linear"]),
        ("system", None, "r1"),
        ("chat_template", None, "chatml"),
        ("columns", None, {"q": "question"}),
        ("split_dataset_ratio", 0.0, 0.1),
        ("interleave_prob", [], [0.5, 0.5]),
        ("truncation_strategy", "delete", "left"),
        ("reward_weights", [1.0], [2.0]),
        ("max_length", None, 64),
        ("torch_dtype", "float32", "bfloat16"),
    ]
    assert resume_changes(*free, *protected) == {name for name, _, _ in protected}


def test_a_run_is_lengthened_only_where_the_learning_rate_does_not_depend_on_it() -> None:
    longer = ("max_steps", 100, 200)
    assert resume_changes(longer, max_steps=200) == set()
    constant = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
    assert resume_changes(longer, max_steps=200, **constant) == set()
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
    changed = facts(output={"resume": resumed(("seed", 1, 42))})
    assert edits_of(one(changed, **RESUME)) == [{"seed": 1}, {"allow_changes": True}]
    assert found(changed, **RESUME, allow_changes=True) == []


def test_a_start_anew_is_no_fault() -> None:
    assert found(resume_from_checkpoint="auto") == []
    assert found(facts(output={"resume": resumed()}), **RESUME) == []
    # A directory that cannot be written is a fault whatever is resumed.
    assert one(facts(output={"state": "not_writable"}), **RESUME).code == "E403"
