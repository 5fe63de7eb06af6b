r"""The `accuracy` reward: where gold and answer are read from, and what counts as equal."""

from __future__ import annotations

import threading
import time

import pytest

from covey.rewards.accuracy import accuracy, extract_answer, extract_gold, last_boxed


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("72", "72"),
        ("  72 \n", "72"),
        ("<think>so</think><answer> 72 </answer>", "72"),
        ("She has 48/2 = 24.\nIn all 48+24.\n#### 72", "72"),
        ("#### 1 #### 72", "72"),
        (r"Thus \boxed{3} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        # In this order: the tag, then the marks, then the box.
        (r"<answer>1</answer> #### 2 \boxed{3}", "1"),
        # Marks nest.
        (r"#### 2 \boxed{3}", "3"),
        (r"<answer>\boxed{\boxed{3}}</answer>", "3"),
        ("<answer>so\n#### 3</answer>", "3"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("Sunday", "Sunday"),
    ],
)
def test_the_gold_of_a_solution(text, gold):
    assert extract_gold(text) == gold


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1+2</think><answer>3</answer>", "3"),
        ("<answer>1</answer> no, <answer>\n3\n</answer>", "3"),
        (r"first \boxed{1}, then \boxed{3}", "3"),
        (r"<answer>1</answer> \boxed{3}", "1"),
        ("1 + 2 makes 3", "3"),
        ("The answer is 1,234.5 apples.", "1,234.5"),
        ("It is -7.", "-7"),
        ("It is .5", ".5"),
        ("It is 3/4 of it", "3/4"),
        ("no number at all", None),
        ("", None),
        ("<answer></answer>", ""),
        ("<answer>1</answer> and <answer>2", "1"),
        ("well <answer> 12", "12"),
        ("It is $x+1$.", "x+1"),
        (r"It is \(x+1\).", "x+1"),
        ("It costs $18 and then $20.", "$20"),
        (r"That is \frac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}"),
        ("It is 50% of 3, so 50%.", "50%"),
        ("The answer is (B).", "B"),
        ("The answer is **B**", "B"),
        ("答案是 B。", "B"),
        ("答案：42", "42"),
        ("答案：星期日", "星期日"),
        ("The answer is Sunday, as 3 days pass.", "Sunday"),
        ("The answer is 1, 2 and 3.", "1, 2 and 3"),
        ("The answer is what we found: 12", "12"),
        ("The answer is Sunday.", "Sunday"),
        ("The answer is 3 or 4.", "3 or 4"),
        ("It is 3 or 4", "3 or 4"),
        ("It is 3:4.", "3:4"),
        ("1, 2, 3", "1, 2, 3"),
        ("(3, 4)", "(3, 4)"),
        ("B", "B"),
    ],
)
def test_the_answer_of_a_completion(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b{c}}d}", "a{b{c}}d"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed", None),
        (r"\boxed{1} and \boxed{never closed", "1"),
        (r"\boxed{\boxed{1}}", r"\boxed{1}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed {3}", "3"),
        (r"\boxed 3.", "3"),
        (r"\boxed3", "3"),
        (r"\boxed{1} or \boxed 3", "3"),
        (r"\boxed 3 or \boxed{1}", "1"),
        (r"\fbox{3}", "3"),
        ("none", None),
    ],
)
def test_the_last_box(text, content):
    assert last_boxed(text) == content


RIGHT = [
    ("72", "72"),
    ("72", "<answer>72</answer>"),
    ("72", "<think>70 + 2</think>\n<answer> 72 </answer>"),
    ("72", r"so it is \boxed{72}."),
    ("72", "That makes 72 apples."),
    ("72", "**72** km/h"),
    ("72", "<answer>72.0</answer>"),
    ("72", "<answer>$72$</answer>"),
    ("72", "<answer>+72</answer>"),
    ("72", "<answer>072</answer>"),
    ("1234", "<answer>1,234</answer>"),
    ("1,234", "1234"),
    ("-3", "<answer>-3</answer>"),
    ("0.5", "<answer>.50</answer>"),
    ("0.5", "<answer>1/2</answer>"),
    ("1/2", "<answer>2/4</answer>"),
    ("1/2", r"\boxed{\frac{1}{2}}"),
    (r"\frac{3}{4}", "<answer>0.75</answer>"),
    (r"Thus \boxed{\sqrt{2}}", r"\boxed{\frac{2}{\sqrt{2}}}"),
    ("x + 1", r"\boxed{1 + x}"),
    (r"#### 72", "72"),
    ("<answer>72</answer>", "72"),
    ("72", r"<answer>\frac{144}{2}</answer>"),
    ("Sunday", "<answer>sunday.</answer>"),
    ("New  York", "<answer>new york</answer>"),
    ("(B)", "<answer>(B)</answer>"),
    ("True", "<answer>true</answer>"),
    ("1, 2, 3", "<answer>1, 2, 3</answer>"),
    ("1, 2, 3", "<answer>1,2,3</answer>"),
    ("72", "<answer>72 apples</answer>"),
]

