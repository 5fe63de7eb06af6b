"""A reference that follows the policy: the means by hand, float32 below bfloat16, an adapter's factors."""

from __future__ import annotations

import pytest
import torch

from covey.batching.pack import pack
from covey.learner.backends.single import SingleBackend
from covey.learner.optimizer import Masters
from covey.learner.reference import MovingReference
from covey.models.adapter_shapes import LoraSettings
from covey.models.lora import adapter_parameters, add_adapter
from covey.models.policy import Policy
from support.options import algorithm
from support.steps import CASES, OPTIMIZER, for_case, plan_of, policy, rows

BF16, FP32 = torch.bfloat16, torch.float32


def annotated(backend, micro, which):
    return backend.annotate([micro], which, lambda: None)


def filled(value: float) -> Policy:
    """A policy all of whose weights are one number."""
    found = policy("prefix")
    set_to(found.parameters(), value)
    return found


@torch.no_grad()
def set_to(tensors, value: float) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def follows(every: int, alpha: float):
    """A reference that follows the policy every so many steps."""
    return algorithm(sync_ref_model=True, ref_model_sync_steps=every, ref_model_mixup_alpha=alpha)


def full(dtype: torch.dtype = FP32, *, every: int = 3, alpha: float = 0.6, start: float = 0.0):
    """The moving reference of a policy with weights 1, and the masters; both began as `start`."""
    own, reference = filled(start), filled(start)
    moving = MovingReference(own, reference, follows(every, alpha), dtype=dtype)
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(dtype)
    masters = Masters.of(own, OPTIMIZER, dtype)
    set_to(masters.masters, 1.0)
    return moving, masters, reference


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_three_syncs_by_hand(dtype):
    """Policy 1, 2, 0 at the syncs: 0.6; 0.6 x 2 + 0.4 x 0.6 = 1.44; 0.4 x 1.44 = 0.576."""
    moving, masters, reference = full(dtype)
    policies = {3: 1.0, 6: 2.0, 9: 0.0}
    wanted = {3: 0.6, 6: 1.44, 9: 0.576}
    now = 0.0
    for step in range(1, 10):
        if step in policies:
            set_to(masters.masters, policies[step])
        assert moving.move(step, masters.each()) == (step in policies)
        now = wanted.get(step, now)
        assert moving.last_sync(step) == step // 3 * 3
        exact = torch.tensor(now)
        for tensor in moving.state().values():
            torch.testing.assert_close(tensor, exact.expand_as(tensor), rtol=1e-6, atol=0.0)
        for parameter in reference.parameters():
            assert parameter.dtype == dtype
            torch.testing.assert_close(parameter.data, exact.to(dtype).expand_as(parameter))


def test_a_copy_is_exact():
    """At alpha 1 the reference has the policy's very bits, in what it computes with too."""
    moving, masters, reference = full(BF16, every=1, alpha=1.0, start=0.3)
    with torch.no_grad():
        for master in masters.masters:
            master.copy_(torch.randn_like(master))
    moving.move(1, masters.each())
    for master, (name, parameter) in zip(masters.masters, reference.named_parameters(), strict=True):
        assert torch.equal(moving.state()[name], master)
        assert torch.equal(parameter, master.to(BF16))


def test_small_moves_add_up_below_bfloat16():
    """A hundred moves of a thousandth make 1 - 0.999^100 = 0.0952 of the way from 1 to 2; in bfloat16 each is
    rounded away."""
    moving, masters, reference = full(BF16, every=1, alpha=1e-3, start=1.0)
    set_to(masters.masters, 2.0)
    alone = torch.ones(1, dtype=BF16)
    for step in range(1, 101):
        moving.move(step, masters.each())
        alone = alone + 1e-3 * (2.0 - alone)
    assert alone == 1.0
    held = next(iter(moving.state().values()))
    assert float(held.flatten()[0]) == pytest.approx(2 - 0.999**100, rel=1e-5)
    assert float(next(reference.parameters()).detach().flatten()[0]) == pytest.approx(1.0952, abs=0.004)


# -- adapters ------------------------------------------------------------------------------------------------

