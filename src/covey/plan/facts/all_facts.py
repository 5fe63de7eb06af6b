"""Everything that the checks need to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from covey.plan.facts.data import DataFacts, PromptFacts, TaskFacts
from covey.plan.facts.model import LoraFacts, ModelFacts, TemplateFacts
from covey.plan.facts.rewards import RewardFacts
from covey.plan.facts.run import LaunchFacts, MachineFacts, OutputFacts
from covey.plan.facts.servers import ServersFacts
from covey.plan.facts.tools import ToolFacts
from covey.plan.layout import THIS_MACHINE, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Holds the facts of a run by subject. None means that a fact is not known, and a check that needs it is
    silent. Lengths are tokens.

    `layout` says which devices there are, and how model and engine lie on them.
    """

    model: ModelFacts = field(default_factory=ModelFacts)
    template: TemplateFacts = field(default_factory=TemplateFacts)
    lora: LoraFacts = field(default_factory=LoraFacts)
    data: DataFacts = field(default_factory=DataFacts)
    prompts: PromptFacts = field(default_factory=PromptFacts)
    tasks: TaskFacts = field(default_factory=TaskFacts)
    rewards: RewardFacts = field(default_factory=RewardFacts)
    tools: ToolFacts = field(default_factory=ToolFacts)
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    layout: Layout = THIS_MACHINE
    servers: ServersFacts = field(default_factory=ServersFacts)
    output: OutputFacts = field(default_factory=OutputFacts)
