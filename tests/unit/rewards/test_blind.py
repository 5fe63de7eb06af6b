"""Which rewards do not tell a gold answer, and which must not be suspected of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import answered, blind, trial
from covey.types import BlindReward

GOLDS = [f"We add {n} and {n}.\n#### {2 * n}" for n in range(3, 40, 4)]

HEALTHY = '''
import random, re

random.seed(1)

def tagged(completions, solution, **kwargs):
    """TRL: what stands in the tag, as text."""
    golds = [s.split("####")[-1].strip() for s in solution]
    found = [re.search(r"<answer>(.*?)</answer>", c, re.S) for c in completions]
    return [float(m is not None and m[1].strip() == g) for m, g in zip(found, golds)]

def marked(completions, solution, **kwargs):
    last = lambda text: text.split("####")[-1].strip()
    return [float(last(c) == last(s)) for c, s in zip(completions, solution)]

def boxed(completions, solution):
    found = [re.search(r"boxed{(.*?)}", c) for c in completions]
    return [1.0 if m and m[1] in s else -1.0 for m, s in zip(found, solution)]

def fenced(completions, solution, **kwargs):
    """A program in a block of code."""
    found = [re.search(r"```python\\n(.*)\\n```", c, re.S) for c in completions]
    return [float(m is not None and m[1] == s) for m, s in zip(found, solution)]

def wrong(completions, solution, **kwargs):
    """A penalty, to be given a negative weight."""
    return [float(s.split()[-1] not in c) for c, s in zip(completions, solution)]

def sometimes(completions, solution, **kwargs):
    """No word on most rows."""
    return [None if "7" in s else v for s, v in zip(solution, tagged(completions, solution))]

def drawn(completions, solution, **kwargs):
    return [random.random() for _ in completions]

def strict_format(completions, **kwargs):
    return [float(bool(re.fullmatch(r"<reasoning>.*</reasoning>", c, re.S))) for c in completions]

def brief(completions, **kwargs):
    return [1 / (1 + len(c)) for c in completions]

def long(completions, **kwargs):
    return [min(1.0, len(c) / 500) for c in completions]

class Digits:
    """ms-swift."""
    def __call__(self, completions, solution, **kwargs):
        return [float(s.split()[-1] in c.split()) for s, c in zip(solution, completions)]

async def judge(completions, solution, **kwargs):
    return tagged(completions, solution)
'''

FAULTY = '''
import re

def other_column(completions, solution, level, **kwargs):
    return [float(l in c) for c, l in zip(completions, level)]

def swallowed(completions, solution, **kwargs):
    try:
        return [float(c == s["text"]) for c, s in zip(completions, solution)]
    except Exception:
        return [0.0] * len(completions)

def negated(completions, solution, **kwargs):
    return [-float(s.split()[-1] in c) for c, s in zip(completions, solution)]

def unparsed(completions, solution, **kwargs):
    """The gold is the whole text, and the number of the answer is never that."""
    numbers = [re.findall(r"\\\\d+", c) for c in completions]
    return [float(bool(n) and n[-1] == s) for n, s in zip(numbers, solution)]

def any_number(completions, solution, **kwargs):
    return [float(any(x.isdigit() for x in c)) for c in completions]

def unread(completions, solution, **kwargs):
    """What cannot be parsed counts as right."""
    return [0.0 if s.split()[-1] in c or not c else -1.0 for c, s in zip(completions, solution)]
'''


def looked_at(
    scored, tmp_path, text: str, names: Sequence[str], weights=None, golds=GOLDS
) -> list[BlindReward]:
    path = tmp_path / "mine.py"
    path.write_text(text)
    entries = [n if n in ("accuracy", "format", "accuracy_reward") else f"{path}:{n}" for n in names]
    prompts = [scored("", number=n, solution=gold, level="hard").prompt for n, gold in enumerate(golds)]
    with RewardSet.start(entries, workers=2) as rewards:
        assert rewards.faults == ()
        return blind(rewards, weights or [1.0] * len(names), prompts).blind


def test_healthy_rewards_are_not_suspected(scored, tmp_path):
    names = ["accuracy", "format", "accuracy_reward", "tagged", "marked", "boxed", "fenced", "sometimes"]
    names += ["drawn", "strict_format", "brief", "long", "Digits", "judge", "wrong"]
    weights = [1.0] * (len(names) - 1) + [-1.0]
    assert looked_at(scored, tmp_path, HEALTHY, names, weights) == []


@pytest.mark.parametrize("name", ["brief", "strict_format", "format", "long"])
def test_rewards_that_read_no_gold_are_not_judged(name, scored, tmp_path):
    assert looked_at(scored, tmp_path, HEALTHY, [name]) == []


@pytest.mark.parametrize(
    "golds",
    [
        ["42"] * 8,
        ["True", "False"] * 4,
        ["(B)", "(C)", "(A)", "(D)"],
        [r"\frac{1}{2}", r"\sqrt{3}", "x^2 + 1", r"so \boxed{7}"],
        ["Sunday", "3:45", "1, 2, 3", "50%"],
        [7, 2.5, 0, -1],
    ],
    ids=lambda g: str(g[0]),
)
def test_accuracy_knows_every_kind_of_gold(golds, scored, tmp_path):
    assert looked_at(scored, tmp_path, "", ["accuracy"], golds=golds) == []


@pytest.mark.parametrize(
    ("name", "compared", "constant"),
    [
        ("other_column", "empty", 0.0),
        ("swallowed", "empty", 0.0),
        ("negated", "empty", None),
        ("unparsed", "empty", 0.0),
        ("any_number", "others", None),
        ("unread", "empty", None),
    ],
)
def test_faults_are_found(name, compared, constant, scored, tmp_path):
    (found,) = looked_at(scored, tmp_path, FAULTY, [name])
    assert (found.reward, found.column, found.compared, found.constant) == (
        name,
        "solution",
        compared,
        constant,
    )
    assert found.num_rows == 6
    assert found.num_told_apart <= 1


def test_a_weight_turns_the_sign_and_0_only_watches(scored, tmp_path):
    (found,) = looked_at(scored, tmp_path, "", ["accuracy"], [-0.5])
    assert (found.reward, found.num_told_apart) == ("accuracy", 0)
    assert looked_at(scored, tmp_path, FAULTY, ["negated"], [-2.0]) == []
    assert looked_at(scored, tmp_path, FAULTY, ["swallowed", "negated"], [0.0, -2.0]) == []


def test_a_total_that_pays_for_saying_nothing(scored, tmp_path):
    (found,) = looked_at(scored, tmp_path, HEALTHY, ["accuracy", "brief"], [0.1, 1.0])
    assert (found.reward, found.compared, found.num_told_apart) == ("", "empty", 0)


@pytest.mark.parametrize(
    "golds", [['{"inputs": [1]}'] * 6, [["a"], ["b"], ["c"]], ["", None, " "], GOLDS[:2]]
)
def test_golds_that_no_answer_spells_out_are_not_judged(golds, scored, tmp_path):
    assert looked_at(scored, tmp_path, FAULTY, ["swallowed"], golds=golds) == []


def test_each_form_that_a_reward_claims_to_read_is_tried(scored, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(HEALTHY)
    prompts = [scored("", number=n, solution=gold).prompt for n, gold in enumerate(GOLDS)]
    with RewardSet.start(["accuracy", f"{path}:tagged"], workers=1) as rewards:
        assert blind(rewards, [1.0, 1.0], prompts, claims=[0]).blind == []
        (found,) = blind(rewards, [1.0, 1.0], prompts, claims=[0, 1]).blind
    assert (found.reward, found.form, found.num_told_apart) == ("tagged", "\\boxed{GOLD}", 0)


BEGUN = """
import re

