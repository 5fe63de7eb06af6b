"""What is said of sources, rows, columns and lengths."""

from dataclasses import replace

import pytest

from covey.plan.facts import DataProblem, HubProblem, LeftOut, MissingColumn, UnreadableFile
from support.checks import GOOD, Case, assert_fixes_mend, assert_says, changed, edits_of, facts, found, one

SOLUTION = MissingColumn(column="solution", needed_by="the reward accuracy")

CASES = [
    Case(code="E302", option="dataset", words="train.jsonl cannot be read: line 3",
         facts=facts(data={"unreadable": (UnreadableFile(path="train.jsonl", words="line 3"),)},
                     prompts={"num_used": 0})),
    Case(code="E302", option="dataset", words="no split tset",
         facts=facts(data={"problem": DataProblem(words="no split tset")})),
    Case(code="E302", option="columns", words="no column questoin",
         facts=facts(data={"problem": DataProblem(words="no column questoin", option="columns")}),
         options={"columns": {"questoin": "question"}}),
    Case(code="E302", option="dataset", words="#0 takes no rows",
         facts=facts(data={"problem": DataProblem(words="#0 takes no rows")}),
         options={"columns": {"q": "question"}}),
    Case(code="E302", option="dataset", words="a.jsonl has no subsets or splits",
         facts=facts(data={"unreadable": (UnreadableFile(path="a.jsonl",
                                                        words="a.jsonl has no subsets or splits",
                                                        kind="one_file", subject="a.jsonl"),)}),
         options={"dataset": ["a.jsonl:main@train#100"]}),
    Case(code="E302", option="streaming", words="take away --streaming",
         facts=facts(data={"problem": DataProblem(words="quickstart lies in memory: take away --streaming",
                                              option="streaming")}),
         options={"streaming": True, "max_steps": 5}),
    Case(code="E302", option="val_dataset", words="the set to evaluate on, math, has no usable prompt",
         facts=facts(data={"problem": DataProblem(words="the set to evaluate on, math, has no usable prompt",
                                              option="val_dataset")}),
         options={"val_dataset": ["math.jsonl"]}),
    Case(code="W141", option="dataset", words="The columns images, tools are not used",
         facts=facts(data={"unused_columns": ("images", "tools")})),
    Case(code="E303", option="dataset", words="The columns are: prompt, label.",
         facts=facts(data={"missing_columns": (SOLUTION,), "columns": ("prompt", "label")}),
         options={"columns": {"text": "prompt"}}),
    Case(code="E303", option="dataset", words="The columns are: prompt, solutions.",
         facts=facts(data={"missing_columns": (SOLUTION,), "columns": ("prompt", "solutions")}),
         options={"columns": {"final": "solutions"}}),
    Case(code="E304", option="max_length", words="are longer than max_length 50",
         facts=facts(prompts={"num_used": 0, "num_too_long": 20, "longest_in_data": 300},
                     model={"context": None}),
         options={"max_length": 50}),
    Case(code="E305", option="max_completion_length",
         words="longest prompt 3500 + max_completion_length 1024 = 4524 "
               "tokens, but the context of the model is 4096",
         facts=facts(prompts={"longest": 3500, "longest_in_data": 3500}), options={"max_length": 3500}),
    Case(code="E305", option="max_completion_length", words="a prompt of at least 1 token + ",
         facts=facts(prompts={"longest": None}), options={"max_completion_length": 4096}),
    Case(code="E309", option="dataset", words="The dataset is empty: it has no rows.",
         facts=facts(data={"num_rows": 0}, prompts={"num_used": 0})),
    Case(code="E321", option="dataset", words="gsm8k is not in the cache",
         facts=facts(data={"hub_problem": HubProblem(name="gsm8k", words="gsm8k is not in the cache")},
                     prompts={"num_used": None})),
    Case(code="W105", option="max_length", words="10 prompts of 1000 are longer than max_length 100",
         facts=facts(prompts={"num_used": 990, "num_too_long": 10}), options={"max_length": 100}),
    Case(code="W111", option="dataset", words="3 rows without a prompt: 4, 9, 11.",
         facts=facts(data={"left_out": (LeftOut(reason="no_prompt", count=3, rows=(4, 9, 11)),)})),
    Case(code="W111", option="dataset",
         words="5 rows without a prompt: 4, 9 ...; "
         "1 row with a prompt that is neither text nor a list of messages: 7.",
         facts=facts(data={"left_out": (LeftOut(reason="no_prompt", count=5, rows=(4, 9)),
                               LeftOut(reason="too_long", count=2, rows=(1, 2)),
                               LeftOut(reason="wrong_type", count=1, rows=(7,)))})),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_fixes_of_lengths_have_room() -> None:
    problem = one(facts(prompts={"longest": 3500}), max_length=3500)
    assert edits_of(problem) == [{"max_completion_length": 596}, {"max_length": 3072}, {}]
    full = one(facts(prompts={"longest": 4096}), max_length=4096)
    assert edits_of(full) == [{"max_length": 3072}, {}]
    problem = one(facts(prompts={"num_used": 0, "num_too_long": 9, "longest_in_data": 300}), max_length=50)
    assert edits_of(problem) == [{"max_length": 300}, {}]
    problem = one(facts(prompts={"num_used": 0, "num_too_long": 9, "longest_in_data": 3900}))
    assert edits_of(problem) == [{"max_length": 3900, "max_completion_length": 196}, {}]
    # A prompt as long as the context leaves room for no completion.
    problem = one(facts(prompts={"num_used": 0, "num_too_long": 9, "longest_in_data": 4096}))
    assert edits_of(problem) == [{}]


def test_prompt_and_completion_may_fill_the_context() -> None:
    assert found(facts(prompts={"longest": 3072})) == []
    assert one(facts(prompts={"longest": 3073}), max_length=3073).code == "E305"


def test_each_missing_file_and_column_has_its_own_problem() -> None:
    problems = found(
        facts(data={"missing_paths": ("a.jsonl", "b.jsonl")}, prompts={"num_used": None}),
        dataset=["a.jsonl", "b.jsonl"],
    )
    assert [p.seen for p in problems] == ["a.jsonl does not exist.", "b.jsonl does not exist."]
    prompt = MissingColumn(column="prompt", needed_by="every prompt", rename=("promt", "question"))
    problems = found(facts(data={"missing_columns": (prompt, SOLUTION), "columns": ("promt", "text")}))
    assert [p.fixes[0].text for p in problems] == ["rename promt to question", "add a column solution"]
    # What is typed mends all that can be mended, and keeps what was typed before.
    gold = replace(SOLUTION, rename=("n", "solution"))
    given = facts(data={"missing_columns": (prompt, gold), "columns": ("promt", "gold", "n")})
    problems = found(given, columns={"m": "n"})
    both = {"columns": {"m": "solution", "promt": "question"}}
    assert [edits_of(p) for p in problems] == [[both], [both]]


def test_a_source_keeps_its_name_and_its_number_of_rows() -> None:
    words = "a.jsonl has no subsets or splits"
    unread = (UnreadableFile(path="a.jsonl", words=words, kind="one_file", subject="a.jsonl"),)
    problem = one(facts(data={"unreadable": unread}), dataset=["a.jsonl@train#100", "b.jsonl"])
    assert edits_of(problem) == [{"dataset": ["a.jsonl#100", "b.jsonl"]}]


def test_what_cannot_be_read_is_not_also_empty() -> None:
    unread = facts(data={"missing_paths": ("a/b",)}, prompts={"num_used": 0})
    assert {problem.code for problem in found(unread, dataset=["a/b"])} == {"E302"}
    assert {p.code for p in found(facts(data={"missing_columns": (SOLUTION,)}, prompts={"num_used": 0}))} == {
        "E303"
    }
    long = facts(prompts={"num_used": 0, "num_too_long": 5})
    assert {p.code for p in found(long, max_length=2)} == {"E304"}


def test_rows_cut_or_too_long_are_no_second_warning() -> None:
    cut = facts(data={"left_out": (LeftOut(reason="cut", count=4), LeftOut(reason="too_long", count=1))})
    assert found(cut) == []
    without = changed(
        GOOD, prompts={"num_used": 0}, data={"left_out": (LeftOut(reason="no_prompt", count=4),)}
    )
    assert [p.code for p in found(without)] == ["E309"]
