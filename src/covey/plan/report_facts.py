"""The facts as plan.json holds them: one object for all subjects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from covey.plan.facts import Facts

_KEYS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "problem": "model_problem",
        "fault": "model_fault",
        "details": "model_details",
        "directory": "model_dir",
        "type": "model_type",
        "context": "model_context",
        "sizes": "model_sizes",
    },
    "template": {
        "problem": "template_problem",
        "details": "template_details",
        "is_there": "has_chat_template",
    },
    "data": {
        "missing_paths": "dataset_missing",
        "unreadable": "dataset_unreadable",
        "has_preference_pairs": "preference_pairs",
        "notes": "data_notes",
        "problem": "data_problem",
    },
    "prompts": {
        "num_used": "num_prompts",
        "num_too_long": "num_prompts_too_long",
        "longest": "longest_prompt",
        "longest_in_data": "longest_prompt_in_data",
        "first": "first_prompt",
        "are_text": "prompts_are_text",
        "mention_format": "mentions_format",
    },
    "tasks": {
        "num_rows": "tasks",
        "evaluated": "eval_tasks",
        "without": "taskless",
        "column_guess": "task_column_guess",
    },
    "rewards": {
        "models": "reward_models",
        "faulty": "faulty_rewards",
        "blind": "blind_rewards",
        "process": "process_rewards",
        "names": "reward_names",
        "notes": "reward_notes",
        "texts": "reward_texts",
        "available": "rewards_available",
        "options": "reward_options",
    },
    "lora": {"start": "adapter"},
    "servers": {"asked": "servers"},
    "output": {"state": "output_dir_state", "fault": "output_dir_fault", "free_bytes": "free_disk_bytes"},
}
"""Keys of facts, by subject and field; the key of any other is its field."""


def facts_json(facts: Facts) -> dict[str, Any]:
    """Return the facts of all subjects with the key of each."""
    subjects = asdict(facts)
    layout = subjects.pop("layout")
    found = {_KEYS.get(s, {}).get(n, n): value for s, of in subjects.items() for n, value in of.items()}
    return {**found, "layout": layout}
