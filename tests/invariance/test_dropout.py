"""With dropout on, each forward pass gives a token another probability: no check takes that for a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.exactness import moved, norm
from support.runs import options, train_and_watch

LORA = {"tuner_type": "lora", "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.3}


@pytest.mark.parametrize(
    "changes", [{}, {"num_iterations": 2, "beta": 0.1}], ids=["plain", "old and reference"]
)
def test_a_run_with_dropout_goes_on(changes: dict[str, Any], tmp_path: Path) -> None:
    asked = {"disable_dropout": False, "learning_rate": 1e-3, "max_steps": 4, "max_completion_length": 16}
    sizes = {"num_generations": 8, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    result = train_and_watch(
        options(Path("quickstart"), tmp_path / "run", **asked, **sizes, **LORA, **changes)
    )
    assert len(result.metrics) == 4
    assert norm(moved(result)) > 0
    # The sampler's model drops nothing; rounding explains less than a hundredth of this.
    assert max(line["sampling/sampling_logp_difference/mean"] for line in result.metrics) > 1e-3
