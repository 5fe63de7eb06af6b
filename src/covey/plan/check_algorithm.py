"""Parts of an algorithm that make each other pointless, and values that undo one."""

from __future__ import annotations

from collections.abc import Collection

from covey.options.algorithm import CLIPPED
from covey.options.schema import Config, default_of
from covey.plan.check_effect import unread
from covey.plan.problem import problem, warning
from covey.plan.server_line import OF_BOTH, start_line
from covey.texts import tr
from covey.types import Fix, Problem

_TOKEN_MEANS = ("bnpo", "dr_grpo", "dapo", "cispo", "fipo")


def algorithm_problems(config: Config, num_processes: int, typed: Collection[str]) -> list[Problem]:
    """Return what is wrong with a loss, its advantages and its masks taken together."""
    return [
        *_losses(config, num_processes),
        *_advantages(config),
        *_divergence(config),
        *_entropy(config),
        *_corrections(config),
        *_selection(config),
        *_levels(config),
        *_without_effect(config, typed),
    ]


def _losses(config: Config, num_processes: int) -> list[Problem]:
    problems = []
    if config.loss_type == "cispo" and config.epsilon_high <= 1.0:
        problems.append(
            problem(
                "E332",
                "epsilon_high",
                tr(
                    "epsilon_high is {epsilon_high:g} with loss_type cispo, where it caps the ratio.",
                    epsilon_high=config.epsilon_high,
                ),
                tr("The epsilon of a clipped loss, which is a distance from 1."),
                Fix(text=tr("the cap of ScaleRL, the default here"), edits={"epsilon_high": 5.0}),
            )
        )
    if config.delta is not None and config.loss_type not in CLIPPED:
        problems.append(
            _pointless(
                "delta",
                tr(
                    "delta is {delta:g} and loss_type is {loss_type}, which clips nothing.",
                    delta=config.delta,
                    loss_type=config.loss_type,
                ),
                Fix(text=tr("leave out --delta"), edits={"delta": None}),
                Fix(text=tr("a loss that clips"), edits={"loss_type": "dapo"}),
            )
        )
    per_step = num_processes * config.per_device_train_batch_size * config.gradient_accumulation_steps
    if config.loss_type == "real" and per_step % max(1, config.num_generations):
        problems.append(
            _pointless(
                "loss_type",
                tr(
                    "loss_type is real, and an optimizer step of {per_step} completions cuts groups "
                    "of {num_generations}, which real has to see whole.",
                    per_step=per_step,
                    num_generations=config.num_generations,
                ),
                Fix(text=tr("another loss"), edits={"loss_type": "dapo"}),
            )
        )
    return problems


def _advantages(config: Config) -> list[Problem]:
    problems = []
    is_over_batch = config.advantage_estimator == "reinforce_plus_plus"
    if config.scale_rewards == "gdpo" and len(config.rewards) == 1:
        problems.append(
            _pointless(
                "scale_rewards",
                tr("scale_rewards is gdpo and there is one reward: with nothing to keep apart it is group."),
                Fix(text=tr("the spread of the group"), edits={"scale_rewards": "group"}),
            )
        )
    elif config.scale_rewards == "gdpo" and config.advantage_estimator != "grpo":
        problems.append(
            _pointless(
                "scale_rewards",
                tr(
                    "scale_rewards is gdpo and advantage_estimator is {advantage_estimator}: gdpo "
                    "compares each reward with its group's mean.",
                    advantage_estimator=config.advantage_estimator,
                ),
                Fix(text=tr("the estimator that gdpo has"), edits={"advantage_estimator": "grpo"}),
            )
        )
    if is_over_batch and config.scale_rewards == "group":
        problems.append(
            _pointless(
                "scale_rewards",
                tr(
                    "scale_rewards is group and advantage_estimator is reinforce_plus_plus, whose "
                    "baseline is the mean of the whole rollout."
                ),
                Fix(text=tr("the spread of the rollout"), edits={"scale_rewards": "batch"}),
                Fix(text=tr("no division"), edits={"scale_rewards": "none"}),
            )
        )
    if config.loss_type == "real" and is_over_batch:
        problems.append(
            _pointless(
                "advantage_estimator",
                tr(
                    "loss_type is real, which tells the completions of a group apart, and "
                    "advantage_estimator is reinforce_plus_plus, which compares over groups."
                ),
                Fix(text=tr("compare within groups"), edits={"advantage_estimator": "grpo"}),
            )
        )
    return problems


