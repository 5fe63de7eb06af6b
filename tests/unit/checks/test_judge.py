"""All checks together: a good run, everything at once, and what only follows from another fault."""

import pytest

from covey.checks.judge import checks, refuse_faults
from covey.config import from_dict
from covey.errors import ConfigError
from covey.plan.facts import Facts
from covey.types import RewardFault, Severity
from support.checks import BASE, GOOD, changed, facts, found


def test_nothing_is_wrong_with_a_good_run_or_with_unknown_facts() -> None:
    assert found() == []
    assert found(Facts()) == []
    assert found(beta=0.04, lr_scheduler_type="cosine", warmup_ratio=0.1, delta=4.0, num_iterations=2) == []
    assert found(tuner_type="lora", target_modules=["q_proj"], use_dora=True) == []
    assert found(val_dataset=["v.jsonl"], load_best_model_at_end=True, early_stopping_patience=3) == []
    assert (
        found(facts(prompts={"num_used": None}, data={"num_rows": None}), streaming=True, max_steps=5) == []
    )


def test_all_at_once_errors_first() -> None:
    problems = found(
        facts(
            machine={"cuda": False, "has_bfloat16": False},
            model={"problem": "not there"},
            rewards={"faulty": (RewardFault(reward="x", kind="unknown", words="no such reward"),)},
        ),
        num_generations=1,
        temperature=0.0,
        eval_temperature=1.0,
        torch_dtype="bf16",
        reward_funcs=["x"],
    )
    assert [problem.code for problem in problems] == ["E301", "E306", "E201", "E110", "W102"]


def test_processes_are_those_of_the_facts() -> None:
    found_two = from_dict({**BASE, "nproc_per_node": 2}, 2)
    assert checks(found_two.config, facts(launch={"num_processes": 2}), found_two.typed_names) == []
    assert checks(found_two.config, facts(launch={"num_processes": 1}))[0].code == "E203"


def test_a_run_with_warnings_alone_is_not_refused() -> None:
    resolved = from_dict({**BASE, "learning_rate": 0})
    assert [p.code for p in refuse_faults(resolved, GOOD)] == ["W103"]


def test_what_is_refused_is_said_whole() -> None:
    resolved = from_dict({**BASE, "lr": 1, "learning_rate": 0, "num_generations": 1})
    with pytest.raises(ConfigError) as error:
        refuse_faults(resolved, GOOD)
    assert [p.code for p in error.value.problems] == ["E101", "E201", "W103"]


def test_what_follows_from_an_unreadable_value_is_not_said() -> None:
    resolved = from_dict({**BASE, "num_generations": "x", "per_device_train_batch_size": 3, "max_steps": 0})
    with pytest.raises(ConfigError) as error:
        refuse_faults(resolved, GOOD)
    assert [p.code for p in error.value.problems] == ["E103", "E109"]
    # A missing model has a problem of its own.
    no_model = from_dict({k: v for k, v in BASE.items() if k != "model"})
    with pytest.raises(ConfigError) as error:
        refuse_faults(no_model, changed(GOOD, model={"problem": "nothing"}))
    assert [(p.code, p.option) for p in error.value.problems] == [("E105", "model")]


def test_every_problem_says_all_four_parts() -> None:
    for problem in found(
        facts(output={"state": "run"}, prompts={"num_used": 3}), temperature=0, max_steps=-5
    ):
        assert problem.why and problem.cause and problem.fixes
        assert problem.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("given", "is_wrong"),
    [
        ({"min_lr_rate": 0.1}, False),
        ({"min_lr": 1e-7}, False),
        (None, True),
        ({"min_lr": 1.0}, True),
        ({"min_lr": 1e-7, "min_lr_rate": 0.1}, True),
        ({"num_cycles": 1}, True),
        ({"min_lr_rate": "a"}, True),
    ],
)
def test_where_a_cosine_ends(given: dict[str, object] | None, is_wrong: bool) -> None:
    problems = found(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=given)
    assert [(p.code, p.option) for p in problems] == [("E109", "lr_scheduler_kwargs")] * is_wrong
