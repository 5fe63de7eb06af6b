"""Facts about tools and environments: whether they load, and how the chat template writes calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from covey.checks.rewards.golds import gold_text
from covey.checks.rewards.handed import TRIAL
from covey.checks.tools.scheduler import started
from covey.data.text import TextCodec
from covey.environments.agents import Agents, TurnLimits
from covey.environments.call_format import CallFormat
from covey.environments.protocol import EnvironmentHost, ToolHost
from covey.environments.rendering import Renderer, calls_alike
from covey.environments.template_calls import NoFormat, format_or_reason
from covey.options.schema import Config
from covey.plan.facts import Facts, ToolFacts
from covey.rewards.reward_set import RewardSet
from covey.texts import joined, tr
from covey.types import Prompt
from covey.types.turns import ToolFault

# A longer result is cut: it would take seconds to tokenise, and megabytes of the records.
_MOST_CHARS = 100_000
_REWARD = "environment"
_CHATML = ("<|im_start|>", "<|im_end|>")


def with_tools(
    facts: Facts, config: Config, codec: TextCodec | None, functions: Mapping[str, Any]
) -> tuple[Facts, Agents | None]:
    """Return the facts with those of tools and environment, and what runs them, ready for episodes; None
    where there are none, or something stands against them."""
    if not config.has_turns or config.replay_rollouts is not None:
        return facts, None
    found, environment, faults = _started(config, facts, functions)
    of_environment = () if environment is None else environment.schemas
    schemas = (*(() if found is None else found.schemas.values()), *of_environment)
    tools = ToolFacts(
        faults=tuple(faults),
        names=tuple(schema["function"]["name"] for schema in schemas),
        gives_reward=None if environment is None else _gives_reward(environment, config),
    )
    form = None
    if codec is not None:
        is_needed = bool(config.tools) or (environment is not None and environment.has_tools)
        form, tools = _with_format(tools, codec, is_needed=is_needed)
    facts = replace(facts, tools=tools)
    if faults or tools.no_format or codec is None:
        for host in (found, environment):
            if host is not None:
                host.close()
        return facts, None
    return facts, agents_of(config, codec, form, facts.model.context, found, environment)


def agents_of(
    config: Config,
    codec: TextCodec,
    form: CallFormat | None,
    context: int | None,
    tools: ToolHost | None,
    environment: EnvironmentHost | None,
) -> Agents:
    """Return what runs tools and environment within the limits of a run, whose model holds `context`
    tokens."""
    return Agents(
        renderer=Renderer(codec, calls_alike(codec, form)),
        limits=TurnLimits(
            max_tokens=config.max_completion_length,
            is_per_turn=config.is_limited_by_turn,
            max_turns=config.max_turns,
            max_tool_rounds=config.max_tool_calling_iterations,
            max_result_tokens=config.max_tool_response_length,
            context=context,
            trains_last=config.loss_scale == "last_round",
        ),
        format=form,
        tools=tools,
        environment=environment,
        starts_differ=config.environment_starts == "differ",
        keys=count(),
    )


def _gives_reward(environment: EnvironmentHost, config: Config) -> bool:
    if environment.keeps_history:
        return _REWARD in config.reward_funcs
    return environment.has_step or environment.has_reward


def _started(
    config: Config, facts: Facts, functions: Mapping[str, Any]
) -> tuple[ToolHost | None, EnvironmentHost | None, list[ToolFault]]:
    """Start what runs the tools and the environments, and return all that is wrong with them."""
    # Runs without tools do not wait for these.
    from covey.environments.environment_host import start_environments
    from covey.environments.tools import start_tools

    tools: ToolHost | None = None
    environment: EnvironmentHost | None = None
    faults: list[ToolFault] = []
    if config.multi_turn_scheduler is not None:
        return (None, *started(config, facts))
    if config.tools:
        tools, faults = start_tools(
            [functions.get(name, name) for name in config.tools],
            workers=config.tool_workers,
            timeout_s=config.tool_timeout_s,
            memory_gb=config.tool_memory_gb,
            max_result_chars=_MOST_CHARS,
        )
    if config.environment_factory is not None:
        environment, more = start_environments(
            functions.get(config.environment_factory, config.environment_factory),
            places=config.max_environments,
            timeout_s=config.tool_timeout_s,
            max_result_chars=_MOST_CHARS,
        )
        faults = [*faults, *more]
    if tools is not None and environment is not None:
        own = {schema["function"]["name"] for schema in environment.schemas}
        if names := sorted(own & tools.schemas.keys()):
            words = tr("its methods and --tools have the same names: {names}", names=joined(", ", names))
            faults.append(ToolFault(entry=str(config.environment_factory), kind="signature", words=words))
    return tools, environment, faults


def _with_format(
    tools: ToolFacts, codec: TextCodec, *, is_needed: bool
) -> tuple[CallFormat | None, ToolFacts]:
    """Return the format in which the template writes calls, and the facts with it, or why it has none."""
    read = format_or_reason(codec)
    if not isinstance(read, NoFormat):
        return read, replace(tools, call_format=read.name)
    if not is_needed:
        return None, tools
    is_chatml = all(codec.tokenizer.token_to_id(mark) is not None for mark in _CHATML)
    return None, replace(tools, no_format=read.kind, written=read.written, may_be_chatml=is_chatml)


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
    if facts.prompts.are_text:
        # They are refused, and an environment would be given none.
        return facts
    from covey.checks.tools.rehearsal import rehearse

    gold = gold_text(prompt.columns, config)
    found = rehearse(prompt, gold or None, codec, agents, rewards, config.weights)
    return replace(facts, tools=replace(facts.tools, rehearsal=found))