def _divergence(config: Config) -> list[Problem]:
    problems = []
    has_kl = bool(config.beta or config.beta_end)
    if config.kl_in_reward and has_kl and config.scale_rewards == "gdpo":
        problems.append(
            _pointless(
                "kl_in_reward",
                tr(
                    "kl_in_reward is on and scale_rewards is gdpo, which adds no total to take a "
                    "divergence off."
                ),
                Fix(text=tr("the divergence in the loss"), edits={"kl_in_reward": False}),
                Fix(text=tr("one spread for all rewards"), edits={"scale_rewards": "group"}),
            )
        )
    if config.sync_ref_model:
        problems += _moving_reference(config, has_kl=has_kl)
    if has_kl and not config.kl_in_reward and config.kl_estimator == "k1":
        problems.append(
            warning(
                "W122",
                "kl_estimator",
                tr(
                    "kl_estimator is k1 in the loss: its gradient is 0 on average, whatever the "
                    "divergence is."
                ),
                tr("k1 is the estimate of choice in the reward, where it is not differentiated."),
                Fix(text=tr("the default"), edits={"kl_estimator": "k3"}),
                Fix(text=tr("take it off the reward"), edits={"kl_in_reward": True}),
            )
        )
    return problems


def _moving_reference(config: Config, *, has_kl: bool) -> list[Problem]:
    still = Fix(text=tr("leave the reference as it is"), edits={"sync_ref_model": False})
    if not has_kl:
        seen = tr("sync_ref_model is on and beta is 0: there is no reference that could move.")
        return [_pointless("sync_ref_model", seen, Fix(text=tr("a KL term"), edits={"beta": 0.04}), still)]
    steps = config.num_iterations * config.steps_per_generation // max(1, config.gradient_accumulation_steps)
    every = max(1, config.ref_model_sync_steps)
    if config.ref_model_mixup_alpha == 1.0 and steps % every == 0 and (steps == 1 or config.kl_in_reward):
        seen = tr(
            "ref_model_mixup_alpha is 1 and ref_model_sync_steps is {every}: every rollout's KL is 0.",
            every=every,
        )
        rare = Fix(text=tr("move it less often"), edits={"ref_model_sync_steps": max(512, steps + 1)})
        return [_pointless("ref_model_sync_steps", seen, rare, still)]
    return []


def _entropy(config: Config) -> list[Problem]:
    if config.use_adaptive_entropy and config.entropy_coef_min > config.entropy_coef_max:
        seen = tr(
            "entropy_coef_min is {entropy_coef_min:g}, above entropy_coef_max.",
            entropy_coef_min=config.entropy_coef_min,
        )
        fix = Fix(text=tr("the defaults"), edits={"entropy_coef_min": 0.0, "entropy_coef_max": 1.0})
        return [_pointless("entropy_coef_min", seen, fix)]
    if config.use_adaptive_entropy and config.entropy_coef_end is not None:
        seen = tr("use_adaptive_entropy and entropy_coef_end are set: two things move entropy_coef.")
        fix = Fix(text=tr("leave out --entropy_coef_end"), edits={"entropy_coef_end": None})
        return [_pointless("entropy_coef_end", seen, fix)]
    return []


def _corrections(config: Config) -> list[Problem]:
    ours, trl = config.rollout_importance_sampling_mode, config.vllm_importance_sampling_mode
    if ours is not None and trl is not None:
        seen = tr(
            "rollout_importance_sampling_mode and vllm_importance_sampling_mode are set: two corrections."
        )
        return [
            _pointless(
                "vllm_importance_sampling_mode",
                seen,
                Fix(text=tr("ms-swift's alone"), edits={"vllm_importance_sampling_mode": None}),
                Fix(text=tr("TRL's alone"), edits={"rollout_importance_sampling_mode": None}),
            )
        ]
    return []


