"""The self test passes on a sound covey, and each planted fault fails the rows that are about it, and no
other."""

from __future__ import annotations

import itertools
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft.tuners.lora import layer as lora_layer

from covey import token_streams
from covey.algorithm import losses
from covey.algorithm.loss_types import clipped
from covey.algorithm.loss_types.registry import LOSSES as LOSS_TYPES
from covey.algorithm.losses import LossInputs, LossType
from covey.batching import pack
from covey.kernels.cpu.head import CompiledDerivatives, CompiledSoftmax
from covey.kernels.torch_.head import TorchDerivatives, TorchSoftmax
from covey.learner.backends.single import SingleBackend
from covey.models.policy import Policy
from covey.rollout.native import engine
from covey.rollout.native.rows import RowState
from covey.selftest import checks as selftest_checks
from covey.selftest.bounds import BOUNDS
from covey.selftest.checks import checks
from covey.selftest.compare import far
from covey.selftest.subject import (
    Subject,
    backend_of,
    loss_of,
    off_policy,
    plan_of,
    rows_of,
    sample,
    subject,
    write_random_model,
)
from covey.training.state import OptimizerState

SAMPLER = {name for name in BOUNDS if name.startswith("sampler")}
LOSSES = {f"loss {loss_type}: gradient" for loss_type in get_args(LossType)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory)
    return directory


def failed(model: Path) -> set[str]:
    """The names of the rows that say FAIL; every row is there, in order."""
    rows = list(checks(subject(torch.device("cpu"), model, is_built_in=True)))
    assert [row.name for row in rows] == list(BOUNDS)
    return {row.name for row in rows if row.failed}


def test_all_pass_and_zeros_are_zeros(model: Path) -> None:
    rows = list(checks(subject(torch.device("cpu"), model, is_built_in=True)))
    assert [row.name for row in rows if row.failed] == []
    exact = {name for name, bound in BOUNDS.items() if bound.cpu == 0.0}
    # What is computed in two ways differs in its last bits, or it was not computed in two ways.
    assert {row.name for row in rows if row.value == 0.0} == exact


def one_back(plain: Any) -> Any:
    def shifted(*arguments: Any) -> Any:
        parts = plain(*arguments)
        return replace(parts, predictors=[(p - 1).clip(0) for p in parts.predictors])

    return shifted


def wrong_predictor_packed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_streams, "_packed", one_back(token_streams._packed))


def wrong_predictor_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(token_streams, "_shared", one_back(token_streams._shared))


def lost_micro_batch(patch: pytest.MonkeyPatch) -> None:
    plain = pack.micro_batches
    patch.setattr(pack, "micro_batches", lambda *a: (found := plain(*a))[: max(1, len(found) - 1)])


def wrong_normaliser(patch: pytest.MonkeyPatch) -> None:
    """A block of the vocabulary that forgets the mass of the one before it."""
    plain, compiled = TorchSoftmax.add, CompiledSoftmax.add

    def add(self: Any, *arguments: Any) -> None:
        self._mass = torch.zeros_like(self._mass)
        plain(self, *arguments)

    def add_compiled(self: Any, *arguments: Any) -> None:
        self._sums_3C[1] = 0.0
        compiled(self, *arguments)

    patch.setattr(TorchSoftmax, "add", add)
    patch.setattr(CompiledSoftmax, "add", add_compiled)


