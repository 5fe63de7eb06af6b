"""Holds the facts that checks read of tools and environments."""

from __future__ import annotations

from dataclasses import dataclass

from covey.types.turns import ToolFault


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPolicy:
    """Records how a scripted policy did: the reward of its first episode (None: no value), its outcome, and
    what it did; `seconds` are those of tools and environment."""

    name: str
    reward: float | None
    outcome: str
    num_turns: int
    num_calls: int
    num_failed_calls: int
    num_sequences: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Records how scripted policies did with the tools, environment, template and rewards of a run.

    `starts_alike` says whether all episodes began with the same prompt (None: none began), `lost` why an
    environment failed, and `rewritten` which policies needed several sequences, because the template writes
    earlier turns in another way. `sample` is an episode as text, each trained turn between ⟦ and ⟧.
    """

    policies: tuple[RehearsedPolicy, ...] = ()
    starts_alike: bool | None = None
    lost: str = ""
    rewritten: tuple[str, ...] = ()
    sample: str = ""

    def reward_of(self, name: str) -> float | None:
        """Return the reward of a policy; None where it has none."""
        return next((policy.reward for policy in self.policies if policy.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """Holds the facts about the tools and the environment of a run.

    faults        what stands against some of them
    names         the tools in order
    call_format   the format in which the chat template writes calls; empty where none is known
    no_format     why none is known: "no_tools", "no_calls" or "unknown_format"; empty where one is, or where
                  no tool needs one
    written       what the template wrote of a call where its format is unknown
    may_be_chatml whether `chatml-tools` fits the tokenizer
    gives_reward  whether the environment may give rewards
    rehearsal     what scripted policies showed; None where nothing was played
    rollout_func  what stands against the rollout function
    """

    faults: tuple[ToolFault, ...] = ()
    names: tuple[str, ...] = ()
    call_format: str = ""
    no_format: str = ""
    written: str = ""
    may_be_chatml: bool = False
    gives_reward: bool | None = None
    rehearsal: Rehearsal | None = None
    rollout_func: ToolFault | None = None
