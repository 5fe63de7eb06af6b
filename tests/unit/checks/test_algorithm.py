"""Losses, advantages, masks and corrections taken together: what makes no sense, and the ways out."""

from __future__ import annotations

from typing import Any

import pytest

from covey.checks.judge import checks
from covey.config import from_dict
from covey.types import Problem, Severity
from support.checks import BASE, Case, assert_fixes_mend, assert_says, facts, found

TWO = {"reward_funcs": ["accuracy", "format"]}
PLUS = "reinforce_plus_plus"
COPIES = {"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 1.0, "max_steps": 600}
MASK = {"rollout_importance_sampling_mode": "token_mask"}


def pointless(option: str, words: str, options: dict[str, Any]) -> Case:
    return Case(code="E331", option=option, words=words, options=options)


def unusual(option: str, words: str, options: dict[str, Any]) -> Case:
    return Case(code="W122", option=option, words=words, options=options)


def silent(words: str, options: dict[str, Any]) -> Case:
    option = "dynamic_sample" if "dynamic_sample" in options else "replay_buffer_size"
    return Case(code="E333", option=option, words=words, options=options)


CASES = [
    Case(code="E332", option="epsilon_high", words="epsilon_high is 0.28, but with loss_type cispo",
         options={"loss_type": "cispo", "epsilon_high": 0.28}),
    Case(code="E332", option="epsilon_high", words="epsilon_high is 1, but with loss_type cispo",
         options={"loss_type": "cispo", "epsilon_high": 1.0}),
    *(pointless("delta", f"delta is 7, but loss_type {loss}", {"loss_type": loss, "delta": 7.0})
      for loss in ("cispo", "sapo", "vespo", "real")),
    pointless("loss_type", "step of 12 completions splits the groups of 8",
              {"loss_type": "real", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3,
               "steps_per_generation": 6}),
    pointless("scale_rewards", "there is only one reward", {"scale_rewards": "gdpo"}),
    *(pointless("scale_rewards", f"but advantage_estimator is {name}.",
                {**TWO, "scale_rewards": "gdpo", "advantage_estimator": name}) for name in ("rloo", PLUS)),
    pointless("scale_rewards", "scale_rewards is group",
              {"advantage_estimator": PLUS, "scale_rewards": "group"}),
    pointless("advantage_estimator", "classifies the completions within a group",
              {"loss_type": "real", "advantage_estimator": PLUS}),
    pointless("kl_in_reward", "no single reward to subtract the KL from",
              {**TWO, "scale_rewards": "gdpo", "kl_in_reward": True, "beta": 0.1}),
    pointless("kl_in_reward", "no single reward to subtract the KL from",
              {**TWO, "scale_rewards": "gdpo", "kl_in_reward": True, "beta_end": 0.1}),
    pointless("sync_ref_model", "no reference model to update", {"sync_ref_model": True, "max_steps": 600}),
    *(pointless("ref_model_sync_steps", f"ref_model_sync_steps is {every}",
                {**COPIES, "ref_model_sync_steps": every, **more}) for every, more in (
          (1, {}), (1, {"num_iterations": 4, "kl_in_reward": True}),
          (2, {"num_iterations": 4, "kl_in_reward": True}))),
    pointless("entropy_coef_min", "is 2, above entropy_coef_max",
              {"use_adaptive_entropy": True, "entropy_coef_min": 2.0}),
    pointless("entropy_coef_end", "only one of them can change entropy_coef",
              {"use_adaptive_entropy": True, "entropy_coef_end": 0.1}),
    pointless("vllm_importance_sampling_mode", "only one correction can apply",
              {**MASK, "vllm_importance_sampling_mode": "sequence_mask"}),
    unusual("kl_estimator", "kl_estimator is k1 in the loss", {"kl_estimator": "k1", "beta": 0.1}),
    unusual("kl_estimator", "kl_estimator is k1 in the loss", {"kl_estimator": "k1", "beta_end": 0.1}),
    *(silent("scale_rewards is none", {"dynamic_sample": True, **options})
      for options in ({"scale_rewards": "none"}, {"advantage_estimator": "rloo"})),
    *(silent("compares over the whole rollout", {**options, "advantage_estimator": PLUS, **more})
      for options in ({"dynamic_sample": True}, {"replay_buffer_size": 4})
      for more in ({}, {"num_generations": 1})),
    *(silent("rollouts are replayed", {**options, "replay_rollouts": "runs/b/rollouts"})
      for options in ({"dynamic_sample": True}, {"replay_buffer_size": 4})),
    *(unusual("loss_type", f"loss_type {loss} averages over tokens",
              {"loss_type": loss, "importance_sampling_level": "sequence"})
      for loss in ("bnpo", "dr_grpo", "dapo", "cispo", "fipo")),
    *(unusual("importance_sampling_level", f"but importance_sampling_level is {level}.",
              {"loss_type": "luspo", "importance_sampling_level": level})
      for level in ("token", "sequence_token")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "cispo"},  # the cap is 5 by default
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"loss_type": "dapo", "delta": 7.0},
        {"loss_type": "real"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence_token"},
        {**TWO, "scale_rewards": "gdpo"},
        {"advantage_estimator": "rloo"},
        {"advantage_estimator": "rloo", "scale_rewards": "group"},
        {"advantage_estimator": PLUS},
        {"advantage_estimator": PLUS, "scale_rewards": "none"},
        {"kl_in_reward": True, "beta": 0.1, "kl_estimator": "k1"},
        {"kl_in_reward": True, "beta_end": 0.1},
        {**COPIES, "ref_model_sync_steps": 2},
        {**COPIES, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.9},
        {**COPIES, "ref_model_sync_steps": 2, "num_iterations": 4},
        {**COPIES, "ref_model_sync_steps": 3, "num_iterations": 4, "kl_in_reward": True},
        {**COPIES, "beta": 0.0, "beta_end": 0.1},
        {"kl_estimator": "k1"},
        {"use_adaptive_entropy": True},
        {"entropy_coef": 0.01, "entropy_coef_end": 0.0},
        MASK,
        {"vllm_importance_sampling_mode": "sequence_mask"},
        {"top_entropy_quantile": 0.2, "off_policy_sequence_mask_delta": 0.5},
        {"dynamic_sample": True, "replay_buffer_size": 64},
        {"dynamic_sample": True, "max_resample_times": 1, "scale_rewards": "batch"},
        {"dynamic_sample": True, "advantage_estimator": "rloo", "scale_rewards": "group"},
        {**TWO, "dynamic_sample": True, "scale_rewards": "gdpo"},
        {"replay_buffer_size": 1, "scale_rewards": "none"},
    ],
    ids=str,
)
def test_nothing_is_said_of_what_makes_sense(options: dict[str, Any]) -> None:
    assert found(**options) == []


