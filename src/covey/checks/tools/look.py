"""Facts about tools and environments: whether they load, and how the chat template writes calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from covey.checks.rewards.golds import gold_text
from covey.checks.rewards.handed import TRIAL
from covey.data.text import TextCodec
from covey.environments.agents import Agents, TurnLimits
from covey.environments.call_format import CallFormat
from covey.environments.protocol import ToolHost
from covey.environments.rendering import Renderer, calls_alike
from covey.environments.template_calls import NoFormat, format_or_reason
from covey.options.schema import Config
from covey.plan.facts import Facts, ToolFacts
from covey.rewards.reward_set import RewardSet
from covey.types import Prompt
from covey.types.turns import ToolFault

# What is longer than any text that a model reads.
_MOST_CHARS = 1_000_000
_CHATML = ("<|im_start|>", "<|im_end|>")


def with_tools(
    facts: Facts, config: Config, codec: TextCodec | None, functions: Mapping[str, Any]
) -> tuple[Facts, Agents | None]:
    """Return the facts with those of tools and environment, and what runs them, ready for episodes; None
    where there are none, or something stands against them."""
    if not config.has_turns or config.replay_rollouts is not None:
        return facts, None
    # Runs without tools do not wait for these.
    from covey.environments.environment_host import start_environments
    from covey.environments.tools import start_tools

    found: ToolHost | None = None
    faults: list[ToolFault] = []
    if config.tools:
        found, faults = start_tools(
            [functions.get(name, name) for name in config.tools],
            workers=config.tool_workers,
            timeout_s=config.tool_timeout_s,
            memory_gb=config.tool_memory_gb,
            max_result_chars=_MOST_CHARS,
        )
    environment = None
    if config.environment_factory is not None:
        environment, more = start_environments(
            functions.get(config.environment_factory, config.environment_factory),
            places=config.max_environments,
            timeout_s=config.tool_timeout_s,
            max_result_chars=_MOST_CHARS,
        )
        faults = [*faults, *more]
    tools = ToolFacts(
        faults=tuple(faults),
        names=tuple(found.schemas) if found is not None else (),
        gives_reward=None if environment is None else environment.has_step or environment.has_reward,
    )
    read = None if codec is None else format_or_reason(codec)
    form = read if isinstance(read, CallFormat) else None
    needs_format = bool(config.tools) or (environment is not None and not environment.has_step)
    if form is not None:
        tools = replace(tools, call_format=form.name)
    elif isinstance(read, NoFormat) and codec is not None and needs_format:
        is_chatml = all(codec.tokenizer.token_to_id(mark) is not None for mark in _CHATML)
        tools = replace(tools, no_format=read.kind, written=read.written, may_be_chatml=is_chatml)
    facts = replace(facts, tools=tools)
    if faults or tools.no_format or codec is None:
        for host in (found, environment):
            if host is not None:
                host.close()
        return facts, None
    return facts, Agents(
        renderer=Renderer(codec, calls_alike(codec, form)),
        limits=TurnLimits(
            max_tokens=config.max_completion_length,
            is_per_turn=config.is_limited_by_turn,
            max_turns=config.max_turns,
            max_tool_rounds=config.max_tool_calling_iterations,
            max_result_tokens=config.max_tool_response_length,
            context=facts.model.context,
        ),
        format=form,
        tools=found,
        environment=environment,
        starts_differ=config.environment_starts == "differ",
        keys=count(),
    )


def with_rehearsal(
    facts: Facts,
    config: Config,
    prompt: Prompt | None,
    codec: TextCodec | None,
    agents: Agents | None,
    rewards: RewardSet | None,
) -> Facts:
    """Return the facts with what scripted policies showed on a prompt. One process plays them for all."""
    if prompt is None or codec is None or agents is None or rewards is None or not config.reward_trial:
        return facts
    if os.environ.get("RANK", "0") != "0" or TRIAL in os.environ or rewards.apart:
        return facts
    from covey.checks.tools.rehearsal import rehearse

    gold = gold_text(prompt.columns, config)
    found = rehearse(prompt, gold or None, codec, agents, rewards, config.weights)
    return replace(facts, tools=replace(facts.tools, rehearsal=found))
