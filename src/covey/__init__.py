"""covey: reinforcement learning of language models with GRPO.

`from covey import train` gives the command as a function: `train(model="DIR", dataset="FILE.jsonl",
reward_funcs=["accuracy"])`. Importing covey imports no torch; the functions do when they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.training.run import Outcome

__all__ = ["train"]


def train(**options: Any) -> Outcome:
    """Train with the options of `covey train`, by the same names; returns where the run ended.

    Raises ConfigError with every problem of the options before anything is written.
    """
    from covey.config.resolve import from_dict
    from covey.training.run import train as run

    return run(from_dict(options))
