"""Holds the facts that checks read of tools and environments."""

from __future__ import annotations

from dataclasses import dataclass

from covey.types.turns import ToolFault


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFacts:
    """What is known of the tools and the environment of a run.

    faults        what stands against some of them
    names         the tools in order
    call_format   the format in which the chat template writes calls; empty where none is known
    no_format     why none is known: "no_tools", "no_calls" or "unknown_format"; empty where one is, or where
                  no tool needs one
    written       what the template wrote of a call where its format is unknown
    may_be_chatml whether `chatml-tools` fits the tokenizer
    gives_reward  whether the environment may give rewards
    """

    faults: tuple[ToolFault, ...] = ()
    names: tuple[str, ...] = ()
    call_format: str = ""
    no_format: str = ""
    written: str = ""
    may_be_chatml: bool = False
    gives_reward: bool | None = None