WRONG = [
    ("72", "<answer>71</answer>"),
    ("72", "<answer>720</answer>"),
    ("72", "<answer>-72</answer>"),
    # A noun may stand behind the number; other words around it are no answer.
    ("72", "<answer>72x</answer>"),
    ("72", "<answer>7 2 apples</answer>"),
    ("72", "nothing to see"),
    ("72", ""),
    ("72", "<answer></answer>"),
    ("72", "72 or 73"),
    ("72", "<answer>71</answer> 72"),
    ("72", "<answer>seventy-two apples</answer>"),
    # The question is no answer.
    ("72", "<answer>8*9</answer>"),
    ("57", "<answer>12+45</answer>"),
    ("57", r"\boxed{12 + 45}"),
    ("1/2", "<answer>1/3</answer>"),
    ("1/2", "<answer>1/0</answer>"),
    ("0.5", "<answer>0.05</answer>"),
    ("1234", "<answer>1.234</answer>"),
    (r"\sqrt{2}", "<answer>1.4</answer>"),
    ("x + 1", "<answer>x - 1</answer>"),
    ("Sunday", "<answer>Monday</answer>"),
    ("(B)", "<answer>(C)</answer>"),
    ("True", "<answer>False</answer>"),
    # A list is no number, however it is run together.
    ("1, 2, 3", "<answer>123</answer>"),
    ("1, 2, 3", "<answer>1, 2, 4</answer>"),
    ("1, 2, 3", "<answer>3</answer>"),
    ("123", "<answer>1, 2, 3</answer>"),
    ("123", "<answer>1,2,3</answer>"),
    ("1,2,3", "<answer>123</answer>"),
    ("12", "<answer>1 2</answer>"),
]


@pytest.mark.parametrize(("gold", "text"), RIGHT)
def test_right(gold, text):
    assert accuracy(completions=[text], solution=[gold]) == [1.0]


@pytest.mark.parametrize(("gold", "text"), WRONG)
def test_wrong(gold, text):
    assert accuracy(completions=[text], solution=[gold]) == [0.0]


def test_the_gold_is_always_right():
    # A reward is valid when its verifier accepts the gold, as it stands and as an answer.
    golds = [
        "72",
        "-1,000",
        "3.14",
        "5/8",
        r"\frac{1}{3}",
        r"\sqrt{3}",
        "x^2 + 1",
        "Sunday",
        "(A)",
        r"\pi",
        "1e3",
    ]
    for form in ("<answer>{}</answer>", r"\boxed{{{}}}"):
        assert accuracy(completions=[form.format(g) for g in golds], solution=golds) == [1.0] * len(golds)


def test_a_missing_gold_is_none_and_not_wrong():
    completions = ["<answer>1</answer>"] * 3
    assert accuracy(completions=completions, solution=[1, None, "2"]) == [1.0, None, 0.0]
    assert accuracy(completions=completions) == [None] * 3


def test_the_column_may_be_answer_and_solution_goes_first():
    completions = ["<answer>1</answer>"]
    assert accuracy(completions=completions, answer=["1"]) == [1.0]
    assert accuracy(completions=completions, solution=["2"], answer=["1"]) == [0.0]


@pytest.mark.parametrize("gold", [72, 72.0])
def test_golds_that_are_numbers(gold):
    assert accuracy(completions=["72", "73"], solution=[gold, gold]) == [1.0, 0.0]


def test_how_answers_were_found_is_told():
    told = []
    accuracy(
        completions=["<answer>1</answer>", "<answer>1", r"\boxed{1}", "It is 1", "no idea at all", ""],
        solution=["1"] * 6,
        log_extra=lambda column, values: told.append((column, values)),
    )
    found = ["answer_tag", "answer_tag", "boxed", "last_expression", "none", "none"]
    assert told == [("parsed_by", found)]


def test_rows_are_compared_one_by_one():
    assert accuracy(completions=["1", "2", "3"], solution=["1", "1", "3"]) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        accuracy(completions=["1"], solution=["1", "2"])


def test_a_long_answer_takes_no_time():
    started = time.perf_counter()
    for text in (
        "9" * 1_000_000,
        "<answer>" + "9" * 1_000_000 + "</answer>",
        "\\boxed{" + "x+" * 100_000 + "1}",
    ):
        assert accuracy(completions=[text], solution=["72"]) == [0.0]
        assert accuracy(completions=[text], solution=[r"\frac{1}{3}"]) == [0.0]
    assert time.perf_counter() - started < 5


def test_mathematics_off_the_main_thread():
    # math-verify limits its time by an alarm signal, which only a main thread may set.
    found = []

    def compare():
        found.extend(accuracy(completions=[r"\boxed{\frac{2}{4}}"], solution=[r"\frac{1}{2}"]))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert found == [1.0]
