"""What the checks need to know of the machine, the model and the data; gathered elsewhere, so that checks
stay pure."""

from covey.plan.facts.all_facts import Facts
from covey.plan.facts.data import (
    DataProblem,
    EvalSet,
    HubProblem,
    LeftOut,
    MissingColumn,
    PassRateFacts,
    UnreadableFile,
)
from covey.plan.facts.model import AdapterFacts, FaultDetails, ModelFault, ModelSizes, TargetFacts
from covey.plan.facts.rewards import (
    GoldFacts,
    JudgeFacts,
    OpenLists,
    RewardModelFacts,
    SandboxFacts,
)
from covey.plan.facts.run import OutputDirState, RayFacts, ResumeFacts, RunOwner
from covey.plan.facts.servers import ServerFacts, VllmServeFacts

__all__ = [
    "AdapterFacts",
    "DataProblem",
    "EvalSet",
    "Facts",
    "FaultDetails",
    "GoldFacts",
    "HubProblem",
    "JudgeFacts",
    "LeftOut",
    "MissingColumn",
    "ModelFault",
    "ModelSizes",
    "OpenLists",
    "OutputDirState",
    "PassRateFacts",
    "RayFacts",
    "ResumeFacts",
    "RewardModelFacts",
    "RunOwner",
    "SandboxFacts",
    "ServerFacts",
    "TargetFacts",
    "UnreadableFile",
    "VllmServeFacts",
]