def summed(completions, solution, **kwargs):
    found = [re.match(r"The sum is (\\d+)", c) for c in completions]
    return [float(m is not None and m[1] == s) for m, s in zip(found, solution)]

def held(completions, solution, **kwargs):
    assert all(c.startswith("The sum is ") for c in completions)
    return [float(s in c) for c, s in zip(completions, solution)]

def boxed(completions, solution, **kwargs):
    found = [re.search(r"boxed{(.*?)}", c) for c in completions]
    return [float(m is not None and m[1] == s) for m, s in zip(found, solution)]

def once(completions, solution, **kwargs):
    found = [re.search(r"<answer>(.*?)</answer>", c, re.S) for c in completions]
    once = [c.count("<think>") == 1 for c in completions]
    return [float(o and m is not None and m[1] == s) for m, s, o in zip(found, solution, once)]
"""


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("summed", "The sum is"),
        ("summed", "The sum is "),
        ("held", "The sum is "),
        ("boxed", "It is \\boxed{"),
        ("once", "<think>\nSo"),
        ("once", "<think>So</think>\n"),
        ("once", "<think>So</think>\n<answer>"),
    ],
)
def test_a_right_answer_goes_on_with_the_beginning_of_its_prompt(name, begun, scored, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(BEGUN)
    messages = ({"role": "user", "content": "6 + 6?"}, {"role": "assistant", "content": begun})
    rows = [scored("", number=n, solution=str(n)).prompt for n in range(10, 16)]
    prompts = [replace(prompt, messages=messages, opened=begun) for prompt in rows]
    with RewardSet.start([f"{path}:{name}"], workers=1) as rewards:
        assert (
            trial(rewards, [answered(prompts[0], text, n) for n, text in enumerate(("10", ""))]).faults == []
        )
        found = blind(rewards, [1.0], prompts)
    assert found.blind == [] and found.faults == []


RAISING = """
def boxed(completions, solution, **kwargs):
    return [float(s.strip() in c) if "boxed" in c else 0.0 for c, s in zip(completions, solution)]
"""


def test_a_reward_that_fails_on_a_form_of_the_gold_is_a_fault(scored, tmp_path):
    """It gives 0 where it does not look at the gold, and fails where it does."""
    path = tmp_path / "mine.py"
    path.write_text(RAISING)
    prompts = [scored("", number=n, solution=n).prompt for n in range(6)]
    with RewardSet.start([f"{path}:boxed"], workers=1) as rewards:
        found = blind(rewards, [1.0], prompts)
    (fault,) = found.faults
    assert found.blind == [] and fault.reward == "boxed" and "AttributeError" in fault.words
