"""The carriers: what one stage of the data flow hands to the next.

Every type is frozen, slotted and built by keyword. A stage that learns a new fact builds the next type; no
field is filled in later.
"""

from covey.types.episode import (
    Completion,
    Episode,
    Finish,
    Outcome,
    SequenceSummary,
    Source,
    TokenSequence,
)
from covey.types.kept import KeptSets
from covey.types.media import MediaTokens, Medium
from covey.types.messages import (
    Finding,
    Fix,
    Problem,
    Severity,
)
from covey.types.requests import EpisodeId, GenerationRequest, SamplingParams, TurnId
from covey.types.rewards import (
    GOLD_COLUMNS,
    GOLD_KEYS,
    GOLD_NAMES,
    BlindReward,
    FaultKind,
    RewardCause,
    RewardFault,
)
from covey.types.rollout import (
    Group,
    Origin,
    Prompt,
    Receipt,
    Score,
    ScoredGroup,
    ScorePart,
    Status,
    StepSpans,
)
from covey.types.training import (
    AnnotatedSample,
    Batch,
    Denominators,
    GradientMatch,
    KeptTokens,
    Metric,
    MicroBatch,
    Sample,
    SharedPrompt,
    StepRecord,
    StepResult,
    StepStats,
    StreamSegment,
    TokenStats,
    TrainSample,
)
from covey.types.turns import CallFailure, ToolCall, ToolResult, Turn

__all__ = [
    "GOLD_COLUMNS",
    "GOLD_KEYS",
    "GOLD_NAMES",
    "AnnotatedSample",
    "Batch",
    "BlindReward",
    "CallFailure",
    "Completion",
    "Denominators",
    "Episode",
    "EpisodeId",
    "FaultKind",
    "Finding",
    "Finish",
    "Fix",
    "GenerationRequest",
    "GradientMatch",
    "Group",
    "KeptSets",
    "KeptTokens",
    "MediaTokens",
    "Medium",
    "Metric",
    "MicroBatch",
    "Origin",
    "Outcome",
    "Problem",
    "Prompt",
    "Receipt",
    "RewardCause",
    "RewardFault",
    "Sample",
    "SamplingParams",
    "Score",
    "ScorePart",
    "ScoredGroup",
    "SequenceSummary",
    "Severity",
    "SharedPrompt",
    "Source",
    "Status",
    "StepRecord",
    "StepResult",
    "StepSpans",
    "StepStats",
    "StreamSegment",
    "TokenSequence",
    "TokenStats",
    "ToolCall",
    "ToolResult",
    "TrainSample",
    "Turn",
    "TurnId",
]
