"""Holds the facts that checks read of the machine, the model and the data; gathered elsewhere, so that checks
stay pure."""

from covey.plan.facts.all_facts import Facts
from covey.plan.facts.data import (
    DataFacts,
    DataProblem,
    EvalSet,
    HubProblem,
    LeftOut,
    MissingColumn,
    PassRateFacts,
    PromptFacts,
    TaskFacts,
    UnreadableFile,
)
from covey.plan.facts.model import (
    AdapterFacts,
    FaultDetails,
    LoraFacts,
    ModelFacts,
    ModelFault,
    ModelSizes,
    TargetFacts,
    TemplateFacts,
)
from covey.plan.facts.rewards import (
    GoldFacts,
    JudgeFacts,
    OpenLists,
    RewardFacts,
    RewardModelFacts,
    SandboxFacts,
)
from covey.plan.facts.run import (
    LaunchFacts,
    MachineFacts,
    OutputDirState,
    OutputFacts,
    RayFacts,
    ResumeFacts,
    RunOwner,
)
from covey.plan.facts.servers import ServerFacts, ServersFacts, VllmServeFacts
from covey.plan.facts.tools import Rehearsal, RehearsedPolicy, ToolFacts

__all__ = [
    "AdapterFacts",
    "DataFacts",
    "DataProblem",
    "EvalSet",
    "Facts",
    "FaultDetails",
    "GoldFacts",
    "HubProblem",
    "JudgeFacts",
    "LaunchFacts",
    "LeftOut",
    "LoraFacts",
    "MachineFacts",
    "MissingColumn",
    "ModelFacts",
    "ModelFault",
    "ModelSizes",
    "OpenLists",
    "OutputDirState",
    "OutputFacts",
    "PassRateFacts",
    "PromptFacts",
    "RayFacts",
    "Rehearsal",
    "RehearsedPolicy",
    "ResumeFacts",
    "RewardFacts",
    "RewardModelFacts",
    "RunOwner",
    "SandboxFacts",
    "ServerFacts",
    "ServersFacts",
    "TargetFacts",
    "TaskFacts",
    "TemplateFacts",
    "ToolFacts",
    "UnreadableFile",
    "VllmServeFacts",
]
