"""Everything that the checks ask about, looked at once, and what was read to learn it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from covey.checks.data.look import Data, with_data
from covey.checks.model.look import fetch_model, model_dir, stand_in_codec, with_model
from covey.checks.objects.look import NO_OBJECTS, Objects
from covey.checks.rewards.golds import with_golds
from covey.checks.rewards.look import with_rewards
from covey.checks.rollout_function.look import with_rollout_function
from covey.checks.run.look import run_facts, with_image_packages, with_layout
from covey.checks.run.replay import with_replay
from covey.checks.servers.look import with_servers
from covey.checks.tools.look import with_rehearsal, with_tools
from covey.data.image_records import NO_ROWS, ImageRows
from covey.data.rows import PromptTable
from covey.data.stream import PromptStream
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.options.schema import Config
from covey.plan.engine_share import with_engine_share
from covey.plan.facts import Facts
from covey.plan.layout import Machine
from covey.rewards.reward_set import RewardSet

__all__ = ["Survey", "fetch_model", "model_dir", "survey"]

if TYPE_CHECKING:
    from covey.models.live import LiveModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The facts, and what was read to learn them; a part is None where it could not be had.

    `live` is the model where a program has given the object. Prompts come as a table, or as a stream.
    Rewards, tools and environments (`agents`) have processes of their own: `close` ends them. `rollout_func`
    makes the episodes of this process itself. `images` are
    the rows in which images lie that a checkpoint or a record names.
    """

    facts: Facts
    live: LiveModel | None = None
    codec: TextCodec | None = None
    prompts: PromptTable | None = None
    stream: PromptStream | None = None
    eval_sets: tuple[tuple[str, PromptTable], ...] = ()
    rewards: RewardSet | None = None
    agents: Agents | None = None
    rollout_func: Callable[..., Any] | None = None
    images: ImageRows = NO_ROWS

    def close(self) -> None:
        """End the processes of rewards, tools and environments."""
        for part in (self.rewards, self.agents):
            if part is not None:
                part.close()

    def __enter__(self) -> Survey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def survey(
    config: Config,
    num_processes: int,
    *,
    offline: bool = False,
    objects: Objects = NO_OBJECTS,
    machine: Machine | None = None,
    adapter: Path | None = None,
) -> Survey:
    """Look at machine, model, data and rewards; a part that cannot be read leaves its facts unknown.

    With `offline` it is for a plan alone: no hub and no server is asked. `objects` are what the configuration
    names and this process holds. `machine` takes the place of this one. `adapter`
    is one that is evaluated on the model; that of a run the configuration names.
    """
    facts = run_facts(config, num_processes)
    facts = with_layout(facts, config, machine)
    if not offline:
        facts = with_servers(facts, config)
    facts = replace(facts, launch=replace(facts.launch, objects=objects.names))
    facts, codec = with_model(facts, config, offline=offline, live=objects.model, adapter=adapter)
    if codec is not None and codec.vision is not None:
        facts = with_image_packages(facts, config)
    if config.replay_rollouts is not None:
        facts, images = with_replay(facts, config, num_processes, codec, objects.rows, offline=offline)
        return Survey(facts=facts, live=objects.model, codec=codec, images=images)
    facts, agents = with_tools(facts, config, codec, objects.functions)
    facts, rollout_func = with_rollout_function(facts, config, objects.functions)
    tools = () if agents is None else agents.schemas
    if codec is None:
        facts, data = _with_data_alone(facts, config, objects, offline=offline)
    else:
        facts, data = with_data(facts, config, codec, offline=offline, live=objects.rows, tools=tools)
    facts = with_golds(facts, config, data.sample, data.eval_sets)
    environment = None if agents is None else agents.environment
    facts, rewards = with_rewards(
        facts, config, data.sample, objects.functions, offline=offline, environments=environment
    )
    if agents is not None and environment is not None and rewards is not None and rewards.beside:
        environment.keep_all()
        agents = replace(agents, keeps_environments=True)
    first = data.sample.entries[0] if data.sample is not None and data.sample.entries else None
    facts = with_rehearsal(facts, config, first, codec, agents, rewards)
    return Survey(
        facts=with_engine_share(facts, config),
        live=objects.model,
        codec=codec,
        prompts=data.prompts,
        stream=data.stream,
        eval_sets=data.eval_sets,
        rewards=rewards,
        agents=agents,
        rollout_func=rollout_func,
        images=data.images,
    )


def _with_data_alone(facts: Facts, config: Config, objects: Objects, *, offline: bool) -> tuple[Facts, Data]:
    """The facts of the data where the model has no tokenizer or no template that could be used: the built-in
    one takes its place, and nothing is said of lengths and of what prompts look like."""
    facts, stand_in = stand_in_codec(facts, config)
    given = facts
    unlimited = config.model_copy(update={"max_length": None})
    unknown = replace(facts, model=replace(facts.model, context=None))
    facts, data = with_data(unknown, unlimited, stand_in, offline=offline, live=objects.rows)
    facts = replace(
        facts,
        model=replace(facts.model, context=given.model.context),
        template=replace(facts.template, problem=given.template.problem, details=given.template.details),
        prompts=replace(
            facts.prompts,
            longest=None,
            longest_in_data=None,
            num_too_long=None,
            first=None,
            mention_format=None,
            most_patches=0,
            image_tokens=None,
        ),
    )
    return facts, data
