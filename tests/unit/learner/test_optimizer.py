"""Float32 masters: exact sums, AdamW by hand, clipping, refusal of what is not finite, exact resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from covey.learner.optimizer import Masters, NonFiniteGradient
from covey.selftest.compare import relative
from support.options import learner

CONFIG = learner(max_grad_norm=0.0)
BF16, FP32 = torch.bfloat16, torch.float32


class Two(nn.Module):
    """A matrix, a vector, and a frozen parameter."""

    def __init__(self, seed: int = 0, width: int = 24) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, 8, generator=g))
        self.bias = nn.Parameter(torch.randn(width, generator=g))
        self.frozen = nn.Parameter(torch.randn(3, generator=g), requires_grad=False)

    def push(self, *gradients: torch.Tensor) -> None:
        """A backward pass that leaves exactly these gradients."""
        pairs = zip((self.weight, self.bias), gradients, strict=True)
        sum((p * g.to(p.dtype)).sum() for p, g in pairs).backward()


def random_gradients(seed: int, width: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    # Around 1, so that accumulators grow and later gradients lose bits against them.
    return 1.0 + torch.randn(width, 8, generator=g), 1.0 + torch.randn(width, generator=g)


def test_thirty_two_bfloat16_gradients_are_summed_in_float32(assert_close_guarded):
    module, plain = Two(), Two().to(BF16)
    masters = Masters.of(module, CONFIG, compute_dtype=BF16)
    assert module.weight.dtype == module.bias.dtype == BF16
    exact = torch.zeros(24, 8, dtype=torch.float64)
    for micro in range(32):
        gradients = [g.to(BF16) for g in random_gradients(micro)]
        exact += gradients[0].double()
        module.push(*gradients)
        masters.absorb()
        assert module.weight.grad is None
        plain.push(*gradients)
    summed = masters.gradients()
    assert summed.keys() == {"weight", "bias"}
    assert summed["weight"].dtype == FP32
    assert relative(summed["weight"], exact) < 1e-6
    assert_close_guarded(summed["weight"], exact, rtol=1e-6)
    # What the accumulator is there for: bfloat16's own `.grad` is a thousand times further off.
    assert relative(plain.weight.grad, exact) > 1e-3


def test_low_gradients_are_absorbed_as_they_come():
    module, other = Two(), Two()
    masters, others = (Masters.of(m, CONFIG, compute_dtype=BF16) for m in (module, other))
    held: list[int] = []
    for parameter in masters.params:
        parameter.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in masters.params))
        )
    for micro in range(3):
        with masters.absorbing():
            module.push(*random_gradients(micro))
        other.push(*random_gradients(micro))
        others.absorb()
        # Hooks of before are called first: the one gradient that has come is there, and no other.
        assert held == [1, 1]
        held.clear()
    assert all(p.grad is None for p in masters.params)
    expected = others.gradients()
    assert all(torch.equal(g, expected[n]) for n, g in masters.gradients().items())
    module.push(*random_gradients(0))
    assert all(p.grad is not None for p in masters.params)


def test_float32_parameters_are_their_own_masters():
    module = Two()
    masters = Masters.of(module, CONFIG)
    assert [m is p for m, p in zip(masters.masters, (module.weight, module.bias), strict=True)] == [
        True,
        True,
    ]
    for micro in range(2):
        module.push(*random_gradients(micro))
        masters.absorb()
    expected = random_gradients(0)[0] + random_gradients(1)[0]
    assert torch.equal(masters.gradients()["weight"], expected)


def test_gradients_of_an_untouched_module_are_zeros():
    gradients = Masters.of(Two(), CONFIG).gradients()
    assert {name: int(g.count_nonzero()) for name, g in gradients.items()} == {"weight": 0, "bias": 0}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_masters_keep_what_the_compute_dtype_cannot(dtype):
    module = Two()
    before = module.weight.detach().clone()
    masters = Masters.of(module, CONFIG, compute_dtype=dtype)
    assert torch.equal(masters.masters[0], before)
    # Steps of 1e-6 are below half a bfloat16 spacing of nearly every weight, yet all of them add up in the
    # master.
    for _ in range(10):
        module.push(torch.ones(24, 8), torch.ones(24))
        masters.absorb()
        stats = masters.step(1e-6)
    moved = masters.masters[0].detach() - before
    assert float(moved.mean()) == pytest.approx(-1e-5, rel=0.01)
    assert stats.frac_params_changed > 0.9
    assert module.weight.dtype == dtype
    assert torch.equal(module.weight, masters.masters[0].to(dtype))
    assert torch.equal(module.frozen, Two().frozen.to(dtype))


def test_weights_must_come_in_float32():
    with pytest.raises(AssertionError, match="float32"):
        Masters.of(Two().to(BF16), CONFIG, compute_dtype=BF16)


def test_a_named_parameter_stays_float32_beside_others_that_do_not():
    # As with LoRA: an adapter of float32, a whole copy in the compute dtype, and a frozen base.
    module = Two()
    before = module.weight.detach().clone(), module.bias.detach().clone()
    masters = Masters.of(module, CONFIG, compute_dtype=BF16, float32={"weight"})
    assert (module.weight.dtype, module.bias.dtype, module.frozen.dtype) == (FP32, BF16, BF16)
    assert [m is p for m, p in zip(masters.masters, masters.params, strict=True)] == [True, False]
    for micro in range(2):
        module.push(*random_gradients(micro))
        masters.absorb()
    # A float32 parameter gathers its gradient itself.
    assert module.weight.grad is not None and module.bias.grad is None
    summed = masters.gradients()
    first, second = random_gradients(0), random_gradients(1)
    assert torch.equal(summed["weight"], first[0] + second[0])
    assert torch.equal(summed["bias"], first[1].to(BF16).float() + second[1].to(BF16).float())
    masters.step(1e-6)
    assert not torch.equal(module.weight, before[0])
    assert not torch.equal(masters.masters[1], before[1])
    assert torch.equal(module.bias, masters.masters[1].to(BF16))
    moments = {f"{k}/{n}" for k in ("step", "exp_avg", "exp_avg_sq") for n in ("weight", "bias")}
    assert masters.state().keys() == moments | {"master/bias"}


def test_a_restored_run_of_mixed_dtypes_goes_on_bit_for_bit():
    config = learner(weight_decay=0.1)
    one, two = Two(), Two(seed=5)
    masters = Masters.of(one, config, compute_dtype=BF16, float32={"weight"})
    train(one, masters, range(3))
    # A saved model has the float32 parameter exactly and the other one rounded.
    two.load_state_dict({k: v.float().clone() for k, v in one.state_dict().items()})
    restored = Masters.of(two, config, compute_dtype=BF16, float32={"weight"})
    restored.load_state({k: v.clone() for k, v in masters.state().items()})
    assert train(one, masters, range(3, 6)) == train(two, restored, range(3, 6))
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())


def test_low_gradients_alone_are_dropped():
    module = Two()
    masters = Masters.of(module, CONFIG, compute_dtype=BF16, float32={"weight"})
    module.push(*random_gradients(0))
    masters.drop_low_gradients()
    assert module.bias.grad is None and torch.equal(module.weight.grad, random_gradients(0)[0])


# -- a step ------------------------------------------------------------------------------------------------


def test_the_first_step_by_hand(assert_close_guarded):
    # After one step AdamW's moments are (1 - b1) g and (1 - b2) g^2, and their bias corrections undo the
    # factors: each weight moves by lr g / (|g| + eps), against its gradient's sign. Decay takes lr x 0.5 of
    # a matrix beforehand.
    module = Two()
    weight, bias = module.weight.detach().double(), module.bias.detach().double()
    masters = Masters.of(module, learner(weight_decay=0.5, max_grad_norm=0.0))
    gradients = random_gradients(1)
    module.push(*gradients)
    stats = masters.step(0.01)
    signs = [g.double() / (g.double().abs() + 1e-8) for g in gradients]
    assert_close_guarded(module.weight.detach(), weight * (1 - 0.01 * 0.5) - 0.01 * signs[0], rtol=1e-6)
    assert_close_guarded(module.bias.detach(), bias - 0.01 * signs[1], rtol=1e-6)
    norm = float(torch.cat([g.flatten() for g in gradients]).double().norm())
    assert stats.grad_norm == stats.grad_norm_clipped == pytest.approx(norm, rel=1e-6)
    assert stats.learning_rate == 0.01
    assert stats.frac_params_changed == 1.0
    change = torch.cat([(module.weight - weight).flatten(), module.bias - bias]).detach()
    before = torch.cat([weight.flatten(), bias])
    assert stats.update_ratio == pytest.approx(float(change.norm() / before.norm()), rel=1e-4)


@pytest.mark.parametrize(("limit", "clipped", "factor"), [(1.0, 1.0, 0.2), (10.0, 5.0, 1.0), (0.0, 5.0, 1.0)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_clipping(limit, clipped, factor, dtype, assert_close_guarded):
    # Gradients 3 and 4 have norm 5 over the whole module; limit 0 is no clipping.
    module = Two(width=1)
    masters = Masters.of(module, learner(max_grad_norm=limit), compute_dtype=dtype)
    weight = torch.zeros(1, 8)
    weight[0, 5] = 3.0
    module.push(weight, torch.tensor([4.0]))
    masters.absorb()
    stats = masters.step(0.0)
    assert stats.grad_norm == pytest.approx(5.0)
    assert stats.grad_norm_clipped == pytest.approx(clipped)
    # The first moment is a tenth of the gradient that was stepped with.
    state = masters.state()
    assert_close_guarded(state["exp_avg/bias"], [0.1 * 4.0 * factor], rtol=1e-5)
    assert_close_guarded(state["exp_avg/weight"], 0.1 * weight * factor, rtol=1e-5)


def test_a_step_clears_the_gradient():
    module = Two()
    masters = Masters.of(module, CONFIG)
    module.push(*random_gradients(0))
    masters.step(1e-3)
    assert module.weight.grad is None
    assert masters.gradients()["weight"].count_nonzero() == 0


def test_a_learning_rate_of_zero_changes_nothing_but_the_moments():
    module = Two()
    before = module.weight.detach().clone()
    masters = Masters.of(module, learner(weight_decay=0.1, max_grad_norm=0.0))
    module.push(*random_gradients(0))
    stats = masters.step(0.0)
    assert torch.equal(module.weight, before)
    assert (stats.update_ratio, stats.frac_params_changed) == (0.0, 0.0)
    assert masters.state()["exp_avg/weight"].count_nonzero() > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_gradient_that_is_not_finite_leaves_everything(bad, dtype):
    module = Two()
    masters = Masters.of(module, learner(weight_decay=0.1), compute_dtype=dtype)
    module.push(*random_gradients(0))
    masters.absorb()
    masters.step(1e-3)
    weights = [p.detach().clone() for p in (*module.parameters(), *masters.masters)]
    state = {k: v.clone() for k, v in masters.state().items()}
    weight, bias = random_gradients(1)
    weight[3, 2] = bad
    module.push(weight, bias)
    masters.absorb()
    with pytest.raises(NonFiniteGradient, match=r"nan|inf"):
        masters.step(1e-3)
    assert all(
        torch.equal(p, w) for p, w in zip((*module.parameters(), *masters.masters), weights, strict=True)
    )
    assert all(torch.equal(v, state[k]) for k, v in masters.state().items())


@pytest.mark.parametrize("watched", [7, 1 << 16])
def test_the_watched_share_is_spread_over_the_module(watched, monkeypatch):
    monkeypatch.setattr("covey.learner.optimizer._WATCHED", watched)
    module = Two()
    masters = Masters.of(module, CONFIG)
    module.push(torch.ones(24, 8), torch.zeros(24))
    stats = masters.step(1e-2)
    # The matrix holds 192 of 216 elements and every one moves; the vector's zero gradient moves none.
    assert stats.frac_params_changed == pytest.approx(192 / 216, abs=0.12)
    assert 0 < stats.update_ratio < 0.1


def test_one_parameter_alone_is_watched():
    module = nn.Linear(4, 1, bias=False)
    masters = Masters.of(module, CONFIG)
    module(torch.ones(1, 4)).sum().backward()
    stats = masters.step(1e-2)
    assert stats.frac_params_changed == 1.0
    assert stats.update_ratio > 0


# -- resume ------------------------------------------------------------------------------------------------


def train(module: Two, masters: Masters, steps: range) -> list[float]:
    norms = []
    for step in steps:
        for micro in range(2):
            module.push(*random_gradients(10 * step + micro))
            masters.absorb()
        norms.append(masters.step(1e-3 * (step + 1)).grad_norm)
    return norms


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_restored_run_goes_on_bit_for_bit(dtype):
    config = learner(weight_decay=0.1)
    one = Two()
    masters = Masters.of(one, config, compute_dtype=dtype)
    train(one, masters, range(3))
    saved = {k: v.clone() for k, v in masters.state().items()}
    weights = {k: v.float().clone() for k, v in one.state_dict().items()}

    two = Two(seed=5)
    two.load_state_dict(weights)
    restored = Masters.of(two, config, compute_dtype=dtype)
    restored.load_state(saved)
    assert all(torch.equal(v, saved[k]) for k, v in restored.state().items())
    assert saved.keys() == restored.state().keys()
    assert train(one, masters, range(3, 6)) == train(two, restored, range(3, 6))
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(masters.masters, restored.masters, strict=True))
    # What is restored is a copy: training on does not write into what was saved.
    assert not torch.equal(saved["exp_avg/weight"], restored.state()["exp_avg/weight"])