def _selection(config: Config) -> list[Problem]:
    """Where a group's spread says nothing of what its rows teach, or nothing is sampled."""
    asked = {"dynamic_sample": config.dynamic_sample, "replay_buffer_size": config.replay_buffer_size > 0}
    problems = []
    for name in (n for n, is_on in asked.items() if is_on):
        fixes = [Fix(text=tr("leave out --{name}", name=name), edits={name: default_of(name)})]
        if config.replay_rollouts is not None:
            seen = tr(
                "{name} is set and rollouts are replayed: nothing is sampled that could take a place.",
                name=name,
            )
        elif config.advantage_estimator == "reinforce_plus_plus":
            seen = tr(
                "{name} is set and advantage_estimator is reinforce_plus_plus, which compares "
                "over the whole rollout: a group whose rewards are equal teaches as much as any "
                "other.",
                name=name,
            )
            if config.num_generations > 1:
                edits = {"advantage_estimator": "grpo", "scale_rewards": "group"}
                fixes.append(Fix(text=tr("compare within groups"), edits=edits))
        elif config.num_generations < 2:
            seen = tr("{name} is set and num_generations is 1: a single completion has no spread.", name=name)
        elif name == "dynamic_sample" and config.scale_rewards == "none":
            seen = tr(
                "dynamic_sample is set and scale_rewards is none, with which a group counts by "
                "its spread: the mean over all prompts is the gradient of the reward, and "
                "without the equal groups it is not."
            )
            fixes.append(Fix(text=tr("the spread of the group"), edits={"scale_rewards": "group"}))
        else:
            continue
        cause = tr("Groups are told apart by the spread of their rewards, and here that decides nothing.")
        problems.append(problem("E333", name, seen, cause, *fixes))
    return problems


def _levels(config: Config) -> list[Problem]:
    """Levels of the ratio that a loss is not meant with; the others warn of them too."""
    level, loss = config.importance_sampling_level, config.loss_type
    if level == "sequence" and loss in _TOKEN_MEANS:
        seen = tr(
            "importance_sampling_level is sequence and loss_type is {loss}, which averages over tokens: ",
            loss=loss,
        )
        seen += tr("a long completion weighs more than a short one with the same ratio.")
        return [_unusual("loss_type", seen, Fix(text=tr("the loss of GSPO"), edits={"loss_type": "grpo"}))]
    if loss == "luspo" and level != "sequence":
        seen = tr(
            "loss_type is luspo and importance_sampling_level is {level}: its source has the sequence's.",
            level=level,
        )
        fix = Fix(text=tr("the sequence's ratio"), edits={"importance_sampling_level": "sequence"})
        return [_unusual("importance_sampling_level", seen, fix)]
    return []


def _without_effect(config: Config, typed: Collection[str]) -> list[Problem]:
    names: list[str] = []
    if config.importance_sampling_level != "token" and config.loss_type in ("vespo", "real"):
        names.append("importance_sampling_level")
    if config.loss_type == "real":
        masks = {
            "top_entropy_quantile": config.top_entropy_quantile < 1.0,
            "off_policy_sequence_mask_delta": config.off_policy_sequence_mask_delta is not None,
            "rollout_importance_sampling_mode": config.rollout_importance_sampling_mode is not None,
            "vllm_importance_sampling_mode": config.vllm_importance_sampling_mode is not None,
        }
        names += [n for n, is_set in masks.items() if is_set]
    why = dict.fromkeys(names, tr("loss_type {loss_type} does not read it", loss_type=config.loss_type))
    for name, read_if in unread(config, typed).items():
        why[name] = read_if.why_not(getattr(config, read_if.option))
    if "kl_in_reward" in typed and config.kl_in_reward and not (config.beta or config.beta_end):
        why["kl_in_reward"] = tr("beta is 0")
    return [
        warning(
            "W108",
            name,
            tr("{name} is set, and {reason}.", name=name, reason=reason),
            tr("A command for another loss, or half of a pair of options."),
            *_on_server(config, name),
            Fix(text=tr("leave out --{name}", name=name)),
        )
        for name, reason in sorted(why.items())
    ]


def _on_server(config: Config, name: str) -> list[Fix]:
    """Where an option belongs that a server has, and not the run that uses it."""
    if name not in OF_BOTH or not config.use_vllm or config.vllm_mode != "server":
        return []
    line = start_line(config, next(iter(config.rollout_servers), ""))
    return [Fix(text=tr("it belongs to the server: `{line}`", line=line))]


def _pointless(option: str, seen: str, *fixes: Fix) -> Problem:
    return problem("E331", option, seen, tr("Parts of two recipes in one command."), *fixes)


def _unusual(option: str, seen: str, *fixes: Fix) -> Problem:
    return warning("W122", option, seen, tr("Parts of two recipes in one command."), *fixes)
