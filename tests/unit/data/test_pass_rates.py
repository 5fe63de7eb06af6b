"""Pass rates: what passes, what is counted, whose prompt it is, and the order that follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.data.errors import DataError
from covey.data.order import Order
from covey.data.pass_rates import bin_of, checksum, digest, levels, passes, rate_of, tallies_of, tally
from covey.types import Origin, Prompt, ScorePart, Status

TURN = {"role": "user", "content": "What is 1+2?"}
PROMPT = Prompt(
    id=7,
    messages=(TURN,),
    text="<|im_start|>user…",
    token_ids=(1, 2),
    columns={"solution": "3"},
    origin=Origin(epoch=0, rollout=0),
)


def part(name: str, value: float | None, status: Status = Status.OK) -> ScorePart:
    return ScorePart(name=name, value=value, status=status)


# (parts of a completion, whether it passes)
PASSES = [
    ([part("accuracy", 1.0), part("format", 0.0)], True),  # the format is no part of being right
    ([part("accuracy", 0.0), part("format", 1.0)], False),
    ([part("accuracy", None), part("judge", 1.0), part("format", 1.0)], True),
    ([part("accuracy", None), part("judge", 1.0), part("format", 0.9)], False),
    ([part("judge", 7.5)], True),
    ([part("judge", 0.99)], False),
    ([part("judge", None)], None),
    ([part("judge", None, Status.ERROR), part("accuracy", 1.0)], None),
    ([], None),
]


@pytest.mark.parametrize(("parts", "expected"), PASSES, ids=str)
def test_passes(parts, expected):
    assert passes(parts) is expected


def test_a_tally_by_hand():
    right, wrong, failed = (
        [part("accuracy", 1.0)],
        [part("accuracy", 0.0)],
        [part("accuracy", None, Status.TIMEOUT)],
    )
    found = tally([("a", right), ("b", wrong), ("a", wrong), ("a", right), ("a", failed), ("c", failed)])
    assert {key: (t.rate, t.num) for key, t in found.items()} == {"a": (2 / 3, 3), "b": (0.0, 1)}


def test_lines_of_one_prompt_are_added_up_by_their_samples():
    lines = [
        {"checksum": "a", "pass_rate": 1.0, "samples": 1},
        {"checksum": "a", "pass_rate": 0.5, "samples": 4},
        {"checksum": "b", "pass_rate": 0.25},
    ]
    found = tallies_of(lines)
    # 1 of 1 and 2 of 4 are 3 of 5.
    assert {key: (t.rate, t.num) for key, t in found.items()} == {"a": (0.6, 5), "b": (0.25, 1)}
    assert digest(found) == digest(tallies_of(reversed(lines)))
    assert digest(found) != digest(tallies_of(lines[1:]))


@pytest.mark.parametrize(
    "line",
    [{}, {"checksum": "a"}, {"checksum": "a", "pass_rate": 1.5}, {"checksum": "a", "pass_rate": "0.5"},
     {"checksum": 3, "pass_rate": 0.5}, {"checksum": "a", "pass_rate": 0.5, "samples": 0},
     {"checksum": "a", "pass_rate": float("nan")}, {"checksum": "a", "pass_rate": True}],
    ids=str,
)  # fmt: skip
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(DataError, match="line 2"):
        tallies_of([{"checksum": "b", "pass_rate": 0.5}, line])


def test_a_prompt_is_known_by_its_messages_wherever_it_stands():
    other = replace(PROMPT, id=0, text="another template", token_ids=(3,), columns={}, task="math")
    assert checksum(other) == checksum(PROMPT) and len(checksum(PROMPT)) == 16
    shuffled = replace(PROMPT, messages=({"content": TURN["content"], "role": "user"},))
    assert checksum(shuffled) == checksum(PROMPT)
    asked = replace(PROMPT, messages=({"role": "user", "content": "What is 1+3?"},))
    system = replace(PROMPT, messages=({"role": "system", "content": "Be brief."}, TURN))
    raw = replace(PROMPT, messages=None, text="What is 1+2?")
    assert len({checksum(p) for p in (PROMPT, asked, system, raw, replace(raw, text="What?"))}) == 5
    # One that was read back from a record has lost its messages, and brings its checksum.
    assert checksum(replace(raw, checksum=checksum(PROMPT))) == checksum(PROMPT)


def test_tenths():
    assert [bin_of(k / 10) for k in range(11)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    assert [bin_of(x) for x in (0.0999, 0.25, 1 / 3, 2 / 3, 0.999)] == [0, 2, 3, 6, 9]


def test_rates():
    values = [0, 1, 0.5, -0.1, 1.1, "1", None, True, float("nan")]
    assert [rate_of(v) for v in values] == [0.0, 1.0, 0.5] + [None] * 6


def test_the_direction_of_a_curriculum():
    rates = [0.5, 1.0, 0.0, None, 0.95, 0.25]
    prompts = [replace(PROMPT, id=i, pass_rate=rate) for i, rate in enumerate(rates)]
    plain = Order(num_prompts=6, per_rollout=3, seed=0, shuffle=False)

    def drawn(curriculum: str) -> list[int]:
        order = replace(plain, levels=levels(curriculum, [p.pass_rate for p in prompts]))
        return [n for i in range(2) for n in order.take(i)[1]]

    # What nobody measured counts as a half; 1.0 and 0.95 are of one tenth, and stand as in the data.
    assert drawn("easy_to_hard") == [1, 4, 0, 3, 5, 2]
    assert drawn("hard_to_easy") == [2, 5, 0, 3, 1, 4]
    assert drawn("none") == [0, 1, 2, 3, 4, 5]
