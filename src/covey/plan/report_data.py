"""The lines of a plan on data, rewards and evaluations."""

from __future__ import annotations

from covey.config.filters import eval_filters_of, in_words
from covey.options.schema import Config
from covey.plan.ahead import cores_of, samples_apart
from covey.plan.batch import BatchPlan
from covey.plan.disk import size
from covey.plan.facts import Facts, PassRateFacts
from covey.plan.memory import reward_model_bytes
from covey.plan.reasons import REASONS
from covey.plan.task_rewards import shown
from covey.texts import counted, joined, plural, tr

_SPLITS = 6


def data_lines(config: Config, facts: Facts) -> list[str]:
    """The rows, and which prompts are left out."""
    if config.replay_rollouts is not None:
        return [
            tr(
                "replay of the rollouts in {replay_rollouts}; nothing is sampled",
                replay_rollouts=config.replay_rollouts,
            )
        ]
    if config.streaming:
        return [
            tr("read when it is needed; prompts that are too long are left out on the way"),
            *_gold_lines(config, facts),
            *facts.data.notes,
        ]
    rows = "" if facts.data.num_rows is None else tr("{rows}, ", rows=counted(facts.data.num_rows, "row"))
    lines = [tr("{rows}{prompts} used", rows=rows, prompts=counted(facts.prompts.num_used or 0, "prompt"))]
    if facts.prompts.longest:
        lines[0] += tr(", the longest of {tokens}", tokens=counted(facts.prompts.longest, "token"))
    if facts.prompts.image_tokens is not None:
        lines.append(_image_line(facts, *facts.prompts.image_tokens))
    for left in facts.data.left_out:
        where = ", ".join(map(str, left.rows))
        verb = "" if left.reason == "cut" else tr("left out: ")
        verb += tr("of {where}, ", where=left.where) if left.where else ""
        some = " ..." if left.count > len(left.rows) else ""
        lines.append(
            joined("", [verb, counted(left.count, "row"), " ", REASONS.get(left.reason, left.reason)])
            + (tr(" (row {where}{some})", where=where, some=some) if where else "")
        )
    return [*lines, *_gold_lines(config, facts), *facts.data.notes]


def _image_line(facts: Facts, least: int, most: int) -> str:
    tokens = f"{least}" if least == most else tr("{least} to {most}", least=least, most=most)
    images = counted(facts.prompts.num_images, "image")
    return plural(
        most,
        "{images}, each of {tokens} token",
        "{images}, each of {tokens} tokens",
        images=images,
        tokens=tokens,
    )


def _gold_lines(config: Config, facts: Facts) -> list[str]:
    """How many golds can be read, and what their lists were taken for; of a stream, in its first rows."""
    golds = facts.rewards.golds
    if golds is None:
        return []
    counts = {"num_good": golds.num_checked - golds.num_bad, "num_checked": golds.num_checked}
    lines = [
        tr("gold answers: {num_good:,} of the first {num_checked:,} can be read", **counts)
        if config.streaming
        else tr("gold answers: {num_good:,} of {num_checked:,} can be read", **counts)
    ]
    if golds.num_lists and all(found.is_decided for found in golds.open_lists):
        lines.append(
            tr("gold lists: {num:,}, all members are needed (gold_lists all)", num=golds.num_lists)
            if config.gold_lists == "all"
            else tr("gold lists: {num:,}, one member is enough (gold_lists any)", num=golds.num_lists)
        )
    if golds.num_named:
        lines.append(tr("gold objects: {num:,} with several answers, one is enough", num=golds.num_named))
    return lines


def task_lines(config: Config, facts: Facts) -> list[str]:
    """The rows of each task, and what scores them."""
    named = config.task_rewards or {}
    return [
        tr(
            "{task}: {prompts}{rewards}",
            task=task,
            prompts=counted(count, "prompt"),
            rewards=tr(", by {names}", names=" + ".join(named[task])) if named.get(task) else "",
        )
        for task, count in facts.tasks.num_rows.items()
    ]


def pass_rate_lines(config: Config, facts: Facts) -> list[str]:
    """Where pass rates are from, what is left out by them, and how they are spread."""
    rates = facts.data.pass_rates
    if rates is None or rates.problem is not None:
        return []
    low, high = config.min_pass_rate, config.max_pass_rate
    left = rates.num_rows - rates.num_kept
    lines = [
        tr(
            "{where}: {num_measured:,} of {prompts} measured, the others are kept; {left:,} left "
            "out, below {low:g} or above {high:g}",
            where=rates.where,
            num_measured=rates.num_measured,
            prompts=counted(rates.num_rows, "prompt"),
            left=left,
            low=low,
            high=high,
        ),
        tr("by pass rate: {histogram}", histogram=histogram(rates) or tr("none")),
    ]
    return [
        *lines,
        *(
            [tr("each epoch {curriculum}", curriculum=config.curriculum)]
            if config.curriculum != "none"
            else []
        ),
    ]


def reward_lines(config: Config, facts: Facts) -> list[str]:
    """The rewards with their weights, and the models that score."""
    pairs = zip(shown(config.rewards), config.reward_weights, strict=True)
    return [
        " + ".join(f"{weight:g} x {name}" for name, weight in pairs),
        *_models(facts),
        *facts.rewards.notes,
    ]


