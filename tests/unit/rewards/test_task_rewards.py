"""Rewards of tasks: each is called on the rows of its tasks alone, in this process and in workers."""

from __future__ import annotations

from dataclasses import replace

from covey.plan.task_rewards import asked, called
from covey.rewards.protocol import Judgement, RowWord, TrainerState
from covey.rewards.registry import weighted
from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import answered
from covey.types import Origin, Prompt, ScorePart

PROMPT = Prompt(id=0, messages=None, text="", token_ids=(1,), columns={}, origin=Origin(epoch=0, rollout=0))


class Spy:
    """A reward that remembers the rows it was shown."""

    is_here = True

    def __init__(self, name: str, value: float | None) -> None:
        self.name, self.value = name, value
        self.seen: list[list[int]] = []

    def begin(self, rows, state):
        self.seen.append([row.prompt.id for row in rows])
        words = tuple(
            RowWord(part=ScorePart(name=self.name, value=self.value), extras={f"by_{self.name}": r.prompt.id})
            for r in rows
        )
        return lambda: Judgement(rows=words, metrics={f"calls_{self.name}": (float(len(rows)),)})


def scored(tasks: list[str]):
    return [answered(replace(PROMPT, id=i, task=task), f"text {i}", 0) for i, task in enumerate(tasks)]


def test_a_reward_sees_the_rows_of_its_tasks_alone():
    accuracy, kind, both = Spy("accuracy", 1.0), Spy("kind", 0.5), Spy("both", 0.25)
    tasks = {"math": ("accuracy", "both"), "chat": ("kind", "both")}
    rewards = RewardSet([accuracy, kind, both]).of_tasks(tasks)
    judged = rewards.score(scored(["math", "chat", "chat", "math"]), TrainerState())
    assert (accuracy.seen, kind.seen, both.seen) == ([[0, 3]], [[1, 2]], [[0, 1, 2, 3]])
    values = [[p.value for p in row.parts] for row in judged.rows]
    assert values == [[1.0, None, 0.25], [None, 0.5, 0.25], [None, 0.5, 0.25], [1.0, None, 0.25]]
    assert [[p.name for p in row.parts] for row in judged.rows] == [["accuracy", "kind", "both"]] * 4
    # What is noted stays with its row.
    assert judged.rows[3].extras == {"by_accuracy": 3, "by_both": 3}
    assert judged.metrics["calls_kind"].value == 2.0
    # The total is over the rewards that apply, by hand: 2 x 1 + 4 x 0.25, and 3 x 0.5 + 4 x 0.25.
    assert [s.total for s in weighted(judged, [2.0, 3.0, 4.0])] == [3.0, 2.5, 2.5, 3.0]


def test_a_reward_whose_task_is_not_there_is_not_called():
    accuracy, kind = Spy("accuracy", 1.0), Spy("kind", 0.5)
    rewards = RewardSet([accuracy, kind]).of_tasks({"math": ("accuracy",), "chat": ("kind",)})
    judged = rewards.score(scored(["math"]), TrainerState())
    assert kind.seen == [] and [p.value for p in judged.rows[0].parts] == [1.0, None]
    assert "calls_kind" not in judged.metrics
    assert rewards.score([], TrainerState()).rows == ()


def test_a_worker_is_asked_about_its_rows_alone(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def seen(prompts, completions, log_extra, **kwargs):\n"
        "    log_extra('shown', [list(completions)] * len(completions))\n"
        "    return [float(c[-1]) for c in completions]\n"
    )
    with RewardSet.start([f"{file}:seen", "format"]) as found:
        rewards = found.of_tasks({"math": ("format",), "chat": ("seen",)})
        judged = rewards.score(scored(["chat", "math", "chat"]), TrainerState())
    assert [[p.value for p in row.parts] for row in judged.rows] == [[0.0, None], [None, 0.0], [2.0, None]]
    assert judged.rows[0].extras["shown"] == ["text 0", "text 2"]


def test_names():
    entries = ["accuracy", "a.py:kind", "b.py:kind", "pkg.mod.brief"]
    assert called(entries, ()) == {
        **{entry: entry for entry in entries},
        "brief": "pkg.mod.brief",
    }
    names = ["accuracy", "a.kind", "b.kind", "brief"]
    assert called(entries, names)["b.kind"] == "b.py:kind"
    given = {"math": ["accuracy", "b.py:kind"], "chat": ["a.kind", "nobody"]}
    assert asked(given, entries, names) == {"math": ("accuracy", "b.kind"), "chat": ("a.kind",)}
    assert asked(None, entries, names) == {}
