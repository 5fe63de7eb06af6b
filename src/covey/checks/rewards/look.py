"""Facts about the rewards: whether they load, can be called, pass their trial, and what the golds are."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from covey.checks.code.look import CODE_REWARD, with_code
from covey.checks.rewards.golds import gold_text
from covey.checks.rewards.handed import taken
from covey.checks.rewards.models import (
    is_judge_usable,
    usable_models,
    with_judge,
    with_reward_models,
)
from covey.checks.tasks.look import firsts
from covey.data.prompts import chosen, fields_of
from covey.data.rows import PromptTable
from covey.options.schema import Config
from covey.plan.facts import Facts, RewardFacts
from covey.plan.task_rewards import asked
from covey.rewards.apart import ModelEntry
from covey.rewards.builtin import JUDGE, built_in_of
from covey.rewards.function_text import function_digest
from covey.rewards.images import NAMES
from covey.rewards.protocol import Environments, Scored
from covey.rewards.registry import available, options_read
from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import answered, blind, trial
from covey.types import BlindReward, Prompt, RewardFault

# What the trial answers a row with: its gold, and nothing.
_ANSWERS = 2

Functions = Mapping[str, Callable[..., Any]]


def with_rewards(
    facts: Facts,
    config: Config,
    prompts: PromptTable | None,
    functions: Functions,
    *,
    offline: bool,
    environments: Environments | None = None,
) -> tuple[Facts, RewardSet | None]:
    """The facts with those of the rewards, and the rewards themselves, ready to score.

    Those that read `environments` are called where these are, and not tried: there is none yet. With
    `offline` no service is asked and no weights of reward models are read.
    """
    given = replace(facts.rewards, available=available(), options=options_read())
    if not config.rewards or config.replay_rollouts is not None:
        return replace(facts, rewards=given), None
    facts = replace(facts, rewards=replace(given, texts=_texts(config, functions)))
    facts = with_code(facts, config, prompts)
    facts = with_reward_models(facts, config, offline=offline)
    models = usable_models(config, facts.prompts, facts.rewards)
    refused = _refused(facts.rewards, config, models)
    entries = [name for name in dict.fromkeys(config.rewards) if name not in refused]
    columns = facts.data.columns or ()
    found = [models[name] if name in models else functions.get(name, name) for name in entries]
    is_messages = _are_messages(prompts, columns)
    rewards = _started(config, found, environments, prompt_is_messages=is_messages)
    if not rewards.faults and config.task_rewards is not None:
        rewards = rewards.of_tasks(asked(config.task_rewards, entries, rewards.names))
    if JUDGE in config.reward_funcs and JUDGE in rewards.apart:
        # A plugin's reward of this name takes its place.
        facts = with_judge(facts, config)
        refused |= set() if is_judge_usable(config, facts.data, facts.rewards, facts.machine) else {JUDGE}
    faults = list(rewards.faults)
    if not faults and facts.data.columns is not None and _has_all_columns(config):
        faults = rewards.missing(_given_columns(columns, sees_images=facts.data.sees_images))
        if facts.data.missing_columns:
            # The columns of built-in rewards are among them already.
            faults = [f for f in faults if built_in_of(f.reward) is None]
    names = () if refused else rewards.names
    seen = replace(facts.rewards, names=names, notes=(*facts.rewards.notes, *rewards.notes))
    told = taken(config, seen, os.environ)
    if told is None and not faults and prompts is not None and prompts.entries and _is_tried(config):
        untried = (*_untried(facts, rewards, offline=offline), *rewards.beside)
        rows = [row for p in firsts(config, prompts.entries) for row in _trial_rows(p, config)]
        tried = trial(rewards.without([*untried, *refused]), rows)
        faults = _with_form(tried.faults, config, rewards, found, rows, prompt_is_messages=is_messages)
        # Every further question costs money, and without all parts there is no total.
        is_whole = not untried and not refused and facts.rewards.judge is None
        unseen, faults = _unseen(rewards, config, prompts) if is_whole and not faults else ((), faults)
        process = tuple(_typed(name, config) for name in tried.of_steps or ())
        seen = replace(seen, blind=unseen, process=process, reads_steps=_reads_steps(rewards, tried.of_steps))
    elif told is None:
        seen = replace(seen, reads_steps=_reads_steps(rewards, None))
    seen = replace(told or seen, faulty=tuple(replace(f, reward=_typed(f.reward, config)) for f in faults))
    facts = replace(facts, rewards=seen)
    if faults or refused:
        rewards.close()
        return facts, None
    return facts, rewards


def _are_messages(prompts: PromptTable | None, columns: Sequence[str]) -> bool:
    """Return whether prompts are messages in a column `prompt`, as TRL has them."""
    first = prompts.entries[0] if prompts is not None and prompts.entries else None
    return first is not None and first.messages is not None and "prompt" in columns


def _texts(config: Config, functions: Functions) -> tuple[tuple[str, str], ...]:
    """Return (entry, digest) of each reward that is a function."""
    texts = {name: function_digest(name, functions.get(name)) for name in config.rewards}
    return tuple((name, text) for name, text in texts.items() if text is not None)


def _started(
    config: Config, entries: Sequence[Any], environments: Environments | None, *, prompt_is_messages: bool
) -> RewardSet:
    return RewardSet.start(
        entries,
        plugins=config.external_plugins,
        workers=config.reward_workers,
        timeout_s=config.reward_timeout_s,
        completion_form=None if config.completion_form == "auto" else config.completion_form,
        prompt_is_messages=prompt_is_messages,
        step_separator=config.step_separator,
        options=config.model_dump(),
        environments=environments,
    )


def _with_form(
    faults: list[RewardFault],
    config: Config,
    rewards: RewardSet,
    entries: Sequence[Any],
    rows: Sequence[Scored],
    *,
    prompt_is_messages: bool,
) -> list[RewardFault]:
    """The faults of a trial, with the other form of completions where every function passes in that.

    The other form is tried only if a function fails on both answers of a row in each row where it fails: a
    function that accepts one of them can read this form.
    """
    counts = Counter((fault.reward, fault.row) for fault in faults)
    read = {reward for (reward, _), count in counts.items() if count < _ANSWERS}
    if not {reward for reward, _ in counts} - read - set(rewards.apart):
        return faults
    given = config.completion_form
    was_messages = prompt_is_messages if given == "auto" else given == "messages"
    form: Literal["text", "messages"] = "text" if was_messages else "messages"
    other = config.model_copy(update={"completion_form": form})
    with _started(other, entries, None, prompt_is_messages=prompt_is_messages) as again:
        tried = trial(again.of_tasks(rewards.tasks).without((*rewards.apart, *rewards.beside)), rows)
        passes = not again.faults and not tried.faults
    return [replace(fault, form=form) for fault in faults] if passes else faults


def _is_tried(config: Config) -> bool:
    """Return whether rewards are tried here: one process does it for all."""
    return config.reward_trial and _has_all_columns(config) and os.environ.get("RANK", "0") == "0"


def _has_all_columns(config: Config) -> bool:
    """Return whether rewards are given the columns of the data alone: those that a rollout function or a
    scheduler adds are known only once it has been called."""
    return config.rollout_func is None and config.multi_turn_scheduler is None


def _reads_steps(rewards: RewardSet, of_steps: Sequence[str] | None) -> bool | None:
    """Return whether a reward gives numbers of steps, or names them; None where nothing was tried."""
    if of_steps or any(rewards.named(("completion_steps",))):
        return True
    return None if of_steps is None else False


def _refused(rewards: RewardFacts, config: Config, models: Mapping[str, ModelEntry]) -> set[str]:
    """The rewards that are refused with a word of their own; their workers would say the same once more."""
    refused = {m.entry for m in rewards.models if m.entry not in models}
    if rewards.sandbox is not None and rewards.sandbox.lacks and not config.unsafe_exec:
        refused.add(CODE_REWARD)
    return refused


def _untried(facts: Facts, rewards: RewardSet, *, offline: bool) -> tuple[str, ...]:
    """The rewards that the trial leaves out: models whose weights are still on a hub, and for a plan alone
    everything that reads weights or asks a service."""
    if offline:
        return rewards.apart
    absent = {m.name for m in facts.rewards.models if not m.is_here}
    return tuple(name for name in rewards.apart if name in absent)


def _given_columns(columns: Sequence[str], *, sees_images: bool) -> Sequence[str]:
    return [name for name in (*columns, *(NAMES if sees_images else ())) if name != "prompt"]


def _typed(name: str, config: Config) -> str:
    """A trial knows rewards by their metric's name; people know them as they typed them."""
    if name in config.rewards:
        return name
    return next((n for n in config.rewards if n.rstrip("/").endswith(name)), name)


