"""Every option of the rewards changes the result in the direction that its documentation states.

From the option as it is typed to the reward of a completion. That each number is right is for the other files
of this folder; what takes a run, a service or a process to show is named with the test that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.checks.rewards.look import with_rewards
from covey.options.schema import OPTIONS, group_of
from covey.plan.facts import Facts
from covey.rewards.protocol import Scored, TrainerState
from covey.rewards.registry import build, score_rows
from support.checks import config

Told = Callable[..., float]


@pytest.fixture
def told(scored: Callable[..., Scored]) -> Told:
    """`told("the text", tokens, reward_funcs=[...], ...)`: the reward of one completion whose gold is 5."""

    def total(text: str, tokens: int = 10, gold: Any = "5", **options: Any) -> float:
        resolved = config(**options)
        rewards = build(resolved.reward_funcs, resolved.model_dump())
        row = scored(text, ids=(7,) * tokens, solution=gold)
        (score,) = score_rows(rewards, resolved.weights, [row])
        assert score.total is not None
        return score.total

    return total


RIGHT, WRONG = r"\boxed{5}", r"\boxed{4}"
COSINE: dict[str, Any] = {"reward_funcs": ["cosine"], "cosine_max_len": 100}


def _rises(name: str, text: str, tokens: int, low: float, high: float, told: Told) -> None:
    """The reward of such a completion rises from `low` to `high` with its option, the others stay."""
    found = [told(text, tokens, **COSINE, **{name: value}) for value in (low, high)]
    assert found[0] < found[1]
    other = WRONG if text == RIGHT else RIGHT
    assert len({told(other, tokens, **COSINE, **{name: value}) for value in (low, high)}) == 1


def cosine_min_len_value_wrong(told: Told) -> None:
    _rises("cosine_min_len_value_wrong", WRONG, 1, -0.9, -0.6, told)


def cosine_max_len_value_wrong(told: Told) -> None:
    _rises("cosine_max_len_value_wrong", WRONG, 99, -0.4, -0.1, told)


def cosine_min_len_value_correct(told: Told) -> None:
    _rises("cosine_min_len_value_correct", RIGHT, 1, 0.8, 1.2, told)


def cosine_max_len_value_correct(told: Told) -> None:
    _rises("cosine_max_len_value_correct", RIGHT, 99, 0.2, 0.6, told)


def cosine_max_len(told: Told) -> None:
    # Of the same length a right answer is shorter, and worth more, where the longest is longer.
    near, far = (told(RIGHT, 90, **{**COSINE, "cosine_max_len": longest}) for longest in (100, 1000))
    assert near < far


def repetition_n_grams(told: Told) -> None:
    pairs, threes = (told("a b a b", reward_funcs=["repetition"], repetition_n_grams=n) for n in (2, 3))
    assert pairs < threes == 0.0


def repetition_max_penalty(told: Told) -> None:
    light, heavy = (
        told("a a a a a a", reward_funcs=["repetition"], repetition_max_penalty=p) for p in (-0.5, -1.0)
    )
    assert heavy == 2 * light < 0.0


OVERLONG: dict[str, Any] = {"reward_funcs": ["soft_overlong"], "soft_cache_length": 20}


def soft_max_length(told: Told) -> None:
    found = [told("a", 90, **OVERLONG, soft_max_length=longest) for longest in (95, 100, 120)]
    assert found[0] < found[1] < found[2] == 0.0


def soft_cache_length(told: Told) -> None:
    found = [told("a", 85, **{**OVERLONG, "soft_cache_length": n}, soft_max_length=100) for n in (40, 20, 10)]
    assert found[0] < found[1] < found[2] == 0.0


def gold_lists(told: Told) -> None:
    for name in ("accuracy", "reasoning_accuracy", "accuracy_reward"):
        one, both = (
            [told(f"</think>{text}", gold=["5", "7"], reward_funcs=[name], gold_lists=lists)
             for lists in (None, "any", "all")]
            for text in (r"\boxed{7}", r"\boxed{7, 5}")
        )  # fmt: skip
        assert (one, both) == ([1.0, 1.0, 0.0], [0.0, 0.0, 1.0])


def reward_funcs(told: Told) -> None:
    assert told(RIGHT, reward_funcs=["accuracy"]) == 1.0
    assert told(RIGHT, reward_funcs=["accuracy", "repetition"]) == 1.0
    assert told(RIGHT + " a a a a", reward_funcs=["accuracy", "repetition"]) < 1.0


def reward_weights(told: Told) -> None:
    both = {"reward_funcs": ["accuracy", "repetition"]}
    text = f"{RIGHT} a a a a a a a a"
    plain, right, repeated = (told(text, **both, reward_weights=w) for w in ([1, 1], [2, 1], [1, 2]))
    assert repeated < plain < right == pytest.approx(plain + 1.0)


DIRECTIONS: dict[str, Callable[[Told], None]] = {
    function.__name__: function
    for function in (
        *(cosine_min_len_value_wrong, cosine_max_len_value_wrong, cosine_min_len_value_correct),
        *(cosine_max_len_value_correct, cosine_max_len, repetition_n_grams, repetition_max_penalty),
        *(soft_max_length, soft_cache_length, gold_lists, reward_funcs, reward_weights),
    )
}

_JUDGE, _ASKED = "unit/rewards/test_judge.py", "test_each_completion_gets_its_own_answer_in_order"
_TASKS, _RATES = "journeys/test_tasks.py", "test_rows_are_left_out_and_ordered"
ELSEWHERE: dict[str, tuple[str, str]] = {
    "reward_model": ("journeys/test_reward_models.py", "test_what_a_model_pays_for_is_learnt"),
    "reward_model_revision": (
        "unit/checks/test_reward_models.py",
        "test_each_model_of_a_hub_has_its_revision",
    ),
    "external_plugins": ("journeys/test_rewards.py", "test_plugins_and_functions_unchanged"),
    "reward_timeout_s": ("journeys/test_rewards.py", "test_a_call_that_does_not_end"),
    "reward_workers": ("unit/rewards/test_directions.py", "test_reward_workers"),
    "reward_trial": ("journeys/test_judge.py", "test_without_the_trial_nobody_is_asked_before_the_run"),
    "max_bad_gold": ("unit/checks/test_rewards.py", "test_golds_around_the_share_that_is_allowed"),
    "unsafe_exec": ("unit/checks/test_code.py", "test_says_and_mends"),
    "completion_form": ("unit/rewards/test_callee.py", "test_the_form_of_prompts_and_completions"),
    "step_separator": (
        "unit/rewards/test_steps.py",
        "test_a_function_gets_the_steps_and_gives_a_number_for_each",
    ),
    "judge_base_url": (_JUDGE, _ASKED),
    "judge_model": (_JUDGE, _ASKED),
    "judge_prompt": (_JUDGE, _ASKED),
    "judge_regex": (_JUDGE, "test_the_pattern_says_which_number_is_the_reward"),
    "judge_concurrency": (_JUDGE, "test_no_more_questions_wait_than_the_option_says"),
    "judge_retries": (
        _JUDGE,
        "test_after_the_retries_a_row_is_invalid_with_its_words_and_the_others_are_not",
    ),
    "judge_timeout_s": (_JUDGE, "test_a_late_answer_is_none"),
    "task_rewards": (_TASKS, "test_two_tasks_and_a_resume"),
    # What chooses and orders rows by what they were rewarded with.
    "task_column": (_TASKS, "test_two_tasks_and_a_resume"),
    "pass_rates": (_TASKS, _RATES),
    "pass_rate_column": (_TASKS, "test_a_column_of_pass_rates"),
    "min_pass_rate": (_TASKS, _RATES),
    "max_pass_rate": (_TASKS, _RATES),
    "curriculum": (_TASKS, _RATES),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_direction(name: str, told: Told) -> None:
    DIRECTIONS[name](told)


OWN = """
import time

def f(completions):
    time.sleep(0.2)
    return [1.0] * len(completions)
"""


def test_reward_workers(scored: Callable[..., Scored], tmp_path: Path) -> None:
    """As many processes share the rows of a function."""
    (tmp_path / "own.py").write_text(OWN)
    for number in (1, 2):
        wanted = config(reward_funcs=[f"{tmp_path / 'own.py'}:f"], reward_workers=number)
        _, rewards = with_rewards(Facts(), wanted, None, {}, offline=True)
        assert rewards is not None
        with rewards:
            rewards.score([scored("a", number=n) for n in range(4)], TrainerState())
            assert len(rewards.pids) == number


def test_no_option_is_left_out() -> None:
    tests = Path(__file__).parents[2]
    for name, (file, test) in ELSEWHERE.items():
        text = (tests / file).read_text(encoding="utf-8")
        assert f"def {test}(" in text and name in text, (name, file, test)
    chosen = {name for name in ELSEWHERE if group_of(name) == "data"}
    assert {*DIRECTIONS, *ELSEWHERE} - chosen == {name for name in OPTIONS if group_of(name) == "reward"}
