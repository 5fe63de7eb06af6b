"""How a reward function is called, and what becomes of one that fails: a status, never a number.

The functions here are closures, which run in this process.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from covey.rewards.protocol import TrainerState
from covey.rewards.reward_set import RewardSet
from covey.rewards.swift_standin import ORM
from covey.types import Finish, Metric, ScorePart, Status

STANDARD = {
    "prompts",
    "completions",
    "completion_steps",
    "completion_ids",
    "messages",
    "response_token_ids",
    "finish_reason",
}
STANDARD |= {"is_truncated", "prompt_id", "trainer_state", "log_extra", "log_metric"}


def judged(function, rows, **options):
    """What one function says of rows."""
    with RewardSet.start([function], **options) as rewards:
        assert rewards.faults == ()
        return rewards.score(rows, TrainerState(global_step=3, max_steps=10, epoch=0.5))


def parts(function, rows, **options):
    return [row.parts[0] for row in judged(function, rows, **options).rows]


def test_a_completion_that_continues_a_message_is_given_with_it(scored):
    seen = {}

    def reward(prompts, completions, messages):
        seen.update(prompts=prompts, completions=completions, messages=messages)
        return [0.0]

    turns = ({"role": "user", "content": "U"}, {"role": "assistant", "content": "So "})
    judged(reward, [scored("3", prompt="P", turns=turns, opened="So ")], completion_form="messages")
    whole = {"role": "assistant", "content": "So 3"}
    assert seen == {"prompts": [[*turns]], "completions": [[whole]], "messages": [[turns[0], whole]]}


def test_a_function_that_names_images_is_given_them_for_rows_without(scored):
    """Of data with and without, a call may have rows without alone."""
    seen = []

    def reward(completions, images, image="unset", **kwargs):
        seen.append((images, image))
        return [float(len(own)) for own in images]

    assert [part.value for part in parts(reward, [scored("3"), scored("4")])] == [0.0, 0.0]
    assert seen == [([[], []], [None, None])]


def test_a_function_with_keywords_gets_everything(scored):
    seen = {}

    def reward(completion_steps, **kwargs):
        seen.update(kwargs, completion_steps=completion_steps)
        return [0.0, 0.0]

    turns = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})
    rows = [
        scored("a", prompt="P", solution="3", number=7, turns=turns, opened="<think>"),
        scored("b", level=2, ids=(5,), finish=Finish.LENGTH),
    ]
    judged(reward, rows)
    assert seen.keys() == {*STANDARD, "level", "solution"}
    state = seen["trainer_state"]
    assert (state.global_step, state.max_steps, state.epoch) == (3, 10, 0.5)
    assert {k: v for k, v in seen.items() if k not in ("trainer_state", "log_extra", "log_metric")} == {
        "prompts": ["P", "Q?"],
        "completions": ["<think>a", "b"],
        "completion_steps": [["<think>a"], ["b"]],
        "completion_ids": [[1, 2], [5]],
        "response_token_ids": [[1, 2], [5]],
        "messages": [
            [*turns, {"role": "assistant", "content": "<think>a"}],
            [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "b"}],
        ],
        "finish_reason": ["stop", "length"],
        "is_truncated": [False, True],
        "prompt_id": ["7", "0"],
        "level": [None, 2],
        "solution": ["3", None],
    }


def test_the_form_of_prompts_and_completions(scored):
    seen = []
    turns = ({"role": "user", "content": "U"},)

    def reward(prompts, completions):
        seen.append((prompts, completions))
        return [0.0]

    class Judge:
        def __call__(self, prompts, completions, **kwargs):
            return reward(prompts, completions)

    class Orm(ORM):
        def __call__(self, completions, **kwargs):
            return reward(kwargs["prompts"], completions)

    rows = [scored("a", prompt="P", turns=turns)]
    text = (["P"], ["a"])
    messages = ([[{"role": "user", "content": "U"}]], [[{"role": "assistant", "content": "a"}]])
    judged(reward, rows)
    for function in (reward, Judge(), Judge().__call__, partial(reward)):
        judged(function, rows, prompt_is_messages=True)
    for swift in (Orm(), Orm):
        judged(swift, rows, prompt_is_messages=True)
    judged(reward, rows, prompt_is_messages=True, completion_form="text")
    judged(Orm(), rows, completion_form="messages")
    assert seen == [text, *[messages] * 4, text, text, text, messages]


def test_a_column_never_takes_the_place_of_what_was_sampled(scored):
    def reward(completions, prompts, prompt_id):
        rows = zip(completions, prompts, prompt_id, strict=True)
        return [float((c, p, i) == ("a", "Q?", "0")) for c, p, i in rows]

    rows = [scored("a", completions="gold", prompts="other", prompt_id="9")]
    assert parts(reward, rows) == [ScorePart(name="reward", value=1.0)]


def test_a_default_stands_where_the_column_is_missing(scored):
    def reward(completions, solution="default"):
        return [1.0 if solution == "default" else 0.0]

    assert parts(reward, [scored("a")])[0].value == 1.0
    assert parts(reward, [scored("a", solution="x")])[0].value == 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions: 1 / 0, "ZeroDivisionError: division by zero (test_callee.py, line "),
        (lambda completions, solution: [1.0], "TypeError"),  # a column that no row has
        (lambda completions: None, "returned None instead of a list with one number per completion"),
        (lambda completions: 1.0, "returned 1.0 instead of a list"),
        (lambda completions: "ab", "returned 'ab' instead of a list"),
        (lambda completions: {"a": 1, "b": 2}, "instead of a list"),
        (lambda completions: [], "returned 0 values for 2 completions"),
        (lambda completions: [1.0], "returned 1 value for 2 completions"),
        (lambda completions: [1.0] * 3, "returned 3 values for 2 completions"),
        (lambda completions: exit(4), "SystemExit: 4"),
    ],
)
def test_a_call_that_fails_marks_every_row(function, message, scored):
    failed = parts(function, [scored("a"), scored("b")])
    assert [(p.name, p.value, p.status) for p in failed] == [("lambda", None, Status.ERROR)] * 2
    assert all(message in p.message for p in failed), failed


def test_an_extra_has_one_value_a_row(scored):
    def reward(completions, log_extra):
        log_extra("x", [1, 2, 3])
        return [0.0] * len(completions)

    (said,) = parts(reward, [scored("a")])
    assert said.status is Status.ERROR
    assert said.message.startswith("ValueError: log_extra('x') returned 3 values for 1 completion (")


def test_one_row_that_raises_leaves_the_others_their_values(scored):
    calls = []

    def reward(completions, solution):
        calls.append(completions)
        return [float(int(s)) for s in solution]

    rows = [scored("a", solution="1"), scored("b", solution="x"), scored("c", solution="3")]
    said = parts(reward, rows)
    assert [p.value for p in said] == [1.0, None, 3.0]
    assert said[1].status is Status.ERROR
    assert said[1].message.startswith("ValueError: invalid literal for int() with base 10: 'x' (test_callee")
    assert said[1].message.endswith("return [float(int(s)) for s in solution])")
    assert calls == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert said[0].message == said[2].message == said[1].message, "why they were scored alone"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_marks_its_row_alone(bad, scored):
    said = parts(lambda completions: [1.0, bad], [scored("a"), scored("b")])
    assert said[0] == ScorePart(name="lambda", value=1.0)
    assert (said[1].value, said[1].status, said[1].message) == (
        None,
        Status.INVALID,
        f"returned {bad} instead of a finite number or None",
    )


@pytest.mark.parametrize("bad", ["good", "1.0", {"score": 1}, object()])
def test_a_value_that_is_no_number_is_a_status_too(bad, scored):
    said = parts(lambda completions: [1.0, bad], [scored("a"), scored("b")])
    assert (said[0].value, said[1].value, said[1].status) == (1.0, None, Status.INVALID)
    assert f"returned a {type(bad).__name__} instead of a number or None" in said[1].message


def test_values_become_floats(scored):
    import numpy

    rows = [scored(t) for t in "abc"]
    for values in ([True, 1, numpy.float32(0.5)], (1, 1, 0.5), numpy.array([1.0, 1.0, 0.5])):
        said = parts(lambda completions, values=values: values, rows)
        assert [p.value for p in said] == [1.0, 1.0, 0.5]
        assert {type(p.value) for p in said} == {float}


def test_coroutines_are_awaited_on_one_loop(scored):
    loops = set()

    async def function(completions):
        loops.add(id(asyncio.get_running_loop()))
        return await asyncio.gather(*(asyncio.sleep(0, len(c)) for c in completions))

    class Orm:
        async def __call__(self, completions, **kwargs):
            await asyncio.sleep(0)
            return [2.0 for _ in completions]

    async def in_a_notebook():
        return rewards.score(rows, TrainerState())

    rows = [scored("a"), scored("bcd")]
    with RewardSet.start([function, Orm]) as rewards:
        first = rewards.score(rows, TrainerState())
        assert first == asyncio.run(in_a_notebook())
    assert [[p.value for p in row.parts] for row in first.rows] == [[1.0, 2.0], [3.0, 2.0]]
    assert len(loops) == 1


def test_notes_of_several_rewards(scored):
    def first(completions, log_extra, log_metric):
        log_extra("seen", [1, {2}])
        log_metric("share", 0.25)
        return [1.0, 1.0]

    def second(completions, log_extra, log_metric):
        log_extra("seen", ["x", "y"])
        log_metric("share", 0.75)
        log_metric("other", True)
        return [1.0, 1.0]

    with RewardSet.start([first, second]) as rewards:
        said = rewards.score([scored("a"), scored("b")], TrainerState())
    assert [row.extras for row in said.rows] == [
        {"seen": 1, "second.seen": "x"},
        {"seen": "{2}", "second.seen": "y"},
    ]
    assert said.metrics == {"share": Metric(value=0.5, count=2), "other": Metric(value=1.0, count=1)}


def test_why_a_function_cannot_be_used():
    def by_position(completions, /):
        return []

    def demanding(completions, answr, prompts, level=None):
        return []

    class Broken:
        def __init__(self):
            raise RuntimeError("no endpoint")

    with RewardSet.start([by_position, 7, Broken]) as rewards:
        assert [(f.reward, f.kind) for f in rewards.faults] == [
            ("by_position", "signature"),
            ("int", "not_callable"),
            ("Broken", "import"),
        ]
        assert "takes completions only by position" in rewards.faults[0].words
        assert "RuntimeError: no endpoint (test_callee.py, line " in rewards.faults[2].words
    with RewardSet.start([demanding]) as rewards:
        (fault,) = rewards.missing(["answer", "question"])
        assert (fault.reward, fault.kind) == ("demanding", "signature")
        assert (
            "needs the argument answr, but no column of the data has this name (the nearest is answer)"
            in fault.words
        )
        assert rewards.missing(["answr"]) == []
