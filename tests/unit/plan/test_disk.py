"""What checkpoints take, by hand: W bytes with everything a resume needs, M bytes reduced to the model.

Each save writes a whole checkpoint before an old one goes, so one more than those kept stands at the peak.
"""

from typing import Any

import pytest

from covey.plan.disk import disk_plan, size
from covey.plan.facts import Facts
from support.checks import changed, config, facts

GB = 10**9
SIZES = facts(output={"checkpoint_bytes": 4 * GB, "model_bytes": GB, "free_bytes": 20 * GB})
EVAL = {"val_dataset": ["v.jsonl"]}


@pytest.mark.parametrize(
    ("options", "kept", "peak"),
    [
        # save_total_limit 2, keep_trainer_state 1: the newest and the next one whole, the other reduced
        ({}, 2, 4 + 4 + 1),
        ({"save_total_limit": 1}, 1, 4 + 4),
        ({"save_total_limit": 5}, 5, 4 + 4 + 4 * 1),
        ({"keep_trainer_state": 0}, 2, 4 + 2 * 1),
        ({"keep_trainer_state": 2}, 2, 4 + 4 + 4),
        ({"keep_trainer_state": 9}, 2, 4 + 4 + 4),
        ({"save_total_limit": 3, "keep_trainer_state": 2}, 3, 4 + 4 + 4 + 1),
        # the best of the evaluations stays beside them
        (EVAL, 3, 4 + 4 + 2 * 1),
        ({**EVAL, "save_total_limit": 1}, 2, 4 + 4 + 1),
        ({**EVAL, "eval_strategy": "no"}, 2, 4 + 4 + 1),
        # nothing but models is ever written
        ({"save_only_model": True}, 2, 3 * 1),
        ({"save_only_model": True, "save_total_limit": 1}, 1, 2 * 1),
        ({**EVAL, "save_only_model": True, "keep_trainer_state": 3}, 3, 4 * 1),
    ],
)
def test_peak(options: dict[str, Any], kept: int, peak: int) -> None:
    plan = disk_plan(config(**options), SIZES)
    assert (plan.num_kept, plan.peak_bytes) == (kept, peak * GB)


def test_words_and_dict() -> None:
    plan = disk_plan(config(), SIZES)
    assert plan.in_words() == [
        "one checkpoint 4 GB = model 1 GB + 3 GB of resume state (newest checkpoints only)",
        "2 checkpoints kept plus the one being written: at most 9 GB; 20 GB are free",
    ]
    assert plan.as_dict() == {
        "checkpoint_bytes": 4 * GB,
        "model_bytes": GB,
        "num_kept": 2,
        "peak_bytes": 9 * GB,
        "free_bytes": 20 * GB,
    }
    models = disk_plan(
        config(save_only_model=True), facts(output={"checkpoint_bytes": GB, "model_bytes": GB})
    )
    assert models.in_words()[0] == "one checkpoint 1 GB = the model"


def test_what_is_not_known_is_not_said() -> None:
    unknown = disk_plan(config(), Facts())
    assert (unknown.peak_bytes, unknown.in_words()) == (None, [])
    assert disk_plan(config(), changed(Facts(), output={"checkpoint_bytes": 5})).peak_bytes is None
    free = disk_plan(config(), facts(output={"checkpoint_bytes": GB, "model_bytes": GB, "free_bytes": None}))
    assert free.in_words()[1] == "2 checkpoints kept plus the one being written: at most 3 GB"


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 kB"),
        (512, "0.512 kB"),
        (12_000, "12 kB"),
        (999_999, "1000 kB"),
        (10**6, "1 MB"),
        (10_240_000, "10.24 MB"),
        (123_456_789, "123.5 MB"),
        (2 * GB + 5, "2 GB"),
        (1_536 * 10**9, "1.536 TB"),
    ],
)
def test_size(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words
