"""Bad rows: what other tools write and covey cannot train on, and what a chat template would lose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from faults.case import Case, jsonl, sums, words

_BEGUN = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "<think>1</think>So"}]
_CUTS = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}[assistant]"
_NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}
_MODEL = [{"role": "user", "content": "What is 1+1?"}, {"role": "model", "content": "2"}]


def _rows(name: str, rows: list[dict[str, Any]], rest: str = "", **files: str) -> Case:
    """A command on these rows."""
    text = "".join(json.dumps(row) + "\n" for row in rows)  # ASCII, so that half a pair can be written
    return Case(name=name, words=words(rest, dataset="rows.jsonl"), files={"rows.jsonl": text, **files})


def _renamed(**names: str) -> list[dict[str, Any]]:
    """Sums under other names of their columns."""
    return [{names.get(k, k): v for k, v in row.items()} for row in sums(64)]


def _table(name: str, odd: Mapping[str, pa.Array]) -> Case:
    """A command on a Parquet file with other columns."""

    def make(here: Path) -> None:
        columns = {key: [row[key] for row in sums(64)] for key in ("question", "solution")}
        pq.write_table(pa.table({**columns, **odd}), here / "rows.parquet")

    return Case(name=name, words=words(dataset="rows.parquet"), make=make)


def _utf_16(here: Path) -> None:
    (here / "rows.csv").write_text("question,solution\na,1\n", encoding="utf-16")


CASES = (
    _rows("role_unknown", [*sums(63), {"messages": _MODEL, "solution": "2"}]),
    _rows("role_unknown_in_a_stream", [{"messages": _MODEL, "solution": "2"}] * 64,
          "--streaming --max_steps 5"),
    _rows("role_unknown_in_an_eval_set", sums(64), "--val_dataset held.jsonl",
          **{"held.jsonl": jsonl([{"messages": _MODEL, "solution": "2"}])}),
    _rows("template_without_system", sums(64), "--system r1 --chat_template t.jinja",
          **{"t.jinja": _NO_SYSTEM}),
    _rows("template_without_the_rows_system", sums(64, system="Be brief."), "--chat_template t.jinja",
          **{"t.jinja": _NO_SYSTEM}),
    _rows("template_without_tools", sums(64, tools=[_ADD])),
    _rows("template_without_renamed_tools", sums(64, functions=[_ADD]), "--columns '{\"functions\": \"tools\"}'"),
    _rows("tools_no_list", sums(64, tools="add")),
    _rows("answer_that_cannot_be_continued", [{"prompt": _BEGUN, "solution": "2"}] * 64,
          "--chat_template t.jinja", **{"t.jinja": _CUTS}),
    _rows("preference_pairs", [{"prompt": "What is 1+1?", "chosen": "2", "rejected": "3"}] * 64),
    _rows("surrogates", [{"question": f"\ud83d What is {n}+1?", "solution": str(n + 1)} for n in range(64)]),
    _rows("columns_with_numbers_beside_them",
          [row | {"question_id": n, "answer_type": "number"} for n, row in
           enumerate(_renamed(question="questions", solution="final_answer"))]),
    _rows("columns_in_capitals_twice", [{**row, "Question": "x", "QUESTION": "y"} for row in
                                       _renamed(question="content")]),
    _rows("columns_that_are_no_gold", [{**row, "answer_text": "n/a" * 40} for row in _renamed(solution="note")]),
    _rows("verdicts_on_answers", [row | {"label": False} for row in _renamed(solution="completion")]),
    _rows("gold_missing_in_an_eval_set", sums(64), "--val_dataset held.jsonl",
          **{"held.jsonl": jsonl([{"question": "What is 1+1?"}])}),
    _rows("golds_empty_beside_a_full_column", [row | {"solution": "", "answer": row["solution"]} for row in sums(64)]),
    _rows("golds_of_another_column_renamed",
          [row | {"key": "see proof"} for row in _renamed(solution="answer")],
          "--columns '{\"key\": \"solution\"}'"),
    _rows("columns_onto_a_name_that_is_there",
          [row | {"solution": "", "answer": row["solution"]} for row in sums(64)],
          "--columns '{\"answer\": \"solution\"}'"),
    _rows("columns_onto_one_name", [row | {"note": row["answer"]} for row in _renamed(solution="answer")],
          "--columns '{\"answer\": \"solution\", \"note\": \"solution\"}'"),
    _rows("columns_misspelt_onto_a_name_that_is_there",
          [row | {"final": row["solution"], "solution": "?"} for row in sums(64)],
          "--columns '{\"finl\": \"solution\"}'"),
    _rows("golds_that_are_lists_of_letters", [row | {"solution": ["A", "CD"[n % 2]]} for n, row in
                                             enumerate(sums(64))]),
    _rows("golds_missing_beside_lists_of_letters", [row | {"ground_truth": ["A", "CD"[n % 2]]} for n, row in
                                         enumerate(_renamed(solution="note"))]),
    _rows("golds_that_are_lists_in_an_eval_set", sums(64), "--val_dataset held.jsonl",
          **{"held.jsonl": jsonl([row | {"solution": [1, 2]} for row in sums(3)])}),
    _rows("golds_that_are_other_objects", [row | {"solution": {"text": row["solution"], "label": 1}} for row in
                                          sums(64)]),
    _rows("answer_that_cannot_be_continued_beside_messages",
          [{"prompt": _BEGUN, "messages": _BEGUN[:1], "solution": "2"}] * 64,
          "--chat_template t.jinja", **{"t.jinja": _CUTS}),
    Case(name="data_utf_16", words=words(dataset="rows.csv"),
         make=_utf_16),
    _table("prompts_of_bytes", {"question": pa.array([b"What is 1+1?"] * 64)}),
    _table("golds_of_bytes", {"solution": pa.array([b"2"] * 64)}),
    _table("column_of_maps", {"odd": pa.array([[("a", 1)]] * 64, pa.map_(pa.string(), pa.int64()))}),
)  # fmt: skip
