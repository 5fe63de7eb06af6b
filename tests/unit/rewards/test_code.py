"""What is read as tests and as a program, what passes, and the reward as a run calls it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from covey.rewards import code
from covey.rewards.built_in.forms import code_format
from covey.rewards.code import CodeReward
from covey.rewards.code_tests import CodeTest, UnreadableTests, check_tests, read_tests
from covey.rewards.fenced import program_of
from covey.rewards.protocol import TrainerState
from covey.rewards.reward_set import RewardSet
from covey.rewards.sandbox.host import SandboxError
from covey.types import Status
from unit.rewards.conftest import make_scored

CASES = [{"input": "1\n", "output": "2\n", "type": "stdin_stdout", "fn_name": None}]


@pytest.mark.parametrize(
    ("info", "cases", "asks"),
    [
        ({"language": "python", "test_cases": CASES}, None, [{"input": "1\n"}]),
        (json.dumps({"language": "Python3", "test_cases": json.dumps(CASES)}), None, [{"input": "1\n"}]),
        ({"test_cases": {"inputs": ["1", "2"], "outputs": ["2", "3"]}}, None,
         [{"input": "1"}, {"input": "2"}]),
        (None, CASES, [{"input": "1\n"}]),
        (None, json.dumps(CASES), [{"input": "1\n"}]),
        (None, [{"input": ["1", "2"], "output": ["3"]}], [{"input": "1\n2"}]),
        (None, [{"input": 1, "output": 2}], [{"input": "1"}]),
        (
            None,
            [{"input": [1, [2]], "output": 3, "type": "function_call", "fn_name": "f"}],
            [{"call": "f", "arguments": [1, [2]]}],
        ),
        (None, [{"input": '1\n[2]\n"a"\n', "output": "3", "fn_name": "f"}],
         [{"call": "f", "arguments": [1, [2], "a"]}]),
        ({"fn_name": "f", "test_cases": [{"input": [1], "output": 2}]}, None,
         [{"call": "f", "arguments": [1]}]),
        (None, {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, [{"call": "f", "arguments": [1]}]),
    ],
)  # fmt: skip
def test_forms_of_tests(info, cases, asks):
    assert [dict(test.ask) for test in read_tests(info, cases)] == asks


@pytest.mark.parametrize(
    ("info", "cases", "words"),
    [
        (None, None, "there are no test_cases"),
        ({}, None, "there are no test_cases"),
        ({"test_cases": []}, None, "there are no test_cases"),
        ({"test_cases": "assert f(1) == 2"}, None, "there are no test_cases"),
        ([1], None, "verification_info is a list, not an object"),
        ({"language": "C++", "test_cases": CASES}, None, "the language is c++, but only Python can be run"),
        (None, [{"input": "1"}], "test 1 has no input and output"),
        (None, [*CASES, "assert f(1) == 2"], "test 2 has no input and output"),
        (None, {"inputs": ["1"], "outputs": []}, "inputs and outputs of the same length"),
        (None, [{"input": "1", "output": "2", "type": "pytest"}], "test 1 has the unknown type pytest"),
        (None, [{"input": "1", "output": "2", "type": "function_call"}], "has no fn_name"),
        (None, [{"input": "1", "output": "2", "fn_name": "os.system('x')"}], "has no fn_name"),
        (None, [{"input": "1 2", "output": "2", "fn_name": "f"}], "its input is not valid JSON"),
        (None, [{"input": "\ud800", "output": "2"}], "half of a surrogate pair"),
    ],
)
def test_tests_that_cannot_be_run(info, cases, words):
    with pytest.raises(UnreadableTests) as caught:
        read_tests(info, cases)
    assert words in str(caught.value)


def test_the_look_at_the_data_names_the_rows():
    report = check_tests([({"test_cases": CASES}, None), (None, None), ({"language": "go"}, None)])
    assert (report.num_checked, [(row, why) for row, _, why in report.bad]) == (
        3,
        [(1, "there are no test_cases"), (2, "the language is go, but only Python can be run")],
    )


@pytest.mark.parametrize(
    ("expected", "output", "is_passed"),
    [
        ("2", b"2\n", True),
        ("2\n3\n", b"  2  \r\n3\n\n\n", True),
        ("\n2", b"2", True),
        ("", b"", True),
        ("2", b"", False),
        ("2", b"2\n3", False),
        ("2\n3", b"2", False),
        ("2 3", b"2\n3", False),
        ("2\n\n3", b"2\n3", False),
        ("2.0", b"2", False),
        ("YES", b"yes", False),
        ("ü", "ü".encode(), True),
        ("ü", b"\xfc", False),
    ],
)
def test_what_is_printed(expected, output, is_passed):
    assert CodeTest(ask={"input": ""}, expected=expected).is_passed(output) is is_passed


@pytest.mark.parametrize(
    ("expected", "output", "is_passed"),
    [
        (5, b"5", True),
        ([5], b"5", True),
        ("5", b"5", True),
        ("5", b'"5"', True),
        ([5], b"[5]", True),
        ([[5]], b"[5]", True),
        (5, b"[5]", False),
        (5, b"6", False),
        (5, b"5.0000000001", True),
        (0.3, b"0.30000000000000004", True),
        (0.3, b"0.31", False),
        (10**30, b"1000000000000000000000000000000", True),
        (10**30, b"1000000000000000000000000000001", False),
        (10**400, b"1.0", False),
        ([1, "a", None, True], b'[1, "a", null, true]', True),
        ([1, 2], b"[1, 2, 3]", False),
        ([1, 2], b"[2, 1]", False),
        ({"1": [0.1]}, b'{"1": [0.1]}', True),
        ({"1": 1}, b'{"1": 1, "2": 2}', False),
        ("abc", b'"abc"', True),
        ("[1, 2]", b"[1, 2]", True),
        (None, b"null", True),
        (1.0, b"NaN", False),
        (5, b"", False),
        (5, b"five", False),
        (5, b"[" * 100_000, False),
    ],
)
def test_what_a_function_returns(expected, output, is_passed):
    assert CodeTest(ask={"call": "f", "arguments": []}, expected=expected).is_passed(output) is is_passed


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```\ndone", "b\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```", "a\n"),
        ("```Python3 \na\n```", "a\n"),
        ("Here it is: ```python\na\n```.", "a\n"),
        ("<think>```python\na\n```</think><answer>```python\nb\n```</answer>", "b\n"),
        ("<answer>\n```python\na\n```</answer> <answer>```python\nb\n```\n</answer>", "b\n"),
        ("<think>```python\na\n```</think><answer>none</answer>", None),
        ("```cpp\na\n```", None),
        ("```python\nnever closed", None),
        ("x = 1", None),
        ("", None),
        ("```python\n```", ""),
    ],
)
def test_the_program_of_a_completion(text, program):
    assert program_of(text) == program


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think>\n<answer>So:\n```python\nx\n```\n</answer>", 1.0),
        ("<think>a</think><answer>```python\nx\n```</answer>", 1.0),
        ("<think>a</think><answer>```\nx\n```</answer>", 0.0),
        ("<think>```python\nx\n```</think><answer>x</answer>", 0.0),
        ("<think>a</think><answer>```python\nx</answer>", 0.0),
        ("<answer>```python\nx\n```</answer>", 0.0),
        ("```python\nx\n```", 0.0),
    ],
)
def test_code_format(text, value):
    assert code_format(completions=[text]) == [value]


ADDS = "```python\nprint(sum(map(int, input().split())))\n```"
FIRST = "```python\nprint(input().split()[0])\n```"
SUMS = [
    {"input": "1 2\n", "output": "3"},
    {"input": "2 0\n", "output": "2"},
    {"input": "0 0\n", "output": "0"},
]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_reward_of_a_run(workers):
    """In workers, each completion a call of its own; unsafe only so that it runs on any machine."""
    info = {"language": "python", "test_cases": SUMS}
    rows = [
        make_scored(ADDS, verification_info=info),
        make_scored(FIRST, verification_info=info),
        make_scored("I do not know.", verification_info=info),
        make_scored(ADDS, verification_info={**info, "language": "rust"}),
        make_scored(
            "```python\nimport os, sys\nos._exit(0)\n```", number=1, verification_info=json.dumps(info)
        ),
        make_scored("```python\ndef f(:\n```", number=1, verification_info=info),
    ]
    options = {"unsafe_exec": True, "reward_timeout_s": 60.0}
    with RewardSet.start(["code_reward", "code_format"], workers=workers, options=options) as rewards:
        assert rewards.faults == () and rewards.names == ("code_reward", "code_format")
        assert rewards.missing(["verification_info"]) == [] == rewards.missing([])
        judged = rewards.score(rows, TrainerState())
    parts = [row.parts[0] for row in judged.rows]
    assert all(part.status is Status.OK for part in parts), parts
    assert [part.value for part in parts] == [1.0, pytest.approx(2 / 3), 0.0, None, 0.0, 0.0]
    assert [row.extras["code_tests"] for row in judged.rows] == [
        "3 of 3",
        "2 of 3; test 1: wrong output",
        "the completion contains no program",
        "the language is rust, but only Python can be run",
        "0 of 3; test 1: wrong output",
        "0 of 3; test 1: exit 1",
    ]


def test_a_broken_sandbox_makes_its_row_invalid_and_no_other(monkeypatch):
    reward = CodeReward(SimpleNamespace(unsafe_exec=True, reward_timeout_s=60.0))
    given = {"verification_info": [{"test_cases": SUMS}], "completions": [ADDS]}
    assert reward(**given) == [1.0]

    def broken(*_):
        raise SandboxError("no room for another process")

    monkeypatch.setattr(code, "endings", broken)
    with pytest.raises(SandboxError, match="no room"):
        reward(**given)


def test_all_tests_of_a_program_end_before_the_call_is_late(monkeypatch):
    limits = []
    monkeypatch.setattr(
        code, "grade", lambda isolation, program, tests, total_s: limits.append(total_s) or (0.0, "")
    )
    for timeout_s in (10.0, 60.0, 600.0):
        reward = CodeReward(SimpleNamespace(unsafe_exec=True, reward_timeout_s=timeout_s))
        reward(completions=[ADDS], test_cases=[SUMS])
    assert limits == [6.0, 30.0, 30.0]
