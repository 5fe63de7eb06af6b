"""Groups of options as parts of a run take them; what is not given has its default."""

from __future__ import annotations

from typing import Any

from covey.options.schema import LearnerOptions


def learner(**changes: Any) -> LearnerOptions:
    """Return the options of a backend; tests that step give the learning rate to the step."""
    return LearnerOptions(**{"learning_rate": 1e-6, **changes})
