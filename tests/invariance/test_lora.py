"""With an adapter too, a step does not depend on how it is cut, and an unchanged policy has a KL of zero.

Proven on replayed rollouts as in test_split: the adapter's gradients of two steps and what five AdamW steps
moved, for (B, A) = (8, 1), (4, 2), (2, 4), (1, 8) in one process and (4, 1), (2, 2) in two. The reference is
the policy with the adapter off, so the KL is exactly zero before the first update, in bfloat16 too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from covey.selftest.compare import far
from support.exactness import TENSOR, assert_same_steps, moved, norm
from support.models import save_model
from support.runs import (
    Result,
    options,
    train_and_watch,
    train_in_processes,
    write_rollouts,
)

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "whole": {"modules_to_save": ["lm_head"]},
    "named": {"target_modules": ["q_proj", "down_proj"]},
}
SPLITS = ((4, 2), (2, 4), (1, 8))
# Below what the replayed completions hold, so that the token budget of a forward pass really cuts the step.
BUDGET = {"max_completion_length": 8}
# A's first gradients are small, some elements below AdamW's usual 1e-8: there it turns rounding into steps.
ADAM = {"adam_epsilon": 1e-5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("replay"))


def lora(model: Path, output: Path, replay: Path, kind: str = "lora", **changes: Any) -> dict[str, Any]:
    """Options of a LoRA run with a KL term."""
    adapter = {"tuner_type": "lora", "lora_rank": 4, "lora_alpha": 8, **KINDS[kind]}
    return options(model, output, replay, beta=0.04, **adapter, **{**BUDGET, **ADAM, **changes})


@pytest.fixture(scope="module")
def whole(model: Path, replay: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The reference: every kind with the step in one forward pass."""
    root = tmp_path_factory.mktemp("whole")
    return {kind: train_and_watch(lora(model, root / kind, replay, kind)) for kind in KINDS}


def assert_same(actual: Result, expected: Result) -> None:
    """Equal gradients at the first step, equal updates after five, and a KL that starts at exactly zero."""
    # The first gradient is that of B alone; the second has A's too.
    assert_same_steps(actual, expected, (TENSOR, 1e-3))
    assert norm(moved(expected)) > 0
    assert actual.metrics[0]["kl"] == expected.metrics[0]["kl"] == 0.0
    assert actual.metrics[-1]["kl"] == pytest.approx(expected.metrics[-1]["kl"], rel=1e-3)
    assert len(actual.metrics) == len(expected.metrics) == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_one_process(
    kind: str, split: tuple[int, int], model: Path, replay: Path, whole: dict[str, Result], tmp_path: Path
) -> None:
    batch, accumulation = split
    result = train_and_watch(
        lora(
            model,
            tmp_path / "run",
            replay,
            kind,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
    )
    assert_same(result, whole[kind])
    assert set(whole[kind].forwards) == {1}
    assert min(result.forwards) >= {4: 2, 2: 3, 1: 4}[batch]


@pytest.mark.slow
@pytest.mark.multi
def test_two_processes(model: Path, replay: Path, whole: dict[str, Result], tmp_path: Path) -> None:
    cases = [(kind, split) for kind in KINDS for split in ((4, 1), (2, 2))]
    runs = [
        lora(
            model,
            tmp_path / f"run{i}",
            replay,
            kind,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        for i, (kind, (batch, accumulation)) in enumerate(cases)
    ]
    for (kind, _), result in zip(cases, train_in_processes(runs, tmp_path / "work"), strict=True):
        assert_same(result, whole[kind])


def test_only_the_adapter_is_trained(whole: dict[str, Result]) -> None:
    for kind, result in whole.items():
        names = list(result.gradients[0])
        assert all(".lora_" in n or (kind == "whole" and ".lm_head." in n) for n in names)
        # At the first step B is zero, so A alone has no gradient; at the second all have one.
        for name in names:
            assert bool(result.gradients[0][name].any()) == (".lora_A." not in name), name
            assert result.gradients[1][name].any(), name


def test_kinds_differ(whole: dict[str, Result]) -> None:
    """The comparison is not blind: scaling by rsLoRA is another gradient."""
    assert far(whole["rslora"].gradients[0], whole["lora"].gradients[0]) > 0.1


@pytest.mark.parametrize("kind", ["lora", "dora", "whole"])
def test_bfloat16_starts_at_zero_and_learns_in_float32(
    kind: str, model: Path, replay: Path, tmp_path: Path
) -> None:
    result = train_and_watch(lora(model, tmp_path / "run", replay, kind, torch_dtype="bfloat16"))
    assert result.metrics[0]["kl"] == 0.0
    assert result.metrics[-1]["kl"] > 0.0
    assert {t.dtype for t in result.after.values()} == {torch.float32}


def test_the_checkpoint_is_an_adapter(model: Path, replay: Path, tmp_path: Path) -> None:
    result = train_and_watch(lora(model, tmp_path / "run", replay, save_steps=5))
    saved = load_file(tmp_path / "run" / "checkpoint-5" / "adapter_model.safetensors")
    assert len(saved) == len(result.after)
    for name, tensor in saved.items():
        stem = name.removeprefix("base_model.model.").removesuffix(".weight")
        (held,) = [t for n, t in result.after.items() if stem in n]
        assert torch.equal(tensor, held)
