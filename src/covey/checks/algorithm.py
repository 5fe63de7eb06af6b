"""Parts of an algorithm that make each other pointless, and values that undo one."""

from __future__ import annotations

from collections.abc import Collection

from covey.algorithm.loss_types.registry import loss_named
from covey.checks.check import Check
from covey.checks.effect import unread
from covey.codes import Code
from covey.options.schema import Config, default_of
from covey.plan.problem import problem, warning
from covey.plan.server_line import OF_BOTH, start_line
from covey.texts import tr
from covey.types import Fix, Problem


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
    loss = loss_named(config.loss_type)
    problems = [
        problem(refusal.code, refusal.option, refusal.seen, refusal.cause, *refusal.fixes)
        for refusal in loss.refuses(config)
    ]
    if config.delta is not None and not loss.is_clipped:
        problems.append(
            _pointless(
                "delta",
                tr(
                    "delta is {delta:g}, but loss_type {loss_type} does not clip.",
                    delta=config.delta,
                    loss_type=config.loss_type,
                ),
                Fix(text=tr("leave out --delta"), edits={"delta": None}),
                Fix(text=tr("use a loss that clips"), edits={"loss_type": "dapo"}),
            )
        )
    per_step = num_processes * config.per_device_train_batch_size * config.gradient_accumulation_steps
    if loss.by_group and per_step % max(1, config.num_generations):
        problems.append(
            _pointless(
                "loss_type",
                tr(
                    "loss_type is {loss_type}, which needs whole groups, but an optimizer step of "
                    "{per_step} completions splits the groups of {num_generations}.",
                    loss_type=config.loss_type,
                    per_step=per_step,
                    num_generations=config.num_generations,
                ),
                Fix(text=tr("use another loss"), edits={"loss_type": "dapo"}),
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
                tr(
                    "scale_rewards is gdpo, but there is only one reward: the result is the same as "
                    "with group."
                ),
                Fix(
                    text=tr("divide by the standard deviation within the group"),
                    edits={"scale_rewards": "group"},
                ),
            )
        )
    elif config.scale_rewards == "gdpo" and config.advantage_estimator != "grpo":
        problems.append(
            _pointless(
                "scale_rewards",
                tr(
                    "scale_rewards is gdpo, which compares each reward with its group's mean, but "
                    "advantage_estimator is {advantage_estimator}.",
                    advantage_estimator=config.advantage_estimator,
                ),
                Fix(
                    text=tr("use the estimator that gdpo is defined for"),
                    edits={"advantage_estimator": "grpo"},
                ),
            )
        )
    if is_over_batch and config.scale_rewards == "group":
        problems.append(
            _pointless(
                "scale_rewards",
                tr(
                    "scale_rewards is group, but the baseline of advantage_estimator "
                    "reinforce_plus_plus is the mean of the whole rollout."
                ),
                Fix(
                    text=tr("divide by the standard deviation over the whole rollout"),
                    edits={"scale_rewards": "batch"},
                ),
                Fix(text=tr("do not divide"), edits={"scale_rewards": "none"}),
            )
        )
    if loss_named(config.loss_type).by_group and is_over_batch:
        problems.append(
            _pointless(
                "advantage_estimator",
                tr(
                    "loss_type {loss_type} classifies the completions within a group, but "
                    "advantage_estimator reinforce_plus_plus compares over all groups.",
                    loss_type=config.loss_type,
                ),
                Fix(text=tr("compare completions within their group"), edits={"advantage_estimator": "grpo"}),
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
                    "kl_in_reward is on, but scale_rewards gdpo normalizes each reward separately, "
                    "so there is no single reward to subtract the KL from."
                ),
                Fix(text=tr("put the KL into the loss"), edits={"kl_in_reward": False}),
                Fix(
                    text=tr("divide the sum of the rewards by its standard deviation within the group"),
                    edits={"scale_rewards": "group"},
                ),
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
                    "kl_estimator is k1 in the loss, where its gradient is 0 on average, however "
                    "large the KL is."
                ),
                tr("k1 is meant for the reward (kl_in_reward), where it is not differentiated."),
                Fix(text=tr("use the default"), edits={"kl_estimator": "k3"}),
                Fix(text=tr("subtract the KL from the reward"), edits={"kl_in_reward": True}),
            )
        )
    return problems


def _moving_reference(config: Config, *, has_kl: bool) -> list[Problem]:
    still = Fix(text=tr("keep the reference model fixed"), edits={"sync_ref_model": False})
    if not has_kl:
        seen = tr("sync_ref_model is on, but beta is 0, so there is no reference model to update.")
        return [
            _pointless("sync_ref_model", seen, Fix(text=tr("use a KL term"), edits={"beta": 0.04}), still)
        ]
    steps = config.num_iterations * config.steps_per_generation // max(1, config.gradient_accumulation_steps)
    every = max(1, config.ref_model_sync_steps)
    if config.ref_model_mixup_alpha == 1.0 and steps % every == 0 and (steps == 1 or config.kl_in_reward):
        seen = tr(
            "ref_model_mixup_alpha is 1 and ref_model_sync_steps is {every}: the reference is a "
            "copy of the policy at every rollout, so the KL is always 0.",
            every=every,
        )
        rare = Fix(
            text=tr("update the reference less often"), edits={"ref_model_sync_steps": max(512, steps + 1)}
        )
        return [_pointless("ref_model_sync_steps", seen, rare, still)]
    return []


