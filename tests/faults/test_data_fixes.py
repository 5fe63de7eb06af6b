"""Every rename of a column that is printed works when it is typed, not only the first fix of a problem."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from covey.plan.words import flags
from faults import cases_data
from faults.test_messages import case, errors_of, without

RENAMES = tuple(c for c in cases_data.CASES if "tools" in c.name or c.name.startswith("columns"))
__all__ = ["case"]  # the fixture


@pytest.mark.parametrize("case", RENAMES, ids=lambda case: case.name, indirect=True)
def test_every_rename_that_is_printed_mends(case: cases_data.Case) -> None:
    verb, *typed = shlex.split(case.words)
    problems = errors_of(verb, typed)
    assert problems
    for fix in (fix for problem in problems for fix in problem.fixes if "columns" in fix.edits):
        fixed = [*without(typed, "columns", fix.edits), *shlex.split(flags(fix.edits))]
        assert errors_of(verb, fixed) == []


NAMES = ("label", "gold", "ground_truth", "final_answer", "target", "reference", "Expected", "答案")
PROMPTS = ("text", "user_input", "content", "Task", "题目", "questions", "my_question", "prompt_text")


@pytest.mark.parametrize(("prompt", "gold"), [(p, NAMES[n % len(NAMES)]) for n, p in enumerate(PROMPTS)])
def test_two_columns_are_never_renamed_to_one(
    prompt: str, gold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = [{gold: str(n + 1), "id": n, prompt: f"What is {n}+1?", "level": "easy"} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    verb, *typed = shlex.split(cases_data.words(dataset="rows.jsonl"))
    problems = errors_of(verb, typed)
    edits = [fix.edits["columns"] for p in problems for fix in p.fixes if "columns" in fix.edits]
    for columns in edits:
        assert len(set(columns.values())) == len(columns)
        assert columns[prompt] == "question"
        assert errors_of(verb, [*typed, *shlex.split(flags({"columns": columns}))]) == []
    assert edits
