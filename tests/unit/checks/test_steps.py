"""Rewards of steps beside what needs one advantage per completion, and a separator that cuts nothing."""

from __future__ import annotations

from typing import get_args

import pytest

from covey.algorithm.advantages import Estimator, ScaleRewards
from covey.algorithm.losses import LossType
from covey.algorithm.ratios import Level
from covey.checks.judge import checks
from covey.config import from_dict
from covey.plan.step_refusals import step_refusals
from covey.types import Severity
from support.checks import BASE, facts

TWO = {"reward_funcs": ["prm.py:prm", "format"]}
REFUSED = {
    "advantage_estimator rloo": {"advantage_estimator": "rloo"},
    "advantage_estimator plus": {"advantage_estimator": "reinforce_plus_plus"},
    "scale_rewards": {**TWO, "scale_rewards": "gdpo"},
    "loss_type real": {"loss_type": "real"},
    "loss_type vespo": {"loss_type": "vespo"},
    "loss_type fipo": {"loss_type": "fipo"},
    "importance_sampling_level": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "kl_in_reward": {"kl_in_reward": True, "beta": 0.1},
    "kl_in_reward later": {"kl_in_reward": True, "beta_end": 0.1},
}
FINE = {
    **{
        f"loss_type {n}": {"loss_type": n}
        for n in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
    },
    "level": {"importance_sampling_level": "sequence_token"},
    "scales": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "kl in the loss": {"beta": 0.1},
    "kl in the reward without a weight": {"kl_in_reward": True},
    "masks": {"top_entropy_quantile": 0.2, "off_policy_sequence_mask_delta": 0.5},
}


def found(options, given):
    return [p for p in checks(from_dict({**BASE, **options}).config, given) if p.code == "E353"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_one_advantage_per_completion_is_refused(name):
    given = facts(rewards={"process": ("prm.py:prm",)})
    (one,) = found(REFUSED[name], given)
    assert one.option == name.split()[0] and one.severity is Severity.ERROR
    assert one.seen.startswith(f"prm.py:prm returns one number per step, but {one.option} is ")
    (fix,) = one.fixes
    assert found({**REFUSED[name], **fix.edits}, given) == []
    # Without such a reward it is nobody's affair.
    assert found(REFUSED[name], facts()) == []


@pytest.mark.parametrize("name", FINE)
def test_what_goes_token_by_token_is_fine(name):
    assert step_refusals(from_dict({**BASE, **FINE[name]}).config) == ()


def test_every_loss_and_level_is_decided():
    """A new one is put into one of the two lists here."""
    said = [options for table in (REFUSED, FINE) for options in table.values()]
    assert {o["loss_type"] for o in said if "loss_type" in o} == {*get_args(LossType)}
    levels = {o.get("importance_sampling_level", "token") for o in said}
    scales = {o.get("scale_rewards", "group") for o in said}
    estimators = {o.get("advantage_estimator", "grpo") for o in said}
    assert levels == {*get_args(Level)}
    assert scales == {*get_args(ScaleRewards)}
    assert estimators == {*get_args(Estimator)}


def test_a_separator_that_nothing_cuts_at_is_said():
    options = {**BASE, "step_separator": "\n"}

    def said(reads):
        resolved = from_dict(options)
        given = facts(rewards={"reads_steps": reads})
        problems = checks(resolved.config, given, resolved.typed_names)
        return [p.code for p in problems if p.option == "step_separator"]

    assert said(False) == ["W108"]
    assert said(True) == said(None) == []
    options["step_separator"] = "\n\n"
    assert said(False) == []