def _unseen(
    rewards: RewardSet, config: Config, prompts: PromptTable
) -> tuple[tuple[BlindReward, ...], list[RewardFault]]:
    """The rewards that do not tell a gold answer from none, or from another row's; and those that fail on
    one."""
    weights = config.reward_weights or [1.0] * len(rewards.names)
    if len(weights) != len(rewards.names):
        return (), []
    entries = list(dict.fromkeys(config.rewards))
    claims = [i for i, e in enumerate(entries) if (known := built_in_of(e)) is not None and known.parses_gold]
    by_task: dict[str, array[int]] = {}
    for number, task in enumerate(fields_of(prompts.entries, "task")):
        by_task.setdefault(task if config.task_rewards is not None else "", array("q")).append(number)
    found: list[BlindReward] = []
    for task, numbers in by_task.items():
        rows = chosen(prompts.entries, numbers)
        own = rewards.tasks.get(task, rewards.names)
        # A weight of 0 is judged by nobody, and so is a reward that does not score the task.
        asked_for = [w if n in own else 0.0 for n, w in zip(rewards.names, weights, strict=True)]
        compared = blind(rewards, asked_for, rows, claims)
        if compared.faults:
            return (), compared.faults
        found += compared.blind
    unseen = {b.reward: b for b in reversed(found)}.values()
    return tuple(replace(b, reward=_typed(b.reward, config)) if b.reward else b for b in unseen), []


def _trial_rows(prompt: Prompt, config: Config) -> list[Scored]:
    """The same row twice: answered with its gold, and not at all."""
    return [answered(prompt, gold_text(prompt.columns, config), 0), answered(prompt, "", 1)]