def _times(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Of the head in blocks every gradient, in torch and in C."""
    for way in (TorchDerivatives, CompiledDerivatives):
        patch.setattr(way, "of", lambda *a, plain=way.of: factor * plain(*a))


def doubled_gradient(patch: pytest.MonkeyPatch) -> None:
    _times(patch, 2.0)


def wrong_temperature(patch: pytest.MonkeyPatch) -> None:
    plain = RowState.of

    def of(*arguments: Any) -> RowState:
        draws = plain(*arguments)
        draws.temperature_n = 4.0 * draws.temperature_n
        return draws

    patch.setattr(RowState, "of", of)


def wrong_annotation(which: str, by: float) -> Any:
    """Far enough off to be seen where it has to be 0, and not elsewhere."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = SingleBackend.annotate

        def annotate(self: SingleBackend, micros: Any, asked: Any, advance: Any) -> Any:
            return plain(self, micros, asked, advance) + (by if asked == which else 0.0)

        patch.setattr(SingleBackend, "annotate", annotate)

    return plant


def fresh_noise(patch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    patch.setattr(engine, "row_key", lambda key: next(numbers))


def noisy_gradient(patch: pytest.MonkeyPatch) -> None:
    """Noise far below every bound but that of what has to be the same to the bit; a resume takes its
    generator along."""
    plain = SingleBackend.backward

    def backward(self: SingleBackend, *arguments: Any, **more: Any) -> Any:
        found = plain(self, *arguments, **more)
        for master in self.masters.masters:
            if master.grad is not None:
                master.grad *= 1.0 + 1e-7 * torch.randn_like(master.grad)
        return found

    patch.setattr(SingleBackend, "backward", backward)


def lost_optimizer_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OptimizerState, "load_shards", lambda self, saved: None)


def no_gradient(patch: pytest.MonkeyPatch) -> None:
    _times(patch, 0.0)


def denominator_of_a_pass(patch: pytest.MonkeyPatch) -> None:
    """Each forward pass divides by its own completions, which is the mistake of losses that are averaged."""
    plain = losses.token_weights

    def weights(inputs: LossInputs, loss_type: LossType) -> torch.Tensor:
        if loss_type == "grpo":
            own = replace(inputs.denominators, num_episodes=len(inputs.trained_count_S))
            inputs = replace(inputs, denominators=own)
        return plain(inputs, loss_type)

    patch.setattr(losses, "token_weights", weights)


def clip_of_a_pass(patch: pytest.MonkeyPatch) -> None:
    """The clip depends on what else is in the forward pass: only what is off its policy shows it."""
    plain = clipped.clipped_objective

    def shifted(ratio: torch.Tensor, advantage: torch.Tensor, low: float, *bounds: Any) -> torch.Tensor:
        return plain(ratio, advantage, low + 1e-2 * len(ratio), *bounds)

    patch.setattr(clipped, "clipped_objective", shifted)


def adapter_by_width(patch: pytest.MonkeyPatch) -> None:
    """An adapter whose update depends on the shape of a forward pass."""
    plain = lora_layer.Linear.forward

    def forward(self: Any, x: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        base = self.base_layer(x)
        return base + (plain(self, x, *arguments, **more) - base) * (
            1.0 + 1e-3 * x.shape[0] + 1e-5 * x.shape[1]
        )

    patch.setattr(lora_layer.Linear, "forward", forward)


FAULTS = (
    (wrong_predictor_packed, {"packing: gradient"}),
    (wrong_predictor_shared, {"prompt sharing: gradient", "LoRA, prompt sharing: gradient"}),
    (lost_micro_batch, {"micro-batches: gradient", "LoRA, micro-batches: gradient", *LOSSES}),
    (denominator_of_a_pass, {"loss grpo: gradient"}),
    (clip_of_a_pass, {f"loss {name}: gradient" for name, loss in LOSS_TYPES.items() if loss.is_clipped}),
    (adapter_by_width, {"LoRA, micro-batches: gradient", "LoRA, prompt sharing: gradient"}),
    (wrong_normaliser, {"head in blocks: logprobs", "head in blocks: gradient"}),
    (doubled_gradient, {"head in blocks: gradient"}),
    (no_gradient, {name for name in BOUNDS if name.endswith("gradient")} | {"resume: weights"}),
    (wrong_temperature, SAMPLER),
    (wrong_annotation("old", 1e-6), {"on-policy: ratio - 1"}),
    (wrong_annotation("reference", 1e-3), {"unchanged reference: KL"}),
    (fresh_noise, {"determinism: tokens that differ"}),
    (noisy_gradient, {"determinism: gradient"}),
    (lost_optimizer_state, {"resume: weights"}),
)


@pytest.mark.parametrize(("plant", "expected"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_a_fault_fails_its_row(
    plant: Any, expected: set[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert failed(model) == expected


def test_every_loss_is_there() -> None:
    """The option's values, the losses that there are, and the rows are the same."""
    assert {name for name in BOUNDS if name.startswith("loss ")} == LOSSES


def test_the_losses_are_tried_where_they_differ(model: Path) -> None:
    """Off the policy on both sides of the clip, in several forward passes, with a KL to add."""
    tested = subject(torch.device("cpu"), model, is_built_in=True)
    backend = backend_of(tested.policy())
    groups = sample(backend, tested)[:2]
    backend.policy.use_stream("padded")
    plan = plan_of(backend.policy, rows=8)
    rows = off_policy(rows_of(groups, backend, plan, old=True, reference=False))
    (batch,) = pack.pack(rows, plan, rollout=0)
    (micro,) = batch.micro_batches
    assert micro.old_logprob_N is not None and micro.ref_logprob_N is not None
    ratio = torch.exp(backend.policy(micro).logprob_N.detach() - micro.old_logprob_N)
    loss = loss_of("grpo")
    assert loss.beta > 0 and not torch.equal(micro.ref_logprob_N, micro.old_logprob_N)
    assert ((ratio < 1 - loss.epsilon) & (micro.advantage_N < 0)).any()
    assert ((ratio > 1 + loss.epsilon_high) & (micro.advantage_N > 0)).any()
    (cut,) = pack.pack(rows, plan_of(backend.policy, rows=8, max_tokens=64), rollout=0)
    assert len(cut.micro_batches) > 2 and len({m.num_rows for m in cut.micro_batches}) > 1


def test_every_row_has_failed() -> None:
    assert set().union(*(expected for _, expected in FAULTS)) == BOUNDS.keys()


def test_a_device_without_bfloat16(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_checks, "has_bfloat16", lambda device: False)
    rows = list(checks(subject(torch.device("cpu"), model, is_built_in=True)))
    assert [row.name for row in rows] == list(BOUNDS)
    assert {row.name for row in rows if row.unused} == {n for n in SAMPLER if "bfloat16" in n}
    assert not any(row.failed for row in rows)


def test_one_model_at_a_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing keeps the first copy alive while the resumed run, which needs the most memory, is made."""
    alive: weakref.WeakSet[Policy] = weakref.WeakSet()
    plain = Subject.policy

    def watched(self: Subject, directory: Path | None = None) -> Policy:
        policy = plain(self, directory)
        alive.add(policy)
        return policy

    def count(*arguments: Any) -> float:
        return float(len(alive))

    monkeypatch.setattr(Subject, "policy", watched)
    monkeypatch.setattr(selftest_checks, "_resume", count)
    *_, resume = checks(subject(torch.device("cpu"), model, is_built_in=False))
    assert (resume.name, resume.value) == ("resume: weights", 0.0)


def test_how_far_tensors_are_apart() -> None:
    a = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([4.0])}
    b = {name: 1.1 * tensor for name, tensor in a.items()}
    assert far(a, a) == 0.0
    assert far(b, a) == pytest.approx(0.1, rel=1e-5)
    assert far({n: -t for n, t in a.items()}, a) == 2.0
    zeros = {name: torch.zeros_like(tensor) for name, tensor in a.items()}
    assert far(zeros, a) == 1.0
    # What is lost in both ways agrees with itself, and is no proof.
    assert math.isnan(far(zeros, zeros))