LORA = LoraSettings(rank=3, alpha=6)
DORA = LoraSettings(rank=3, alpha=6, use_dora=True)


def adapted(dtype=FP32, *, alpha=0.6, settings=LORA):
    own = policy("prefix")
    add_adapter(own, settings, seed=0, compute_dtype=dtype)
    moving = MovingReference(own, None, follows(1, alpha), dtype=dtype)
    backend = SingleBackend(own, OPTIMIZER, compute_dtype=dtype, moving=moving)
    return own, moving, backend


def shake(backend, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master in backend.masters.masters:
            master += 0.05 * torch.randn(master.shape, generator=generator)
    backend.masters._write_back()


def micro_of():
    (batch,) = pack(for_case(rows(), CASES["dapo, token"]), plan_of(), 0)
    return batch.micro_batches[0]


def test_the_mean_of_factors_and_what_it_lacks():
    """a BA + (1 - a) B'A' - (aB + (1 - a) B')(aA + (1 - a) A') = a (1 - a) (B - B')(A - A')."""
    _, moving, backend = adapted(alpha=0.3)
    before = {}
    for seed in range(3):
        before = {n: t.clone() for n, t in moving.state().items()}
        shake(backend, seed)
        assert backend.move_reference(1)
    after = moving.state()
    now = dict(zip(backend.masters.names, backend.masters.masters, strict=True))
    pairs = [n for n in now if ".lora_A." in n]
    assert pairs
    for name in pairs:
        a, other = now[name].double(), name.replace(".lora_A.", ".lora_B.")
        b = now[other].double()
        old_a, old_b = before[name].double(), before[other].double()
        mean = 0.3 * b @ a + 0.7 * old_b @ old_a
        found = after[other].double() @ after[name].double()
        lacking = 0.3 * 0.7 * (b - old_b) @ (a - old_a)
        assert bool(lacking.norm() > 1e-3 * mean.norm())
        torch.testing.assert_close(mean - found, lacking, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("settings", [LORA, DORA], ids=["lora", "dora"])
def test_an_adapter_of_its_own(settings, dtype):
    """It starts as the base; after a copy it is the policy, to the bit; looking at it changes nothing."""
    own, moving, backend = adapted(dtype, alpha=1.0, settings=settings)
    micro = micro_of()
    first = annotated(backend, micro, "old")
    assert torch.equal(annotated(backend, micro, "reference"), first)
    shake(backend)
    kept = {n: p.detach().clone() for n, p in own.named_parameters()}
    assert torch.equal(annotated(backend, micro, "reference"), first)
    assert own.training and all(torch.equal(p, kept[n]) for n, p in own.named_parameters())
    policy_now = annotated(backend, micro, "old")
    assert not torch.equal(policy_now, first)
    backend.move_reference(1)
    assert torch.equal(annotated(backend, micro, "reference"), policy_now)
    assert set(moving.state()) == set(backend.masters.names)


def test_dropout_is_none_of_the_reference():
    """An adapter that drops inputs while it trains gives one answer as a reference."""
    _, _, backend = adapted(settings=LoraSettings(rank=3, alpha=6, dropout=0.5))
    shake(backend)
    backend.move_reference(1)
    micro = micro_of()
    assert not torch.equal(annotated(backend, micro, "old"), annotated(backend, micro, "old"))
    assert torch.equal(annotated(backend, micro, "reference"), annotated(backend, micro, "reference"))


def test_whole_copies_move_too():
    """modules_to_save compute in bfloat16 and are kept in float32."""
    settings = LoraSettings(rank=3, alpha=6, modules_to_save=("norm",))
    own, moving, backend = adapted(BF16, alpha=0.5, settings=settings)
    whole = [n for n in moving.state() if n not in adapter_parameters(own)]
    assert whole
    start = {n: moving.state()[n].clone() for n in whole}
    shake(backend)
    backend.move_reference(1)
    now = dict(zip(backend.masters.names, backend.masters.masters, strict=True))
    for name in whole:
        torch.testing.assert_close(moving.state()[name], 0.5 * (start[name] + now[name]))
        low = moving.tensors()[f"{name} as it computes"]
        assert low.dtype == BF16 and torch.equal(low, moving.state()[name].to(BF16))
