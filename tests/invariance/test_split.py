"""The gradient of a step does not depend on how the step is cut.

Proven on replayed rollouts of 8 completions with ragged lengths, an invalid (fully masked) row, a truncated
and masked one, and unequal work per rank: the same rollout as (B, A) = (8, 1), (4, 2), (2, 4), (1, 8), in one
process and, for two processes, as (4, 1) and (2, 2). The rewards, tokens and sampler logprobs are fixed;
weights are random. What is compared is the gradient of the first step, and the weights after five AdamW steps
relative to what they moved.

Not proven here: bfloat16, where another split changes single logprobs by up to 1 %.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.selftest.compare import far
from support.exactness import LOSS, assert_same_steps, assert_sees
from support.models import save_model
from support.runs import (
    Result,
    options,
    train_and_watch,
    train_in_processes,
    write_rollouts,
)

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
SPLITS = ((4, 2), (2, 4), (1, 8))
# Below what the replayed completions hold, so that the token budget of a forward pass really cuts the step.
BUDGET = {"max_completion_length": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def whole(model: Path, replay: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The reference: every loss with the step in one forward pass."""
    root = tmp_path_factory.mktemp("whole")
    runs = {loss: options(model, root / loss, replay, loss_type=loss, **BUDGET) for loss in LOSSES}
    return {loss: train_and_watch(run) for loss, run in runs.items()}


def assert_same(actual: Result, expected: Result) -> None:
    """Equal gradients at the first step, equal updates after five, equal losses at the first."""
    assert_same_steps(actual, expected)
    assert actual.metrics[0]["loss"] == pytest.approx(expected.metrics[0]["loss"], abs=LOSS)
    assert len(actual.metrics) == len(expected.metrics) == 5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_one_process(
    loss: str, split: tuple[int, int], model: Path, replay: Path, whole: dict[str, Result], tmp_path: Path
) -> None:
    batch, accumulation = split
    opts = options(
        model,
        tmp_path / "run",
        replay,
        loss_type=loss,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **BUDGET,
    )
    result = train_and_watch(opts)
    assert_same(result, whole[loss])
    # The step really is cut: in one forward pass of the reference, in more and more here.
    assert set(whole[loss].forwards) == {1}
    assert min(result.forwards) >= {4: 2, 2: 3, 1: 4}[batch]


@pytest.mark.slow
@pytest.mark.multi
def test_two_processes(model: Path, replay: Path, whole: dict[str, Result], tmp_path: Path) -> None:
    cases = [(loss, split) for loss in LOSSES for split in ((4, 1), (2, 2))]
    runs = [
        options(
            model,
            tmp_path / f"run{i}",
            replay,
            loss_type=loss,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            **BUDGET,
        )
        for i, (loss, (batch, accumulation)) in enumerate(cases)
    ]
    results = train_in_processes(runs, tmp_path / "work")
    for (loss, (batch, _)), result in zip(cases, results, strict=True):
        assert_same(result, whole[loss])
        # The rank with the short completions takes part in as many forward passes as the other one.
        assert min(result.forwards) >= {4: 1, 2: 2}[batch]


def test_losses_differ(whole: dict[str, Result]) -> None:
    """The comparison is not blind: another loss, but for bnpo and dapo, is another gradient."""
    for first, second in (("grpo", "dapo"), ("dr_grpo", "dapo"), ("grpo", "dr_grpo")):
        assert far(whole[first].gradients[0], whole[second].gradients[0]) > 1e-2
    assert far(whole["bnpo"].gradients[0], whole["dapo"].gradients[0]) == 0.0


def test_the_comparison_sees_what_is_wrong(whole: dict[str, Result]) -> None:
    assert_sees(assert_same, whole["dapo"])
