"""Runs of random models around real tokenizers: log-probabilities are those of transformers."""

from __future__ import annotations

import pytest

from support.real import NAMES, around
from support.real_runs import check_logprobs, train


@pytest.mark.parametrize("name", [n for n in NAMES if n != "smollm2"])
def test_a_run_around_a_real_tokenizer(name, data, tmp_path):
    model = around(name, tmp_path / "model")
    run = train(model, data, tmp_path / "run", learning_rate=1e-3)
    check_logprobs(run, model)
