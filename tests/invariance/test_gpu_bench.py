"""The correctness part of bench/gpu.py, small and on a CPU: it passes, and it can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from covey.models import attention

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from on_gpu.correct import family_findings


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_every_way_to_compute_agrees(family: str) -> None:
    findings = list(family_findings(family, small=True))
    assert {f.dtype for f in findings} == {torch.float32, torch.bfloat16}
    ways = {f.way for f in findings}
    assert {"chunked head", "padded", "prefix, sdpa", "packed, eager", "prefix, sdpa, selective"} <= ways
    assert [f.line() for f in findings if not f.passed] == []


def test_a_broken_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_first_key(query, key, value, bias, options):
        assert bias is not None
        is_first = (bias == 0).cumsum(-1) == 1
        return attention.attend_masked(query, key, value, bias.masked_fill(is_first, float("-inf")), options)

    monkeypatch.setattr(attention, "attend_eager", forgets_the_first_key)
    monkeypatch.setattr("covey.models.layouts.attend_eager", forgets_the_first_key)
    monkeypatch.setattr(attention, "attend_masked", attention.attend_masked)
    findings = [f for f in family_findings("mistral", small=True) if f.dtype == torch.float32]
    ways = {"prefix, eager", "prefix, eager, passes", "packed, eager"}
    assert {f.way for f in findings if not f.passed} == ways
