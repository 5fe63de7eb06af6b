"""Rewards of steps: where a completion is cut, what a function may return for its steps, and what it may
not."""

from __future__ import annotations

import numpy
import pytest
import torch

from covey.rewards.protocol import TrainerState
from covey.rewards.registry import total, weighted
from covey.rewards.reward_set import RewardSet
from covey.rewards.steps import step_ends, steps_of
from covey.rewards.trial import trial
from covey.types import ScorePart, Status


@pytest.mark.parametrize(
    ("text", "steps", "ends"),
    [
        ("", [], []),
        ("one", ["one"], [3]),
        ("a\n\nb", ["a", "b"], [3, 4]),
        ("a\n\nb\n\n", ["a", "b"], [3, 6]),
        ("a\n\n\n\nb", ["a", "", "b"], [3, 5, 6]),
        ("\n\n", [""], [2]),
        ("a\n\n ", ["a", " "], [3, 4]),
        ("步骤一\n\n二", ["步骤一", "二"], [5, 6]),
        ("a\nb", ["a\nb"], [3]),
    ],
)
def test_a_text_is_cut_at_the_separator(text, steps, ends):
    assert steps_of(text, "\n\n") == steps
    assert step_ends(text, "\n\n") == ends
    assert "".join(text[a:b] for a, b in zip([0, *ends], ends, strict=False)) == text


def judged(function, rows, **options):
    with RewardSet.start([function], **options) as rewards:
        assert rewards.faults == ()
        return rewards.score(rows, TrainerState())


def parts(function, rows, **options):
    return [row.parts[0] for row in judged(function, rows, **options).rows]


def test_a_function_gets_the_steps_and_gives_a_number_for_each(scored):
    seen = []

    def prm(completion_steps):
        seen.append(completion_steps)
        return [[float(len(step)) for step in steps] for steps in completion_steps]

    rows = [scored("a\n\nbbb"), scored(""), scored("cc\n\n")]
    assert parts(prm, rows) == [
        ScorePart(name="prm", value=2.0, steps=(1.0, 3.0)),
        ScorePart(name="prm", value=None, steps=()),
        ScorePart(name="prm", value=2.0, steps=(2.0,)),
    ]
    assert parts(prm, [scored("a,b")], step_separator=",")[0].steps == (1.0, 1.0)
    # What the prompt has opened is of the first step, also where it holds a separator, and a column of the
    # data does not take the steps' place.
    opened = [scored("a\n\nb", opened="<think>\n\n", completion_steps="x"), scored("", opened="<think>")]
    assert [p.steps for p in parts(prm, opened)] == [(10.0, 1.0), ()]
    assert seen == [
        [["a", "bbb"], [], ["cc"]],
        [["a", "b"]],
        [["<think>\n\na", "b"], []],
    ]


@pytest.mark.parametrize(
    "given",
    [
        [1, 0],
        (True, False),
        numpy.array([1.0, 0.0], dtype=numpy.float32),
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        [numpy.float32(1), torch.tensor(0.0)],
    ],
    ids=str,
)
def test_flat_numbers_of_any_kind_are_fine(given, scored):
    assert parts(lambda completions: [given], [scored("a\n\nb")])[0].steps == (1.0, 0.0)


def test_a_whole_array_is_rows_of_steps(scored):
    said = parts(
        lambda completions: numpy.array([[1.0, 0.0], [0.5, 0.5]]), [scored("a\n\nb"), scored("c\n\nd")]
    )
    assert [p.steps for p in said] == [(1.0, 0.0), (0.5, 0.5)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0, float("nan")], "returned nan for step 2 of 2"),
        ([float("-inf"), 1.0], "returned -inf for step 1 of 2"),
        ([1.0, "good"], "returned a str instead of a number for step 2 of 2: 'good'"),
        ([None, 1.0], "returned a NoneType instead of a number for step 1 of 2: None"),
        ([[1.0], [0.0]], "returned a list instead of a number for step 1 of 2: [1.0]"),
    ],
)
def test_what_is_no_number_is_named_with_its_step(given, words, scored):
    part = parts(lambda completions: [given], [scored("a\n\nb")])[0]
    assert (part.value, part.steps, part.status, part.message) == (None, None, Status.INVALID, words)


def test_a_list_of_another_length_makes_its_row_invalid_alone(scored):
    said = parts(
        lambda completions: [[1.0, 0.0], [1.0], []],
        [scored("a\n\nb"), scored("c\n\nd", number=6), scored("e")],
    )
    assert said[0].steps == (1.0, 0.0)
    assert [(p.value, p.steps, p.status, p.message) for p in said[1:]] == [
        (None, None, Status.ERROR, "returned 1 number for 2 steps of a completion (prompt_id 6)"),
        (None, None, Status.ERROR, "returned 0 numbers for 1 step of a completion (prompt_id 0)"),
    ]


def test_a_worker_is_given_steps_and_gives_lists(tmp_path, scored):
    path = tmp_path / "prm.py"
    path.write_text(
        "def own(completion_steps): return [[len(s) for s in steps] for steps in completion_steps]\n"
        "class Lines:\n"
        "    def __call__(self, completions, **kwargs):\n"
        "        return [[1.0] * len(c.split('|')) for c in completions]\n"
    )
    rows = [scored("步骤|二"), scored("x")]
    with RewardSet.start([f"{path}:own", f"{path}:Lines"], step_separator="|") as rewards:
        found = rewards.score(rows, TrainerState())
        tried = trial(rewards, rows)
    assert [[p.steps for p in row.parts] for row in found.rows] == [
        [(2.0, 1.0), (1.0, 1.0)],
        [(1.0,), (1.0,)],
    ]
    assert tried.faults == [] and tried.of_steps == ("own", "Lines")


def test_a_trial_names_a_list_of_the_wrong_length(scored):
    def rough(completions):
        return [[1.0] for _ in completions]

    with RewardSet.start([rough]) as rewards:
        tried = trial(rewards, [scored("72", number=4), scored("", number=4)])
    assert [f.words for f in tried.faults] == [
        "returned 1 number for 0 steps of a completion (prompt_id 4); seen on row 5, with an empty completion"
    ]
    assert tried.of_steps == ("rough",)


def test_the_total_has_the_mean_of_steps_and_keeps_outcomes_apart(scored):
    steps = ScorePart(name="prm", value=0.5, steps=(1.0, 0.0))
    outcome = ScorePart(name="accuracy", value=1.0)
    score = total([outcome, steps], [1.0, 0.2], (3, 9))
    assert score.total == pytest.approx(1.1)
    assert score.steps is not None
    assert (score.steps.ends, score.steps.weights, score.steps.outcome) == ((3, 9), (1.0, 0.2), 1.0)
    assert total([outcome, outcome], [1.0, 0.2]).steps is None
    alone = total([steps], [2.0], (3, 9))
    assert (alone.total, alone.steps and alone.steps.outcome) == (1.0, None)
    failed = ScorePart(name="judge", value=None, status=Status.TIMEOUT)
    assert total([steps, failed], [1.0, 1.0], (3, 9)).steps is None


def test_only_rows_with_steps_are_asked_where_they_end(scored):
    asked = []

    def ends(row):
        asked.append(row)
        return (1, 2)

    given = judged(lambda completions: [0.5, [1.0, 0.0]], [scored("a"), scored("b\n\nc")])
    assert [s.steps and s.steps.ends for s in weighted(given, [1.0], ends)] == [None, (1, 2)]
    assert asked == [1]
