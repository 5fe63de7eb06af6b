"""Holds the facts that checks read of the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from covey.types import BlindReward, RewardFault


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLists:
    """Lists in a gold column that may be alternatives or parts of one answer: `num_open` of `num_lists` have
    members that are different letters, numbers or formulas.

    `is_decided` is whether the other lists of the column show that all are alternatives. `where` is the set
    to evaluate on, "" for the data to train on, and `task` a task that is looked at by itself. `example` is
    the first of them, in `row`, counted from 1.
    """

    column: str
    num_lists: int
    num_open: int
    row: int
    example: str
    is_decided: bool = False
    where: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldFacts:
    """What the gold answers are: how many were read, how many were not, and the first of those as (row
    number from 1, text, reason).

    rename          columns under other names, old to new, with which nearly all can be read; or None
    num_lists       golds that are lists of several members, in the sets to evaluate on, too
    num_named       golds that are objects with several answers, which are alternatives by their keys
    open_lists      the columns of which nobody has said what their lists are, and where many do not show it
    """

    num_checked: int
    num_bad: int
    examples: tuple[tuple[int, str, str], ...] = ()
    rename: Mapping[str, str] | None = None
    num_lists: int = 0
    num_named: int = 0
    open_lists: tuple[OpenLists, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFacts:
    """How programs of completions are shut off here: the layers that lack, none where they may run, why
    each way that was tried is not open, and whether bubblewrap is installed."""

    lacks: tuple[str, ...] = ()
    is_installed: bool = True
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelFacts:
    """A reward model as it was typed, and what its files say of it.

    name          the name of its metric
    directory     where its files lie, "" where they cannot be had
    problem       why its logit is no reward, and `fault` what kind of thing it is instead; or None
    parameters    weights
    file_bytes    bytes of the files that hold them
    hidden        width of a layer's output, and `intermediate` that of its MLP
    context       positions, None where nobody says
    has_template  whether it brings a chat template
    is_here       whether its weights are on this machine
    """

    entry: str
    name: str
    directory: str = ""
    problem: str | None = None
    fault: str = ""
    parameters: int = 0
    file_bytes: int = 0
    hidden: int = 0
    intermediate: int = 0
    context: int | None = None
    has_template: bool = False
    is_here: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFacts:
    """What is wrong with what the reward judge is told, in words: its prompt and its pattern; and the names
    in the prompt that nothing has a value for."""

    prompt_problem: str | None = None
    regex_problem: str | None = None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFacts:
    """Holds the facts of the rewards.

    available    every name that `reward_funcs` may hold
    options      options that only a built-in reward reads, by its name
    golds        what the gold answers are, where a reward needs them
    sandbox      how programs of completions are shut off, where a reward runs them
    code_tests   what their tests are: as golds, with the reasons that one cannot be run
    models       the models among the rewards
    judge        what the reward judge is told, where a run asks for it
    faulty       rewards that cannot be loaded, called, or that failed their trial
    blind        rewards that read a gold column and do not tell its answers from others
    process      those that gave one number per step in their trial
    reads_steps  whether a reward does, or names the steps; None: not known without a trial
    names        the names of the rewards in metrics, in order
    notes        what is to be said of the rewards
    texts        (entry, digest) of what is written of each reward that is a function
    """

    available: tuple[str, ...] | None = None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    golds: GoldFacts | None = None
    sandbox: SandboxFacts | None = None
    code_tests: GoldFacts | None = None
    models: tuple[RewardModelFacts, ...] = ()
    judge: JudgeFacts | None = None
    faulty: tuple[RewardFault, ...] = ()
    blind: tuple[BlindReward, ...] = ()
    process: tuple[str, ...] = ()
    reads_steps: bool | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
