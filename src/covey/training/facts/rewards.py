"""Facts about the rewards: whether they load, can be called, pass their trial, and what the golds are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.config.schema import Config
from covey.data.rows import PromptTable
from covey.plan.facts import Facts, FaultyReward, GoldFacts
from covey.plan.facts import RewardFault as Kind
from covey.rewards.golds import check_golds
from covey.rewards.protocol import RewardFault, Scored
from covey.rewards.registry import available
from covey.rewards.reward_set import RewardSet
from covey.rewards.trial import trial
from covey.training.facts.code import CODE_REWARD, with_code
from covey.training.facts.data import as_json, gold_of
from covey.types import Finish, NoiseKey, Prompt, SamplingParams, Segment, Source, Trajectory

_KINDS: Mapping[str, Kind] = {"unknown": "unknown", "signature": "signature", "trial": "trial"}
_GOLD_BUDGET_S = 1.0
_SHOWN = 3
_NEEDS_GOLD = ("accuracy", "accuracy_reward", "trl.rewards.accuracy_reward")

Functions = Mapping[str, Callable[..., Any]]


def with_rewards(
    facts: Facts, config: Config, prompts: PromptTable | None, functions: Functions
) -> tuple[Facts, RewardSet | None]:
    """The facts with those of the rewards, and the rewards themselves, ready to score."""
    facts = replace(facts, rewards_available=available())
    if not config.reward_funcs or config.replay_rollouts is not None:
        return facts, None
    if len(set(config.reward_funcs)) < len(config.reward_funcs):
        entries = list(dict.fromkeys(config.reward_funcs))
    else:
        entries = list(config.reward_funcs)
    facts = with_code(facts, config, prompts)
    if facts.sandbox is not None and facts.sandbox.lacks and not config.unsafe_exec:
        # Refused with a word of its own; its worker would say the same once more.
        entries.remove(CODE_REWARD)
    columns = facts.columns or ()
    first = prompts.entries[0] if prompts is not None and prompts.entries else None
    rewards = RewardSet.start(
        [functions.get(name, name) for name in entries],
        plugins=config.external_plugins,
        workers=config.reward_workers,
        timeout_s=config.reward_timeout_s,
        completion_form=None if config.completion_form == "auto" else config.completion_form,
        prompt_is_messages=first is not None and first.messages is not None and "prompt" in columns,
        options=config.model_dump(),
    )
    faults = list(rewards.faults)
    if not faults and facts.columns is not None:
        faults = rewards.missing(_given_columns(columns))
    if not faults and first is not None and config.reward_trial and os.environ.get("RANK", "0") == "0":
        faults = trial(rewards, _trial_rows(first))
    facts = replace(
        facts,
        faulty_rewards=tuple(_fault(f, config) for f in faults),
        reward_names=rewards.names,
        reward_notes=(*facts.reward_notes, *rewards.notes),
        golds=_golds(config, prompts),
    )
    if faults or (CODE_REWARD in config.reward_funcs and CODE_REWARD not in entries):
        rewards.close()
        return facts, None
    return facts, rewards


def _given_columns(columns: Sequence[str]) -> Sequence[str]:
    return [name for name in columns if name != "prompt"]


def _fault(fault: RewardFault, config: Config) -> FaultyReward:
    name = fault.reward
    if name not in config.reward_funcs:
        # A trial knows rewards by their metric's name; people know them as they typed them.
        name = next((n for n in config.reward_funcs if n.endswith(name)), name)
    return FaultyReward(name=name, kind=_KINDS.get(fault.kind, "load"), words=fault.words)


def _trial_rows(prompt: Prompt) -> list[Scored]:
    """The same row twice: answered with its gold, and not at all."""
    gold = gold_of(prompt.columns)
    return [_answered(prompt, "" if gold is None else as_json(gold), 0), _answered(prompt, "", 1)]


def _answered(prompt: Prompt, text: str, sibling: int) -> Scored:
    key = NoiseKey(seed=0, split="trial", rollout=0, attempt=0, prompt_id=prompt.id, sibling=sibling)
    segments = (
        Segment(token_ids=prompt.token_ids, source=Source.PROMPT, trained=False),
        Segment(token_ids=(0,), source=Source.MODEL, trained=True, logprobs=(0.0,), versions=(0,)),
    )
    sampling = SamplingParams(temperature=1.0, max_new_tokens=1, stop_token_ids=())
    trajectory = Trajectory(
        segments=segments, sampling=sampling, noise_key=key, finish=Finish.STOP, text=text
    )
    return Scored(prompt=replace(prompt, opened=""), trajectory=trajectory)


def _golds(config: Config, prompts: PromptTable | None) -> GoldFacts | None:
    if prompts is None or not set(config.reward_funcs) & set(_NEEDS_GOLD):
        return None
    report = check_golds((gold_of(p.columns) for p in prompts.entries), budget_s=_GOLD_BUDGET_S)
    absent = [(i, "", "there is none") for i, p in enumerate(prompts.entries) if gold_of(p.columns) is None]
    bad = sorted([*report.bad, *absent])
    return GoldFacts(
        num_checked=report.num_checked + len(absent),
        num_bad=len(bad),
        examples=tuple((prompts.entries[i].id + 1, text, why) for i, text, why in bad[:_SHOWN]),
    )