# -- a group of one ----------------------------------------------------------------------------------------


def test_one_completion_a_prompt_is_enough_over_the_rollout() -> None:
    assert found(num_generations=1, advantage_estimator=PLUS) == []
    for estimator in ("grpo", "rloo"):
        assert [p.code for p in found(num_generations=1, advantage_estimator=estimator)] == ["E201"]


def estimators_offered(problem: Problem) -> list[dict[str, Any]]:
    return [dict(fix.edits) for fix in problem.fixes if "advantage_estimator" in fix.edits]


@pytest.mark.parametrize(
    "options",
    [{}, {"advantage_estimator": "rloo", "scale_rewards": "group"}, {**TWO, "scale_rewards": "gdpo"}],
)
def test_a_group_of_one_is_offered_the_estimator_that_takes_it(options: dict[str, Any]) -> None:
    (problem,) = found(num_generations=1, **options)
    (edits,) = estimators_offered(problem)
    assert edits["advantage_estimator"] == PLUS
    assert found(**{"num_generations": 1, **options, **edits}) == []


def test_it_is_not_offered_where_it_would_not_do() -> None:
    """Real compares within groups; a batch that is wrong otherwise stays wrong; so do too few prompts."""
    real = [p for p in found(num_generations=1, loss_type="real") if p.code == "E201"]
    assert estimators_offered(real[0]) == []
    uneven = found(num_generations=1, generation_batch_size=60)
    assert [estimators_offered(p) for p in uneven if p.code == "E201"] == [[]]
    few = found(facts(prompts={"num_used": 30}), num_generations=1)
    assert [estimators_offered(p) for p in few if p.code == "E201"] == [[]]


# -- options without effect --------------------------------------------------------------------------------


def said(options: dict[str, Any]) -> list[Problem]:
    resolved = from_dict({**BASE, **options})
    assert resolved.problems == ()
    return checks(resolved.config, facts(), resolved.typed_names)


WITHOUT_EFFECT = [
    ({"tau_pos": 2.0, "loss_type": "grpo"}, "tau_pos", "loss_type grpo does not use it"),
    *(({"importance_sampling_level": "sequence", "loss_type": loss}, "importance_sampling_level",
       f"loss_type {loss} does not use it") for loss in ("vespo", "real")),
    *(({**options, "loss_type": "real"}, name, "loss_type real does not use it")
      for name, options in (
          ("top_entropy_quantile", {"top_entropy_quantile": 0.2}),
          ("off_policy_sequence_mask_delta", {"off_policy_sequence_mask_delta": 0.5}),
          ("rollout_importance_sampling_mode", MASK),
          ("vllm_importance_sampling_mode", {"vllm_importance_sampling_mode": "token_mask"}),
      )),
    ({"entropy_target": 0.5}, "entropy_target", "use_adaptive_entropy is off"),
    ({"beta_schedule": "cosine"}, "beta_schedule", "beta_end is not set"),
    ({"kl_in_reward": True}, "kl_in_reward", "beta is 0"),
    # A condition on an option that is read under a condition itself.
    ({"use_vllm": False, "vllm_max_num_seqs": 8}, "vllm_max_num_seqs", "use_vllm is off"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "name", "words"), WITHOUT_EFFECT, ids=str)
def test_what_has_no_effect_is_said(options: dict[str, Any], name: str, words: str) -> None:
    (problem,) = said(options)
    assert (problem.code, problem.option, problem.severity) == ("W108", name, Severity.WARNING)
    assert words in problem.seen
    assert [fix.text for fix in problem.fixes] == [f"leave out --{name}"]
    assert said({k: v for k, v in options.items() if k != name}) == []


@pytest.mark.parametrize("estimator", ["rloo", PLUS])
def test_a_default_of_ms_swift_is_nothing_that_was_set(estimator: str) -> None:
    resolved = from_dict({**BASE, "rlhf_type": "grpo", "advantage_estimator": estimator, "beta": 0.0})
    assert resolved.config.kl_in_reward
    assert checks(resolved.config, facts(), resolved.typed_names) == []


@pytest.mark.parametrize("loss", ["dapo", "cispo", "sapo", "luspo", "vespo", "real", "fipo"])
def test_a_whole_file_of_values_says_what_the_command_said(loss: str) -> None:
    options = {"loss_type": loss}
    if loss == "luspo":
        options["importance_sampling_level"] = "sequence"
    resolved = from_dict({**BASE, **options})
    assert said(resolved.config.model_dump()) == []
