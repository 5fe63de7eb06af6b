"""Bad tasks and pass rates of rows."""

from __future__ import annotations

import hashlib
import json

from faults.case import Case, jsonl, sums, words

_TWO = [
    *sums(40, task="math"),
    *({"question": f"Say {n}.", "solution": str(n), "task": "chat"} for n in range(24)),
]
_SHORT = "def short(completions, **kwargs):\n    return [1.0 / (1 + len(c)) for c in completions]\n"
_FILES = {"two.jsonl": jsonl(_TWO), "mine.py": _SHORT}
_RATED = {"rated.jsonl": jsonl(row | {"rate": 0.96 if n % 8 else 0.04} for n, row in enumerate(sums(64)))}


def _tasks(name: str, rest: str, rows: list[dict[str, object]] | None = None) -> Case:
    """A command on two tasks and two rewards."""
    files = _FILES if rows is None else {**_FILES, "two.jsonl": jsonl(rows)}
    typed = words(f"{rest} --reward_workers 1", dataset="two.jsonl", reward="accuracy mine.py:short")
    return Case(name=name, words=typed, files=files)


def _by_task(**rewards: list[str]) -> str:
    return f"--task_column task --task_rewards '{json.dumps(rewards)}'"


def _rates(name: str, rest: str, **files: str) -> Case:
    return Case(name=name, words=words(rest, dataset="rated.jsonl"), files={**_RATED, **files})


def _measured(row: dict[str, object]) -> dict[str, object]:
    """A row's pass rate, as a file of measured ones has it."""
    messages = json.dumps([{"role": "user", "content": row["question"]}], sort_keys=True)
    checksum = hashlib.sha256(messages.encode()).hexdigest()[:16]
    return {"checksum": checksum, "pass_rate": 0.5, "samples": 8}


CASES = (
    _tasks("task_column_misspelt", "--task_column tusk"),
    _tasks("task_column_of_questions", "--task_column solution", sums(80)),
    _tasks("task_missing_in_rows", "--task_column task", [*_TWO, *sums(7), *sums(1, task=" ")]),
    _tasks("task_column_of_a_stream", "--task_column task --streaming --max_steps 5"),
    _tasks("task_rewards_without_a_column", '--task_rewards \'{"math": ["accuracy"]}\''),
    _tasks("task_rewards_no_list", "--task_column task --task_rewards '{\"math\": 3}'"),
    _tasks("task_rewards_misspelt", _by_task(math=["acuracy"], chta=["short"])),
    _tasks("task_rewards_incomplete", _by_task(math=["accuracy"])),
    _tasks("task_rewards_of_a_task_that_is_not_there", _by_task(math=["accuracy"], chat=["short"], zoo=[])),
    _rates("pass_rates_leave_nothing", "--pass_rate_column rate --min_pass_rate 0.1 --max_pass_rate 0.9"),
    _rates("pass_rates_missing", "--pass_rates rates.jsonl --curriculum easy_to_hard"),
    _rates("pass_rates_of_another_file", "--pass_rates rated.jsonl --min_pass_rate 0.1"),
    _rates("pass_rates_of_an_empty_run", "--pass_rates run --min_pass_rate 0.1", **{"run/config.yaml": ""}),
    _rates("pass_rates_of_old_rollouts", "--pass_rates run --min_pass_rate 0.1",
           **{"run/rollouts/rollout-000000.jsonl": '{"reward": 1.0, "parts": []}\n'}),
    _rates("pass_rate_column_misspelt", "--pass_rate_column rates --max_pass_rate 0.9"),
    _rates("pass_rate_column_of_numbers_above_1", "--pass_rate_column solution --max_pass_rate 0.9"),
    _rates("pass_rate_column_of_prompts", "--pass_rate_column question --max_pass_rate 0.9"),
    _rates("pass_rates_not_measured", "--min_pass_rate 0.1 --curriculum hard_to_easy"),
    _rates("pass_rates_twice", "--pass_rate_column rate --pass_rates measured.jsonl --max_pass_rate 0.9",
           **{"measured.jsonl": jsonl(map(_measured, sums(64)))}),
    _rates("pass_rates_crossed", "--pass_rate_column rate --min_pass_rate 0.99 --max_pass_rate 0.5"),
    _rates("pass_rates_of_a_stream",
           "--pass_rate_column rate --max_pass_rate 0.9 --streaming --max_steps 5"),
    _rates("pass_rates_out_of_range", "--pass_rate_column rate --max_pass_rate 90"),
)  # fmt: skip
