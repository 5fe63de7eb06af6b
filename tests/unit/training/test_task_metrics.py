"""Metrics of each task: the same names whatever a rollout holds, and values of its own rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.data.text import load_codec
from covey.quickstart.task import MODEL_DIR
from covey.rollout.records import groups_of, records_of
from covey.training.evaluate import _metrics
from covey.training.measure import id_metrics, reward_metrics, task_metrics
from covey.types import Finish, Metric, Score, ScoredGroup, ScorePart
from support.groups import episode, prompt, scored

CODEC = load_codec(MODEL_DIR)
TASKS = {"chat": ("kind",), "math": ("accuracy", "format")}


def group(number: int, task: str, *rows: tuple[dict[str, float], int]) -> ScoredGroup:
    """A group from the rewards that spoke and the tokens of each completion; the total is their sum."""
    episodes, scores = [], []
    for sibling, (spoke, length) in enumerate(rows):
        finish = Finish.STOP if length < 8 else Finish.LENGTH
        own = episode((9,), range(length), number=number, sibling=sibling, finish=finish)
        episodes.append(own)
        parts = tuple(ScorePart(name=n, value=spoke.get(n)) for n in ("accuracy", "format", "kind"))
        scores.append(Score(total=sum(spoke.values()), parts=parts))
    return scored(episodes, scores, asked=prompt(number, task=task))


MATH = group(0, "math", ({"accuracy": 1.0, "format": 1.0}, 2), ({"accuracy": 0.0, "format": 1.0}, 4))
FLAT = group(1, "math", ({"accuracy": 0.0, "format": 1.0}, 8), ({"accuracy": 0.0, "format": 1.0}, 6))
CHAT = group(2, "chat", ({"kind": 0.5}, 3), ({"kind": 0.25}, 5))


def test_by_hand():
    found = task_metrics([MATH, CHAT, FLAT], TASKS)
    values = {name: (m.value, m.count) for name, m in found.items()}
    # Of math: totals 2, 1, 1, 1; spreads sqrt(1/2) and 0; lengths 2, 4, 8, 6.
    assert values["tasks/math/reward"] == (1.25, 4)
    assert values["tasks/math/reward_std"] == (pytest.approx(0.5**0.5 / 2), 2)
    assert values["tasks/math/frac_reward_zero_std"] == (0.5, 2)
    assert values["tasks/math/rewards/accuracy/mean"] == (0.25, 4)
    assert values["tasks/math/completions/mean_length"] == (5.0, 4)
    assert values["tasks/math/completions/clipped_ratio"] == (0.25, 4)
    assert values["tasks/chat/reward"] == (0.375, 2)
    assert values["tasks/chat/rewards/kind/mean"] == (0.375, 2)
    assert values["tasks/chat/completions/max_length"] == (5, 2)
    # A reward that does not score a task has no metric there.
    assert "tasks/chat/rewards/accuracy/mean" not in values and "tasks/math/rewards/kind/mean" not in values


def test_the_names_do_not_depend_on_the_rollout():
    whole = task_metrics([MATH, CHAT], TASKS)
    alone = task_metrics([MATH], TASKS)
    assert list(whole) == list(alone)
    absent = {n: (m.value, m.count) for n, m in alone.items() if n.startswith("tasks/chat/")}
    assert len(absent) == 11 and set(absent.values()) == {(None, 0)}


def test_tasks_without_rewards_of_their_own_have_all_of_them():
    found = task_metrics([MATH, CHAT], {"math": (), "chat": ()})
    assert found["tasks/math/rewards/kind/mean"].value is None
    assert found["tasks/chat/rewards/kind/mean"].value == 0.375


def test_the_total_is_that_of_all_rows():
    whole = reward_metrics([MATH, FLAT, CHAT])["reward"]
    parts = task_metrics([MATH, FLAT, CHAT], TASKS)
    both = [parts[f"tasks/{t}/reward"] for t in TASKS]
    assert whole.value == pytest.approx(sum(m.value * m.count for m in both) / sum(m.count for m in both))


def test_the_share_of_ids_that_the_tokenizer_does_not_have():
    """Of the tokens that the model wrote, whatever stands in the prompt."""
    size = CODEC.tokenizer.get_vocab_size()
    name = "completions/unknown_ids_ratio"
    wrote = [(1, 2, size - 1), (size, 3, size + 7, size), ()]
    rows = [episode((size,), ids, number=0, sibling=n) for n, ids in enumerate(wrote)]
    assert id_metrics(rows, CODEC) == {name: Metric(value=3 / 7, count=7)}
    assert id_metrics(rows[:1], CODEC) == {name: Metric(value=0.0, count=3)}
    assert id_metrics(rows[2:], CODEC) == {name: Metric(value=None, count=0)}
    found = _metrics([MATH], "eval_", TASKS, CODEC)
    assert found[f"eval_{name}"] == Metric(value=0.0, count=6)


def test_an_evaluation_has_its_tasks_and_their_pass_rates():
    found = _metrics([MATH, FLAT, CHAT], "eval_", TASKS, CODEC)
    assert found["eval_tasks/math/reward"].value == 1.25
    # One of two is right, then none: (1/2 + 0) / 2 and (1 + 0) / 2.
    assert found["eval_tasks/math/pass@1"].value == 0.25
    assert found["eval_tasks/math/pass@2"].value == 0.5
    assert "eval_tasks/chat/pass@1" not in found
    single = [replace(g, scores=g.scores[:1]) for g in (MATH, CHAT)]
    assert _metrics(single, "eval_", TASKS, CODEC)["eval_tasks/math/reward_std"].value is None
    # Rows without a task have no metrics of one.
    plain = [
        replace(g, group=replace(g.group, prompt=replace(g.group.prompt, task=""))) for g in (MATH, CHAT)
    ]
    assert not any("tasks/" in name for name in _metrics(plain, "eval_", {}, CODEC))


def test_a_record_keeps_the_task_and_the_checksum():
    records = records_of([MATH, CHAT])
    assert [r["task"] for r in records] == ["math", "math", "chat", "chat"]
    again = records_of(groups_of(records))
    assert again == records
    # A record of an older version has neither.
    old = [{k: v for k, v in r.items() if k not in ("task", "checksum")} for r in records]
    assert {g.group.prompt.task for g in groups_of(old)} == {""}
