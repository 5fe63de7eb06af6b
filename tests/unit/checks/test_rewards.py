"""What is said of rewards, their weights and the gold answers."""

import os
from dataclasses import replace
from typing import Any

import pytest

from covey.checks.rewards.judge import reward_problems
from covey.plan.facts import Facts, GoldFacts, OpenLists
from covey.texts import Text, tr
from covey.types import BlindReward, FaultKind, RewardCause, RewardFault
from support.checks import GOOD, Case, assert_fixes_mend, assert_says, config, edits_of, facts, found, one


def faulty(name: str, kind: FaultKind, words: str = "seen so") -> Facts:
    return facts(rewards={"faulty": (RewardFault(reward=name, kind=kind, words=words),)})


def blind(name: str, compared: Any, constant: float | None = None) -> BlindReward:
    return BlindReward(
        reward=name, column="solution", compared=compared, num_rows=6, num_told_apart=1, constant=constant
    )


READ = {
    "accuracy": (),
    "cosine": (
        *("cosine_min_len_value_wrong", "cosine_max_len_value_wrong", "cosine_min_len_value_correct"),
        *("cosine_max_len_value_correct", "cosine_max_len"),
    ),
    "get_soft_overlong_punishment": ("soft_max_length", "soft_cache_length"),
    "repetition": ("repetition_n_grams", "repetition_max_penalty"),
    "soft_overlong": ("soft_max_length", "soft_cache_length"),
}
OVERLONG = {"reward_funcs": ["soft_overlong"], "max_completion_length": 1000}
GOLDS = GoldFacts(num_checked=200, num_bad=12, examples=((3, "about 5", "no number"), (9, "", "it is empty")))
TWO = ["accuracy", "format"]
LISTS = OpenLists(
    column="key", num_lists=40, num_open=30, row=7, example='["A", "C"]', where="held", task="quiz"
)


def open_lists(**changes: Any) -> GoldFacts:
    found = (replace(LISTS, **changes),)
    return GoldFacts(num_checked=64, num_bad=0, num_lists=40, open_lists=found)