def turn_lines(config: Config, facts: Facts) -> list[str]:
    """The tools and the environment of an episode, and how far it may go."""
    if config.rollout_func is not None:
        return [tr("rollout function {name} makes the episodes", name=config.rollout_func)]
    if not config.has_turns:
        return []
    lines, own = [], config.max_completion_length
    if facts.tools.names:
        names, form = joined(", ", facts.tools.names), facts.tools.call_format
        lines.append(tr("tools {names}; the model calls them in the format {form}", names=names, form=form))
    if config.environment_factory is not None:
        lines.append(tr("environment {name}, one for each episode", name=config.environment_factory))
    if config.multi_turn_scheduler is not None:
        lines.append(tr("scheduler {name} makes the episodes", name=config.multi_turn_scheduler))
    most = config.max_turns
    turns = tr("any number of turns") if most is None else counted(most, "turn")
    if config.is_limited_by_turn:
        lines.append(tr("an episode has {turns}, each up to {own} tokens", turns=turns, own=own))
    else:
        lines.append(
            tr("an episode has {turns}, with results of tools up to {own} tokens", turns=turns, own=own)
        )
    if facts.tools.rehearsal is not None and facts.tools.rehearsal.rewritten:
        lines.append(tr("the chat template rewrites earlier turns, so that turns begin new sequences"))
    return lines


def _models(facts: Facts) -> list[str]:
    """The reward models, each in a process of its own beside each training process."""
    return [
        tr("reward model {name}: {millions} parameters", name=m.name, millions=millions(m.parameters))
        + ("" if m.context is None else tr(", context {context} tokens", context=m.context))
        + tr(
            "; a process of its own, about {size}",
            size=size(reward_model_bytes(m, cuda=bool(facts.machine.cuda))),
        )
        for m in facts.rewards.models
        if m.problem is None and m.is_here
    ]


def evaluation_lines(config: Config, facts: Facts) -> list[str]:
    """When it evaluates, and on what."""
    if config.eval_strategy == "no" or not facts.data.eval_sets:
        return []
    steps = plural(
        config.eval_steps,
        "every {eval_steps} step",
        "every {eval_steps} steps",
        eval_steps=config.eval_steps,
    )
    asked = tr("where a callback asks for it")
    when = {"steps": steps, "epoch": tr("after each epoch")}.get(config.eval_strategy)
    when = asked if when is None else tr("{when} and at the end", when=when)
    start = tr("before the first step, ") if config.eval_on_start else ""
    sets = joined(
        ", ",
        [
            tr("{name} ({prompts})", name=s.name, prompts=counted(s.num_prompts, "prompt"))
            for s in facts.data.eval_sets
        ],
    )
    each = counted(config.num_generations_eval, "completion")
    on = eval_filters_of(config) if config.eval_temperature > 0 else {}
    heat = f"{config.eval_temperature:g}" + (f", {in_words(on)}" if on else "")
    return [
        tr(
            "{sets}: {start}{when}; {each} a prompt at temperature {heat}",
            sets=sets,
            start=start,
            when=when,
            each=each,
            heat=heat,
        )
    ]


def millions(count: int) -> str:
    """Return a count in millions."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def histogram(rates: PassRateFacts) -> str:
    """Measured rows by pass rate: `0.0-0.1: 12, 0.9-1.0: 3`."""
    bins = [(i / 10, count) for i, count in enumerate(rates.histogram)]
    return ", ".join(f"{low:.1f}-{low + 0.1:.1f}: {count}" for low, count in bins if count)


def ahead_lines(config: Config, batch: BatchPlan) -> list[str]:
    """Return how far rollouts are begun ahead, and how old that makes their tokens."""
    if not config.is_ahead:
        return []
    most = config.max_staleness
    apart = []
    if samples_apart(config):
        _, cores = cores_of(1)
        apart = [
            tr(
                "a process of its own samples on this machine: on the next GPU, or without GPUs on {cores}",
                cores=counted(cores, "core"),
            )
        ]
    return [
        *apart,
        tr(
            "the servers begin at most {rollouts} ahead of the one that is trained on: {completions}",
            rollouts=counted(most, "rollout"),
            completions=counted(most * batch.prompts_per_rollout * config.num_generations, "completion"),
        ),
        tr(
            "the weights that sample a token are at most {steps} older than those that train on it",
            steps=counted(most * batch.steps_per_rollout, "step"),
        ),
    ]


def selection_lines(config: Config, batch: BatchPlan) -> list[str]:
    """Return what takes the place of groups without signal, and what that costs at most."""
    lines = []
    if config.dynamic_sample:
        planned, times = batch.completions_per_rollout, config.max_resample_times
        lines.append(
            tr(
                "groups without signal are replaced in up to {draws}: a rollout samples {least:,} "
                "to {most:,} completions",
                draws=counted(times, "further draw"),
                least=planned,
                most=planned * (1 + times),
            )
        )
    if config.replay_buffer_size:
        kept = counted(config.replay_buffer_size, "group")
        lines.append(
            tr(
                "groups that still have no signal are replaced by the {kept} of earlier rollouts with "
                "the most signal",
                kept=kept,
            )
        )
    return lines
