"""What changes over a run: schedules by hand, the adaptive entropy bonus, what reaches loss and credit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from covey.batching.needs import needs
from covey.config import from_dict
from covey.training.loss import may_be_silent
from covey.training.objective import EntropyBonus, Objective, OptionSchedule, objective_of
from support.checks import BASE
from support.options import algorithm

# -- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0]),
        # (1 - cos(pi x)) / 2 is 0, (2 - sqrt 2) / 4, 1/2, (2 + sqrt 2) / 4 and 1.
        ("cosine", [1.0, 1 - (2 - math.sqrt(2)) / 4, 0.5, 1 - (2 + math.sqrt(2)) / 4, 0.0]),
    ],
)
def test_courses_by_hand(kind: Any, expected: list[float]) -> None:
    schedule = OptionSchedule(start=1.0, end=0.0, kind=kind)
    assert [schedule.at(step, 5) for step in range(5)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_ends_are_exact_and_the_way_is_one_way(kind: Any) -> None:
    for start, end in ((0.2, 0.7), (0.7, 0.2)):
        values = [OptionSchedule(start=start, end=end, kind=kind).at(step, 40) for step in range(40)]
        assert (values[0], values[-1]) == (start, pytest.approx(end, abs=1e-12))
        assert sorted(values, reverse=end < start) == values
        assert len(set(values)) == 40


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_beyond_the_end_it_stays_and_a_run_of_one_step_begins_at_the_start(kind: Any) -> None:
    schedule = OptionSchedule(start=2.0, end=1.0, kind=kind)
    assert schedule.at(9, 5) == schedule.at(4, 5) == pytest.approx(1.0, abs=1e-12)
    assert schedule.at(0, 1) == schedule.at(0, 0) == 2.0


# -- the adaptive bonus ------------------------------------------------------------------------------------


def bonus() -> EntropyBonus:
    bounds = {"entropy_coef_min": 0.05, "entropy_coef_max": 0.2}
    return EntropyBonus(algorithm(entropy_coef=0.1, entropy_target=1.0, entropy_coef_delta=0.04, **bounds))


def test_up_at_the_target_and_below_and_down_above_it() -> None:
    found = bonus()
    for entropy, coef in ((0.5, 0.14), (1.0, 0.18), (1.01, 0.14), (3.0, 0.1), (3.0, 0.06)):
        found.observe(entropy)
        assert found.coef == pytest.approx(coef, rel=1e-12)


def test_it_stays_within_its_bounds() -> None:
    found = bonus()
    for entropy, bound in ((0.0, 0.2), (9.0, 0.05)):
        for _ in range(9):
            found.observe(entropy)
        assert found.coef == bound


def test_it_is_given_only_where_the_last_entropy_was_at_most_the_target() -> None:
    found = bonus()
    assert found.weight == 0.1
    found.observe(1.5)
    assert (found.weight, found.coef) == (0.0, pytest.approx(0.06))
    found.observe(1.0)
    assert found.weight == found.coef == pytest.approx(0.1)


def test_a_step_without_tokens_changes_nothing() -> None:
    found = bonus()
    found.observe(1.5)
    before = found.state().json
    found.observe(None)
    assert found.state().json == before


def test_its_state_goes_on_where_it_was() -> None:
    one, other = bonus(), bonus()
    for entropy in (0.5, 2.0):
        one.observe(entropy)
    other.load_state(one.state())
    for entropy in (0.9, 0.9, 4.0):
        one.observe(entropy)
        other.observe(entropy)
        assert (other.coef, other.weight) == (one.coef, one.weight)


# -- what reaches the learner ------------------------------------------------------------------------------


def of(total_steps: int = 3, **options: Any) -> Objective:
    resolved = from_dict({**BASE, **options})
    assert resolved.problems == ()
    return objective_of(resolved.config, needs(resolved.config, 1), total_steps)


def test_without_courses_the_loss_is_the_same_object() -> None:
    found = of(epsilon=0.3)
    assert found.loss_at(0) is found.loss_at(2) is found.loss
    assert found.credit_at(2) is found.credit
    assert found.temperature_at(1) is None
    assert found.values_at(1) == {}


def test_epsilon_takes_its_upper_distance_along() -> None:
    found = of(epsilon=0.2, epsilon_high=0.28, epsilon_end=0.1)
    values = [(found.loss_at(step).epsilon, found.loss_at(step).epsilon_high) for step in range(3)]
    assert values == [pytest.approx(pair) for pair in ((0.2, 0.28), (0.15, 0.21), (0.1, 0.14))]


def test_the_cap_of_cispo_does_not_follow_epsilon() -> None:
    found = of(loss_type="cispo", epsilon_end=0.1)
    assert [found.loss_at(step).epsilon_high for step in range(3)] == [5.0] * 3


def test_beta_and_the_bonus_on_their_courses() -> None:
    found = of(
        beta=0.1, beta_end=0.0, entropy_coef=0.0, entropy_coef_end=0.02, entropy_coef_schedule="cosine"
    )
    assert [found.loss_at(step).beta for step in range(3)] == pytest.approx([0.1, 0.05, 0.0])
    assert [found.loss_at(step).entropy_coef for step in range(3)] == pytest.approx([0.0, 0.01, 0.02])
    assert found.values_at(1) == {"beta": pytest.approx(0.05), "entropy_coef": pytest.approx(0.01)}
    assert found.credit_at(2) is found.credit


@pytest.mark.parametrize(("start", "end"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.3)])
def test_a_divergence_in_the_reward_never_enters_the_loss(start: float, end: float) -> None:
    found = of(kl_in_reward=True, beta=start, beta_end=end)
    assert [found.loss_at(step).beta for step in range(3)] == [0.0] * 3
    expected = [start, (start + end) / 2, end]
    assert all(found.credit_at(step).kl_in_reward for step in range(3))
    assert [found.credit_at(step).beta for step in range(3)] == pytest.approx(expected)


def test_a_divergence_in_the_loss_never_enters_the_reward() -> None:
    found = of(beta=0.0, beta_end=0.2)
    assert all(found.credit_at(step) is found.credit for step in range(3))
    assert not (found.credit.kl_in_reward or found.needs.kl_in_reward)
    assert [found.loss_at(step).beta for step in range(3)] == pytest.approx([0.0, 0.1, 0.2])


def test_temperature_on_its_course() -> None:
    found = of(temperature=1.0, temperature_end=0.6)
    assert [found.temperature_at(step) for step in range(3)] == pytest.approx([1.0, 0.8, 0.6])
    assert found.loss_at(2) is found.loss


def test_the_adaptive_weight_is_the_losss() -> None:
    found = of(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=1.0, entropy_coef_delta=0.05)
    assert found.bonus is not None
    assert found.loss_at(0).entropy_coef == 0.1
    found.bonus.observe(0.5)
    assert found.loss_at(1).entropy_coef == pytest.approx(0.15)
    found.bonus.observe(2.0)
    assert found.loss_at(2).entropy_coef == 0.0
    assert found.values_at(2) == {"entropy_coef": pytest.approx(0.1)}


# -- from the options --------------------------------------------------------------------------------------


def test_the_options_reach_the_loss() -> None:
    options = {
        "loss_type": "vespo",
        "importance_sampling_level": "sequence_token",
        "epsilon": 0.11,
        "epsilon_high": 0.12,
        "delta": 7.0,
        "beta": 0.13,
        "kl_estimator": "k2",
        "use_bias_correction_kl": False,
        "entropy_coef": 0.14,
        "tau_pos": 1.5,
        "tau_neg": 1.6,
        "vespo_k_pos": 1.7,
        "vespo_k_neg": 1.8,
        "vespo_lambda_pos": 1.9,
        "vespo_lambda_neg": 2.1,
        "fipo_decay_rate": 16.0,
        "fipo_clip_range": 0.15,
        "fipo_clip_high_only": False,
        "fipo_safety_threshold": 3.0,
        "real_tau": 0.6,
        "off_policy_sequence_mask_delta": 0.17,
        "rollout_importance_sampling_mode": "sequence_mask",
        "rollout_importance_sampling_threshold": 1.4,
    }
    found = of(**options).loss
    assert found.correction is not None
    assert (found.correction.mode, found.correction.threshold) == ("sequence_mask", 1.4)
    assert (found.correction.is_product, found.correction.floor) == (False, 0.0)
    pairs = {
        "tau": (1.5, 1.6),
        "vespo_k": (1.7, 1.8),
        "vespo_lambda": (1.9, 2.1),
        "off_policy_delta": 0.17,
    }
    same = {name: value for name, value in options.items() if hasattr(found, name)}
    assert len(same) == 14
    assert {name: getattr(found, name) for name in {**same, **pairs}} == {**same, **pairs}


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({}, (0.0, 3.0)),
        ({"vllm_importance_sampling_clip_max": None}, (0.0, math.inf)),
        ({"vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": 0.5}, (0.5, 2.0)),
    ],
    ids=str,
)
def test_trls_correction_is_the_product(options: dict[str, Any], bounds: tuple[float, float]) -> None:
    found = of(vllm_importance_sampling_mode="sequence_truncate", **options).loss.correction
    assert found is not None
    assert found.is_product
    assert (found.floor, found.threshold) == bounds


def test_the_options_reach_the_credit_and_the_needs() -> None:
    found = of(
        reward_funcs=["accuracy", "format"],
        reward_weights=[2.0, 0.5],
        scale_rewards="gdpo",
        mask_truncated_completions=True,
    ).credit
    assert found.mask_truncated_completions and found.weights == [2.0, 0.5]
    assert of(advantage_estimator="rloo").credit.scale_rewards == "none"
    assert of(advantage_estimator="reinforce_plus_plus").credit.scale_rewards == "batch"
    for options in ({"entropy_coef": 0.1}, {"entropy_coef_end": 0.1}, {"use_adaptive_entropy": True}):
        assert not needs(from_dict({**BASE, **options}).config, 1).may_skip_rows
    assert needs(from_dict({**BASE, "beta_end": 0.1}).config, 1).reference


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"loss_type": "real"}, True),
        ({"off_policy_sequence_mask_delta": 0.1}, True),
        ({"rollout_importance_sampling_mode": "token_truncate"}, True),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, True),
        ({"top_entropy_quantile": 0.2}, False),
    ],
    ids=str,
)
def test_what_may_leave_no_gradient(options: dict[str, Any], expected: bool) -> None:
    assert may_be_silent(from_dict({**BASE, **options}).config) is expected