CASES = [
    Case(code="W111", option="max_bad_gold", words="12 of 200 gold answers",
         facts=facts(rewards={"golds": GOLDS}), options={"max_bad_gold": 0.06}),
    Case(code="E366", option="gold_lists",
         words="30 of 40 lists in the column key (evaluation set held) (task quiz) hold only different "
         'letters, numbers or formulas, such as ["A", "C"] in row 7.',
         facts=facts(rewards={"golds": open_lists()})),
    Case(code="W129", option="gold_lists", words="10 of 40 lists in the column key hold only different",
         facts=facts(rewards={"golds": open_lists(num_open=10, is_decided=True, where="", task="")})),
    Case(code="E325", option="soft_max_length",
         words="so the penalty begins after token 1024, but a completion has at most 1000 tokens",
         facts=facts(rewards={"options": READ}),
         options={**OVERLONG, "reward_funcs": ["trl.rewards.get_soft_overlong_punishment"],
                  "soft_max_length": 1280, "soft_cache_length": 256}),
    Case(code="W120", option="cosine_max_len_value_wrong",
         words="cosine gives right answers 0.5 to 1 and wrong ones -0.5 to 0.5.",
         facts=facts(rewards={"options": READ}),
         options={"reward_funcs": ["cosine"], "cosine_max_len_value_wrong": 0.5}),
    Case(code="W120", option="cosine_min_len_value_wrong", words="right answers -1 to 1 and wrong ones 0 to",
         facts=facts(rewards={"options": READ}),
         options={"reward_funcs": ["cosine"], "cosine_min_len_value_wrong": 2,
                  "cosine_max_len_value_correct": -1}),
    Case(code="W110", option="reward_funcs", words="neither the prompts nor the template",
         facts=facts(prompts={"mention_format": False}), options={"reward_funcs": TWO}),
    Case(code="W116", option="reward_funcs",
         words="On 5 of 6 rows r.py:f scores the correct answer (column solution) no higher than an empty "
         "completion; "
         "each answer was tried in several forms. It gives every completion the same score, 0.",
         facts=facts(rewards={"blind": (blind("r.py:f", "empty", constant=0.0),)}),
         options={"reward_funcs": ["r.py:f"]}),
    Case(code="W116", option="reward_funcs", words="no higher than the gold answers of other rows",
         facts=facts(rewards={"blind": (blind("r.py:f", "others"),)}), options={"reward_funcs": ["r.py:f"]}),
    Case(code="W116", option="reward_weights", words="the weighted total scores the "
                                                     "correct answer (column solution)",
         facts=facts(rewards={"blind": (blind("", "empty"),)}), options={"reward_funcs": TWO}),
    Case(code="W110", option="reward_funcs", words="neither the prompts nor the template",
         facts=facts(prompts={"mention_format": False}), options={"reward_funcs": ["tag_count"]}),
    Case(code="W110", option="reward_funcs", words="neither the prompts nor the template",
         facts=facts(prompts={"mention_format": False}),
         options={"reward_funcs": ["trl.rewards.think_format_reward"], "system": "Be brief."}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_a_misspelt_reward_is_replaced_in_its_place() -> None:
    assert edits_of(one(faulty("formt", "unknown"), reward_funcs=["accuracy", "formt", "r.py:f"])) == [
        {"reward_funcs": ["accuracy", "format", "r.py:f"]},
        {},
    ]
    # Only a name can be misspelt; a file that fails to load may well be the right one.
    assert edits_of(one(faulty("format.py", "import"), reward_funcs=["format.py"])) == [{}]
    nothing_near = one(faulty("my_judge", "unknown"), reward_funcs=["my_judge"])
    assert edits_of(nothing_near) == [{}]
    assert "FILE.py:NAME" in nothing_near.fixes[0].text


def test_every_faulty_reward_is_named() -> None:
    both = (*faulty("a.py:f", "import").rewards.faulty, *faulty("b.py:f", "trial").rewards.faulty)
    problems = found(facts(rewards={"faulty": both}), reward_funcs=["a.py:f", "b.py:f"])
    assert [(p.code, p.seen) for p in problems] == [("E314", "a.py:f: seen so"), ("E316", "b.py:f: seen so")]


def test_a_function_of_a_program_is_called_by_its_name_where_that_is_its_alone() -> None:
    def seen(*entries: str) -> str:
        fault = RewardFault(reward=entries[0], kind="trial", words="seen so")
        return next(p.seen for p in found(facts(rewards={"faulty": (fault,)}), reward_funcs=list(entries)))

    assert seen("/data/m.py:good", "format") == "good: seen so"
    assert seen("/data/m.py:good", "n.py:good") == "/data/m.py:good: seen so"
    assert seen("m.py:good", "format") == "m.py:good: seen so"


def tried(completion: str, said: str, row: int = 1, cause: RewardCause = "") -> RewardFault:
    shown = f"the completion {completion!r}" if completion else "an empty completion"
    words = f"{said}; seen on row {row}, with {shown}"
    return RewardFault(
        reward="r.py:f", kind="trial", words=words, cause=cause, row=row, completion=completion, said=said
    )


def test_what_both_answers_to_a_row_show_is_said_once() -> None:
    def seen(*faults: RewardFault) -> list[str]:
        return [p.seen for p in found(facts(rewards={"faulty": faults}), reward_funcs=["r.py:f"])]

    both = "r.py:f: KeyError; seen on row 1, with the completion '5' and with an empty one"
    assert seen(tried("5", "KeyError"), tried("", "KeyError")) == [both]
    assert seen(tried("", "KeyError"), tried("", "KeyError")) == [
        "r.py:f: KeyError; seen on row 1, with an empty completion"
    ]
    assert len(seen(tried("5", "KeyError"), tried("", "TypeError"))) == 2
    assert len(seen(tried("5", "KeyError"), tried("", "KeyError", row=2))) == 2


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (RewardFault(reward="d/r.py:f", kind="import", words="no", cause="no_file"), "`ls d` shows"),
        (
            RewardFault(reward="d/r.py:f", kind="import", words="no", cause="no_module"),
            "`python d/r.py` shows",
        ),
        (RewardFault(reward="d/r.py", kind="unknown", words="no", cause="bare_file"), "write d/r.py:NAME"),
        (tried("", "nan", cause="not_finite"), "or return None for a completion"),
        (tried("", "no", cause="judge"), "`curl http://j/v1/models` shows"),
        (tried("", "no", cause="unmade"), "AutoModelForSequenceClassification.from_pretrained(r.py)"),
        (tried("", "a value"), "correct the function; --reward_trial false"),
    ],
)
def test_what_to_do_goes_by_the_cause(fault: RewardFault, advice: str) -> None:
    given = config(reward_funcs=[fault.reward], judge_base_url="http://j/v1")
    rewards = replace(GOOD.rewards, faulty=(fault,))
    (problem,) = reward_problems(given, GOOD.data, GOOD.prompts, rewards)
    assert advice in problem.fixes[-1].text


