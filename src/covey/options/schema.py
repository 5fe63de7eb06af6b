"""The options of a run.

One flat, frozen class of the groups in this folder. A `rule` says what an option becomes when nobody types it
and its value follows from others; such an option has no default here, so a `Config` always holds the values
that the run uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.options.algorithm import AlgorithmOptions
from covey.options.data import DataOptions
from covey.options.declare import Facts, Options, facts_of
from covey.options.devices import DeviceOptions
from covey.options.model import ModelOptions, QuantizationOptions, TunerOptions
from covey.options.output import EvaluationOptions, OutputOptions
from covey.options.reward import RewardOptions
from covey.options.rollout import BatchOptions, SamplingOptions
from covey.options.servers import ServerOptions
from covey.options.training import OptimizerOptions, RunOptions
from covey.options.turns import TurnOptions
from covey.options.vllm import VllmOptions

_GROUPS: Mapping[str, type[Options]] = {
    "model": ModelOptions,
    "tuner": TunerOptions,
    "quantization": QuantizationOptions,
    "data": DataOptions,
    "reward": RewardOptions,
    "batch": BatchOptions,
    "sampling": SamplingOptions,
    "turns": TurnOptions,
    "algorithm": AlgorithmOptions,
    "optimizer": OptimizerOptions,
    "run": RunOptions,
    "evaluation": EvaluationOptions,
    "output": OutputOptions,
    "devices": DeviceOptions,
    "servers": ServerOptions,
    "vllm": VllmOptions,
}

GROUPS: Mapping[str, str] = {
    name: (group.__doc__ or "").partition("\n")[0].rstrip(".") for name, group in _GROUPS.items()
}
"""The sections of config.yaml and of `--help`, in order, each with its heading."""


class LearnerOptions(DeviceOptions, OptimizerOptions):
    """Groups what a backend reads: how AdamW steps, and what waits in CPU memory."""


class CreditOptions(AlgorithmOptions, RewardOptions):
    """Groups what makes advantages of rewards: how they are compared, and the weight of each."""


# pydantic takes the fields of the last base first.
class Config(
    VllmOptions,
    ServerOptions,
    LearnerOptions,
    DeviceOptions,
    OutputOptions,
    EvaluationOptions,
    RunOptions,
    OptimizerOptions,
    CreditOptions,
    AlgorithmOptions,
    TurnOptions,
    SamplingOptions,
    BatchOptions,
    RewardOptions,
    DataOptions,
    QuantizationOptions,
    TunerOptions,
    ModelOptions,
):
    """Every option of a run, resolved; `covey.config.from_dict` and `resolve` build one.

    Unknown names are refused. Lengths are tokens, batch sizes are completions, sizes on disk are GB (1e9
    bytes).
    """

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of an episode behind its prompt, results of tools included."""
        own, turns = self.max_completion_length, self.max_turns
        if not self.is_limited_by_turn or turns is None:
            return own
        return turns * own + (turns - 1) * (self.max_tool_response_length or 0)

    @property
    def most_sampled(self) -> int:
        """Return the most tokens that the model may sample in an episode."""
        return self.max_completion_length * (self.max_turns or 1 if self.is_limited_by_turn else 1)


OPTIONS: tuple[str, ...] = tuple(Config.model_fields)
"""Every option name, in the order of the groups."""

FACTS: Mapping[str, Facts] = facts_of(Config)
"""What is declared of each option beside its type, its default and its help text."""

REQUIRED: tuple[str, ...] = ("model", "dataset", "reward_funcs")
"""What has neither a default nor a rule."""

DERIVED: tuple[str, ...] = tuple(
    name for name, field in Config.model_fields.items() if field.is_required() and name not in REQUIRED
)
"""What follows from other options when it is not typed."""

_GROUP_OF = {name: key for key, group in _GROUPS.items() for name in group.model_fields}


def group_of(name: str) -> str:
    """Return the group that an option is shown and written under."""
    return _GROUP_OF[name]


def rule_of(name: str) -> str:
    """Return the words for how an option follows from others; empty where it has a plain default."""
    return FACTS[name].rule


def doc_of(name: str) -> str:
    """Return the help text of an option."""
    return Config.model_fields[name].description or ""


def default_of(name: str) -> Any:
    """Return the default of an option; None for those that are required or derived."""
    field = Config.model_fields[name]
    return None if field.is_required() else field.default
