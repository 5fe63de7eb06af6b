"""Finds evaluation options that contradict each other or the data."""

from __future__ import annotations

from covey.checks.check import Check
from covey.config.names import nearest
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.texts import joined, tr
from covey.types import Fix, Problem

_PER_SET = (
    "reward",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "completions/clipped_ratio",
    "completions/unknown_ids_ratio",
)


def eval_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what is wrong with the evaluation options."""
    evaluates = config.eval_strategy != "no"
    problems = []
    if evaluates and not config.val_dataset and not config.split_dataset_ratio:
        problems.append(
            problem(
                "E115",
                "eval_strategy",
                tr(
                    "eval_strategy is {eval_strategy}, but there is no evaluation dataset.",
                    eval_strategy=config.eval_strategy,
                ),
                tr("No evaluation dataset is given."),
                Fix(text=tr("use a separate dataset: --val_dataset FILE")),
                *_ways_out(config),
            )
        )
    if config.streaming and config.eval_strategy == "epoch":
        problems.append(_epochs_of_a_stream(config))
    if not evaluates:
        problems += [_without_evaluation(config, name) for name in _needing(config)]
    elif config.load_best_model_at_end or config.early_stopping_patience is not None:
        problems += _metric(config, facts)
    return problems


def _epochs_of_a_stream(config: Config) -> Problem:
    return problem(
        "E115",
        "eval_strategy",
        tr("eval_strategy is epoch, but streaming is on, and the end of a stream is not known."),
        tr("The training rows are not counted before the run, so covey does not know where an epoch ends."),
        Fix(text=tr("evaluate every eval_steps"), edits={"eval_strategy": "steps"}),
    )


def _ways_out(config: Config) -> list[Fix]:
    """The ways to an evaluation, or out of one, that nothing else in the configuration bars."""
    fixes = []
    if not config.streaming:
        fixes.append(Fix(text=tr("use a share of the training rows"), edits={"split_dataset_ratio": 0.05}))
    if not _needing(config):
        fixes.append(Fix(text=tr("do not evaluate"), edits={"eval_strategy": "no"}))
    return fixes


def _needing(config: Config) -> list[str]:
    return [
        name
        for name, on in (
            ("load_best_model_at_end", config.load_best_model_at_end),
            ("early_stopping_patience", config.early_stopping_patience is not None),
        )
        if on
    ]


def _without_evaluation(config: Config, name: str) -> Problem:
    fixes = [Fix(text=tr("leave out --{name}", name=name))]
    if config.val_dataset or config.split_dataset_ratio:
        cause = tr("eval_strategy is no, although there is an evaluation dataset.")
        fixes.insert(0, Fix(text=tr("evaluate every eval_steps"), edits={"eval_strategy": "steps"}))
    else:
        cause = tr("No evaluation dataset is given.")
        fixes.insert(0, Fix(text=tr("name an evaluation dataset: --val_dataset FILE")))
        if not config.streaming:
            edits = {"split_dataset_ratio": 0.05, "eval_strategy": "steps"}
            fixes.insert(1, Fix(text=tr("evaluate on a share of the training rows"), edits=edits))
    missing = (
        tr("no best model") if name == "load_best_model_at_end" else tr("no metric that could stop the run")
    )
    seen = tr("{name} is set, but nothing is evaluated, so there is {missing}.", name=name, missing=missing)
    return problem("E115", name, seen, cause, *fixes)


def _metric(config: Config, facts: Facts) -> list[Problem]:
    metric = config.metric_for_best_model
    names = metric_names(config, facts)
    if metric in names:
        return []
    near = nearest(metric, names) or "eval_reward"
    return [
        problem(
            "E104",
            "metric_for_best_model",
            tr("metric_for_best_model is {metric}, which no evaluation computes.", metric=metric),
            tr("Metrics of evaluations begin with eval_, and have the name of the dataset where it has one."),
            Fix(text=tr("use the metric with the nearest name"), edits={"metric_for_best_model": near}),
            Fix(text=tr("the metrics are {names}", names=joined(", ", names[:12]))),
        )
    ]


def metric_names(config: Config, facts: Facts) -> list[str]:
    """Return the metrics that every evaluation of a configuration gives; pass@k where a reward is 0 or 1."""
    sets = [s.name for s in facts.data.eval_sets]
    known = facts.rewards.names or tuple(config.rewards)
    rewards = [f"rewards/{name}/{kind}" for name in known for kind in ("mean", "std")]
    size = config.num_generations_eval
    # One completion a prompt has neither a spread nor a choice.
    passes = [f"pass@{k}" for k in pass_sizes(size)]
    of_groups = ["reward_std", "frac_reward_zero_std", *passes] if size > 1 else []
    prefixes = ["eval_", *(f"eval_{name}_" for name in sets if len(sets) > 1)]
    of_tasks = [
        f"tasks/{task}/{name}"
        for task in facts.tasks.evaluated
        for name in (*_PER_SET, *(n for n in rewards if n.endswith("/mean")), *of_groups)
    ]
    return [f"{prefix}{name}" for prefix in prefixes for name in (*_PER_SET, *rewards, *of_groups, *of_tasks)]


def pass_sizes(num: int) -> list[int]:
    """The k of pass@k for `num` completions a prompt: `pass_sizes(6)` is [1, 2, 4, 6]."""
    return sorted({*(2**i for i in range(num.bit_length()) if 2**i <= num), num})


CHECK = Check(place=230, judge=lambda config, facts, _: eval_problems(config, facts))