def test_the_nearest_function_and_the_lacking_column_are_typed() -> None:
    near = RewardFault(reward="r.py:scor", kind="import", words="r.py has no scor", near="score")
    problem = one(facts(rewards={"faulty": (near,)}), reward_funcs=["r.py:scor"])
    assert edits_of(problem)[0] == {"reward_funcs": ["r.py:score"]}
    lacking = RewardFault(reward="r.py:f", kind="signature", words="demands answer", lacking=("answer",))
    problem = one(facts(rewards={"faulty": (lacking,)}), reward_funcs=["r.py:f"])
    assert edits_of(problem)[0] == {"columns": {"solution": "answer"}}
    two = replace(lacking, lacking=("answer", "level"))
    assert edits_of(one(facts(rewards={"faulty": (two,)}), reward_funcs=["r.py:f"])) == [{}]


def test_paths_are_shown_as_they_were_typed() -> None:
    whole = os.path.abspath("d/plugin.py")
    fault = RewardFault(reward=whole, kind="import", words=tr("there is no file {file}", file=whole))
    problem = one(facts(rewards={"faulty": (fault,)}), external_plugins=["d/plugin.py"])
    assert problem.seen == "d/plugin.py: there is no file d/plugin.py" and isinstance(problem.seen, Text)


def test_one_weight_that_counts_is_enough() -> None:
    assert found(reward_funcs=TWO, reward_weights=[0, 0.1]) == []
    assert found(reward_funcs=TWO, reward_weights=[-1, 0]) == []
    assert edits_of(one(reward_funcs=TWO, reward_weights=[0, 0])) == [{"reward_weights": [1.0, 1.0]}]


@pytest.mark.parametrize(
    ("num_bad", "num_checked", "allowed", "code", "suggested"),
    [
        (0, 100, 0.0, None, None),
        (1, 100, 0.0, "E310", 0.02),
        (5, 100, 0.05, "W111", None),
        (6, 100, 0.05, "E310", 0.07),
        (5, 101, 0.05, "W111", None),
        (51, 1000, 0.05, "E310", 0.06),
        (50, 1000, 0.05, "W111", None),
        (99, 100, 0.05, "E310", 1.0),
        (100, 100, 0.05, "E310", None),
        (100, 100, 1.0, "W111", None),
    ],
)
def test_golds_around_the_share_that_is_allowed(
    num_bad: int, num_checked: int, allowed: float, code: str | None, suggested: float | None
) -> None:
    given = facts(rewards={"golds": GoldFacts(num_checked=num_checked, num_bad=num_bad)})
    problems = found(given, max_bad_gold=allowed)
    assert [p.code for p in problems] == ([] if code is None else [code])
    edits = [e for p in problems for e in edits_of(p) if e]
    assert edits == ([] if suggested is None else [{"max_bad_gold": suggested}])


@pytest.mark.parametrize("num_checked", [1, 7, 100, 299])
def test_the_suggested_share_is_enough(num_checked: int) -> None:
    none = config(max_bad_gold=0.0)
    for num_bad in range(1, num_checked):
        given = facts(rewards={"golds": GoldFacts(num_checked=num_checked, num_bad=num_bad)})
        (problem,) = reward_problems(none, given.data, given.prompts, given.rewards)
        enough = problem.fixes[1].edits["max_bad_gold"]
        assert num_bad / num_checked <= enough <= 1
        assert enough <= num_bad / num_checked + 0.011
        again = none.model_copy(update={"max_bad_gold": enough})
        assert [p.code for p in reward_problems(again, given.data, given.prompts, given.rewards)] == ["W111"]
    assert num_checked >= 1


def test_the_format_is_asked_for_or_not_paid_for() -> None:
    silent = facts(prompts={"mention_format": False})
    assert found(silent) == []
    assert found(facts(prompts={"mention_format": None}), reward_funcs=TWO) == []
    assert edits_of(one(silent, reward_funcs=TWO)) == [{"system": "r1"}, {}]
    # A system message of the user's own is not thrown away.
    assert edits_of(one(silent, reward_funcs=TWO, system="Be brief.")) == [{}]
    # The built-in model was taught the tags, on the built-in task.
    assert found(silent, reward_funcs=TWO, model="quickstart", dataset=["quickstart"]) == []


@pytest.mark.parametrize(
    "options",
    [
        {},  # soft_max_length is max_completion_length, soft_cache_length a fifth of it
        {"soft_cache_length": 1},
        {"soft_cache_length": 1000},
        {"soft_max_length": 1100, "soft_cache_length": 101},
        {"soft_max_length": 500, "soft_cache_length": 0},
        {"reward_funcs": ["accuracy"], "soft_max_length": 100, "soft_cache_length": 200},
        {"reward_funcs": ["cosine"], "cosine_max_len_value_wrong": 0.49},
        {"reward_funcs": ["accuracy"], "cosine_max_len_value_wrong": 5},
    ],
    ids=str,
)
def test_nothing_is_said_of_lengths_and_ends_that_work(options: dict[str, Any]) -> None:
    assert found(facts(rewards={"options": READ}), **{**OVERLONG, **options}) == []