def _entropy(config: Config) -> list[Problem]:
    if config.use_adaptive_entropy and config.entropy_coef_min > config.entropy_coef_max:
        seen = tr(
            "entropy_coef_min is {entropy_coef_min:g}, above entropy_coef_max.",
            entropy_coef_min=config.entropy_coef_min,
        )
        fix = Fix(text=tr("use the defaults"), edits={"entropy_coef_min": 0.0, "entropy_coef_max": 1.0})
        return [_pointless("entropy_coef_min", seen, fix)]
    if config.use_adaptive_entropy and config.entropy_coef_end is not None:
        seen = tr(
            "use_adaptive_entropy and entropy_coef_end are both set, but only one of them can change "
            "entropy_coef."
        )
        fix = Fix(text=tr("leave out --entropy_coef_end"), edits={"entropy_coef_end": None})
        return [_pointless("entropy_coef_end", seen, fix)]
    return []


def _corrections(config: Config) -> list[Problem]:
    ours, trl = config.rollout_importance_sampling_mode, config.vllm_importance_sampling_mode
    if ours is not None and trl is not None:
        seen = tr(
            "rollout_importance_sampling_mode and vllm_importance_sampling_mode are both set, but "
            "only one correction can apply."
        )
        return [
            _pointless(
                "vllm_importance_sampling_mode",
                seen,
                Fix(
                    text=tr("only the correction of ms-swift"), edits={"vllm_importance_sampling_mode": None}
                ),
                Fix(text=tr("only the correction of TRL"), edits={"rollout_importance_sampling_mode": None}),
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
                "{name} is set, but rollouts are replayed: no groups are sampled that could replace others.",
                name=name,
            )
        elif config.advantage_estimator == "reinforce_plus_plus":
            seen = tr(
                "{name} is set, but advantage_estimator reinforce_plus_plus compares over the "
                "whole rollout: a group with equal rewards has a signal like any other.",
                name=name,
            )
            if config.num_generations > 1:
                edits = {"advantage_estimator": "grpo", "scale_rewards": "group"}
                fixes.append(Fix(text=tr("compare completions within their group"), edits=edits))
        elif config.num_generations < 2:
            seen = tr(
                "{name} is set, but num_generations is 1, and a single completion has no spread of rewards.",
                name=name,
            )
        elif name == "dynamic_sample" and config.scale_rewards == "none":
            seen = tr(
                "dynamic_sample is set, but scale_rewards is none. Then the mean over all prompts "
                "is the gradient of the expected reward; leaving out groups with equal rewards "
                "would bias it."
            )
            fixes.append(
                Fix(
                    text=tr("divide by the standard deviation within the group"),
                    edits={"scale_rewards": "group"},
                )
            )
        else:
            continue
        cause = tr(
            "Groups are selected by the spread of their rewards, which has no effect on the signal here."
        )
        problems.append(problem("E333", name, seen, cause, *fixes))
    return problems


def _levels(config: Config) -> list[Problem]:
    """Levels of the ratio that a loss is not meant with; the others warn of them too."""
    level, loss = config.importance_sampling_level, loss_named(config.loss_type)
    if "importance_sampling_level" in loss.ignores:
        return []
    if level == "sequence" and loss.averages_tokens:
        seen = tr(
            "importance_sampling_level is sequence, but loss_type {loss} averages over tokens, ",
            loss=loss.name,
        )
        seen += tr("so a long completion weighs more than a short one with the same ratio.")
        return [
            _unusual("loss_type", seen, Fix(text=tr("use the loss of GSPO"), edits={"loss_type": "grpo"}))
        ]
    if loss.of_sequences and level != "sequence":
        seen = tr(
            "loss_type is {loss}, which is defined with the ratio of the sequence, but "
            "importance_sampling_level is {level}.",
            loss=loss.name,
            level=level,
        )
        fix = Fix(text=tr("use the ratio of the sequence"), edits={"importance_sampling_level": "sequence"})
        return [_unusual("importance_sampling_level", seen, fix)]
    return []


def _without_effect(config: Config, typed: Collection[str]) -> list[Problem]:
    ignored = loss_named(config.loss_type).ignores
    names = [name for name in ignored if getattr(config, name) != default_of(name)]
    why = dict.fromkeys(names, tr("loss_type {loss_type} does not use it", loss_type=config.loss_type))
    for name, read_if in unread(config, typed).items():
        why[name] = read_if.why_not(getattr(config, read_if.option))
    if "kl_in_reward" in typed and config.kl_in_reward and not (config.beta or config.beta_end):
        why["kl_in_reward"] = tr("beta is 0")
    return [
        warning(
            "W108",
            name,
            tr("{name} is set, but {reason}.", name=name, reason=reason),
            "",
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
    return problem("E331", option, seen, "", *fixes)


def _unusual(option: str, seen: str, *fixes: Fix) -> Problem:
    return warning("W122", option, seen, "", *fixes)


_CODES = (
    Code(
        code="E331",
        title="Options of the algorithm that exclude each other",
        why="Together the options have no meaning, or one of them would be ignored, so the run would "
        "differ from the one that the command describes.",
    ),
    Code(
        code="E333",
        title="Selection of groups by a spread that has no effect",
        why="Groups with equal rewards are left out because they teach nothing. If they do teach "
        "something, or if nothing can replace them, leaving them out would train something else "
        "than you asked for.",
    ),
    Code(
        code="W122",
        title="Unusual pair of options",
        why="The two options come from different methods. Their combination is well defined, but the "
        "authors did not test it.",
    ),
)

CHECK = Check(
    place=220,
    judge=lambda config, facts, typed: algorithm_problems(config, facts.launch.num_processes, typed or ()),
    codes=_CODES,
)
