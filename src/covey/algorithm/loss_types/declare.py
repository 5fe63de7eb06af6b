"""How a loss is declared: all that others must know of it stands in its entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import Terms
    from covey.options.schema import Config
    from covey.types import Fix


class Average(Enum):
    """Name the divisor of a token's term in the loss of an optimizer step. Masked completions count as
    completions; their tokens do not count."""

    EPISODE = "tokens of its completion x completions"
    EPISODES = "completions"
    LENGTH = "completions x max_completion_length"
    TOKENS = "tokens of the step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Options of a run that a loss does not go with: the fields of the problem that the plan reports."""

    code: str
    option: str
    seen: str
    cause: str
    fixes: tuple[Fix, ...]


def refuse_nothing(config: Config) -> Iterable[Refusal]:
    """Return no refusal."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Declares a loss of `--loss_type`; a variable of a file in this package that holds one registers it.

    name             the value of the option; `place` orders the names, those without one come last
    summary          what it does, as `--help` says it behind the name
    average          what the terms of its tokens are divided by
    term             the policy term (N,) of each token, before masks and the average; or
    share            what a micro-batch adds to the loss as a whole; then there are no terms and no masks
    options          the options that are read for this loss and not for every other one
    ignores          options of all losses that it does not read
    value_at_1       where every ratio is 1 the term is this times the advantage; None: it depends on more
    derivative_at_1  where every ratio is 1 its derivative by the token's logprob is this times the
                     advantage; None: it depends on more, and no second gradient is compared
    cap              the default of epsilon_high, where that is the largest ratio itself
    of_sequences     it is defined with the ratio of the sequence (importance_sampling_level sequence) alone
    by_group         it compares the completions of a group with each other (`Contrast`), so each optimizer
                     step needs whole groups
    takes_weights    the term takes in the weights of a rollout correction itself
    sums_of_sequences  metrics among its `Terms.sums` that add up sequences; all others add up tokens
    per_completion   why it does not go with one advantage for each step of a completion; empty: it does
    refuses          what else of a configuration it does not go with
    """

    name: str
    summary: str
    average: Average
    term: Callable[[Terms], Tensor] | None = None
    share: Callable[[Terms], Tensor] | None = None
    place: int = 1000
    options: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    value_at_1: float | None = None
    derivative_at_1: float | None = -1.0
    cap: float | None = None
    of_sequences: bool = False
    by_group: bool = False
    takes_weights: bool = False
    sums_of_sequences: tuple[str, ...] = ()
    per_completion: str = ""
    refuses: Callable[[Config], Iterable[Refusal]] = refuse_nothing

    @property
    def is_clipped(self) -> bool:
        """Whether it clips the ratio, at distances of epsilon and epsilon_high from 1."""
        return "epsilon" in self.options

    @property
    def averages_tokens(self) -> bool:
        """Whether a long completion weighs more than a short one with the same ratios."""
        return self.average in (Average.LENGTH, Average.TOKENS)
