"""Three steps of each kind of run on a real model: log-probabilities and weights.

The log-probabilities of every sampled token are compared with those of transformers' own forward pass of the
weights that sampled it: of the model for the first rollout, of checkpoint-2 for the last. So a checkpoint is
what sampled.
"""

from __future__ import annotations

from typing import Any

import pytest

from journeys.helpers import metrics
from support.real import real
from support.real_runs import check_logprobs, train

VARIANTS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "torch kernels": {"kernels": "torch"},
    "reference and clipping": {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 1},
    "LoRA": {"tuner_type": "lora", "learning_rate": 1e-3},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logprobs_are_those_of_transformers(name, data, tmp_path):
    model = real("smollm2")
    run = train(model, data, tmp_path / "run", torch_dtype="float32", **VARIANTS[name])
    check_logprobs(run, model)
    assert all(line["grad_norm"] > 0 for line in metrics(run))
