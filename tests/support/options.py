"""Groups of options as parts of a run take them; what is not given has its default."""

from __future__ import annotations

from typing import Any

from covey.config import from_dict
from covey.options.algorithm import AlgorithmOptions
from covey.options.schema import CreditOptions, LearnerOptions


def learner(**changes: Any) -> LearnerOptions:
    """Return the options of a backend; tests that step give the learning rate to the step."""
    return LearnerOptions(**{"learning_rate": 1e-6, **changes})


def algorithm(**changes: Any) -> AlgorithmOptions:
    """Return the options of the algorithm."""
    return AlgorithmOptions(**{"scale_rewards": "group", "epsilon_high": 0.28, **changes})


def credit(**changes: Any) -> CreditOptions:
    """Return the options of advantages, for one reward where no others are given."""
    return from_dict({"model": "m", "dataset": "d", "reward_funcs": ["accuracy"], **changes}, 1).config
