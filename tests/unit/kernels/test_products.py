"""oneDNN's products, and bfloat16's in float32, against float64, wherever the tests run."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from covey.kernels import products as module
from covey.kernels.products import (
    FastLinear,
    FastProducts,
    is_kept_by_size,
    linear,
    transposed_product,
    use_fast_products,
)
from covey.models import activations


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product takes the path that is the faster one on some machines."""
    monkeypatch.setattr(module, "_HAS_ONEDNN", True)
    monkeypatch.setattr(module, "_IS_FASTER", True)
    monkeypatch.setattr(module, "_SMALL", 1)
    monkeypatch.setattr(module, "_SMALL_SIDE", 1)
    monkeypatch.setattr(module, "_IS_WIDENED", False)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that does not multiply bfloat16, and blocks of which every product takes several."""
    monkeypatch.setattr(module, "_IS_WIDENED", True)
    monkeypatch.setattr(module, "_BLOCK", 120)
    monkeypatch.setattr(module, "_BLOCK_ROWS", 3)


def whole(rows: tuple[int, ...], width: int, out: int) -> list[torch.Tensor]:
    """Whole numbers, whose float32 sums are exact in any order."""
    g = torch.Generator().manual_seed(0)
    shapes = ((*rows, width), (out, width), (out,))
    return [torch.randint(-8, 9, shape, generator=g).bfloat16().requires_grad_() for shape in shapes]


def leaves(rows: tuple[int, ...], width: int, out: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((*rows, width), (out, width), (out,))
    return [torch.randn(*shape, generator=g).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("rows", [(1,), (40,), (3, 17), (0,)])
@pytest.mark.parametrize(("width", "out"), [(24, 40), (40, 24), (16, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients(rows, width, out, has_bias, assert_close_guarded):
    x, weight, bias = leaves(rows, width, out)
    given = [x, weight, bias] if has_bias else [x, weight]
    exact = [t.detach().double().requires_grad_() for t in given]
    got, expected = linear(*given), nn.functional.linear(*exact)
    assert_close_guarded(got.detach(), expected.detach(), rtol=1e-5)
    slope = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    got.backward(slope)
    expected.backward(slope.double())
    for actual, wanted in zip(given, exact, strict=True):
        assert_close_guarded(actual.grad, wanted.grad, rtol=1e-5)


def test_no_gradient_is_made_that_nobody_wants(assert_close_guarded):
    x, weight, bias = leaves((9,), 24, 40)
    frozen = weight.detach(), bias.detach()
    linear(x, *frozen).sum().backward()
    assert_close_guarded(x.grad, frozen[0].sum(dim=0).expand(9, -1), rtol=1e-5)
    with torch.no_grad():
        assert not linear(x, weight, bias).requires_grad
    assert weight.grad is None


@pytest.mark.parametrize(("left", "right"), [(24, 40), (40, 24)])
def test_the_gradient_of_a_weight(left, right, assert_close_guarded):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(33, left, generator=g), torch.randn(33, right, generator=g)
    assert_close_guarded(transposed_product(a, b), a.double().t() @ b.double(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_in_given_memory(dtype, is_faster, has_bias, monkeypatch, assert_close_guarded):
    monkeypatch.setattr(module, "_HAS_ONEDNN", is_faster)
    monkeypatch.setattr(module, "_IS_FASTER", is_faster)
    x, weight, bias = (t.detach().to(dtype) for t in leaves((33,), 24, 40))
    # The memory may hold anything, and may be larger.
    room = torch.full((2000,), torch.nan, dtype=dtype)
    given = (x, weight, bias) if has_bias else (x, weight)
    out = FastProducts().linear_into(room, *given)
    assert (out.data_ptr() == room.data_ptr()) is not (is_faster and dtype == torch.float32)
    # In bfloat16 it is what torch computes, to the bit.
    is_low = dtype == torch.bfloat16
    due = nn.functional.linear(*(given if is_low else [t.double() for t in given]))
    assert_close_guarded(out, due, rtol=1e-7 if is_low else 1e-5)
    sums = torch.ones(33, 24)
    left = torch.randn(7, 33, generator=torch.Generator().manual_seed(2)).to(dtype)
    right = x[:7].contiguous()
    if not is_low:
        for _ in range(2):
            FastProducts().add_transposed(sums, left, right)
        assert_close_guarded(sums - 1.0, 2 * left.double().t() @ right.double(), rtol=1e-5)


def test_an_adapter_on_a_wide_layer_and_what_is_faster_by_onednn_go_there(monkeypatch):
    monkeypatch.setattr(module, "_SMALL_SIDE", 512)

    def goes(*shape: int) -> bool:
        return is_kept_by_size(torch.empty(*shape))

    assert goes(512, 512) and goes(16, 512) and not goes(511, 16)
    monkeypatch.setattr(module, "_IS_FASTER", False)
    assert not goes(512, 512) and goes(16, 512) and goes(1536, 64) and not goes(1536, 65)
    monkeypatch.setattr(module, "_HAS_ONEDNN", False)
    assert not goes(16, 512)
    assert is_kept_by_size(torch.empty(2, 2, dtype=torch.bfloat16))


def test_other_dtypes_take_the_usual_path():
    x, weight, bias = (t.detach().bfloat16() for t in leaves((40,), 24, 40))
    assert torch.equal(linear(x, weight, bias), nn.functional.linear(x, weight, bias))
    assert torch.equal(transposed_product(x, x), x.t() @ x)


def test_plain_layers_are_made_fast_and_no_others():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), Own(4, 2)), nn.Embedding(5, 3))
    names = list(model.state_dict())
    x = torch.randn(7, 3)
    before = model[:2](x)
    use_fast_products(model)
    assert [type(m) for m in (model[0], model[1][0], model[1][1])] == [FastLinear, FastLinear, Own]
    assert list(model.state_dict()) == names
    assert torch.allclose(model[:2](x), before, atol=1e-6)


def test_a_machine_that_gains_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_HAS_ONEDNN", False)
    monkeypatch.setattr(module, "_IS_FASTER", False)
    model = nn.Sequential(nn.Linear(3, 4))
    use_fast_products(model)
    assert type(model[0]) is nn.Linear
    x, weight, bias = leaves((40,), 24, 40)
    assert torch.equal(linear(x, weight, bias), nn.functional.linear(x, weight, bias))


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("rows", [(1,), (40,), (3, 17), (0,)])
@pytest.mark.parametrize(("width", "out"), [(24, 40), (40, 24), (16, 1)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_bfloat16_is_summed_in_float32_and_rounded_once(rows, width, out, has_bias):
    given = whole(rows, width, out)[: 3 if has_bias else 2]
    exact = [t.detach().double().requires_grad_() for t in given]
    got, expected = linear(*given), nn.functional.linear(*exact)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected.bfloat16())
    slope = torch.randint(-8, 9, got.shape, generator=torch.Generator().manual_seed(1))
    got.backward(slope.bfloat16())
    expected.backward(slope.double())
    for actual, wanted in zip(given[:2], exact, strict=False):
        assert torch.equal(actual.grad, wanted.grad.bfloat16())
    with torch.no_grad():
        assert torch.equal(linear(*given), got)


@pytest.mark.usefixtures("widened")
def test_products_of_the_head_in_float32(monkeypatch):
    x, weight, bias = (t.detach() for t in whole((33,), 24, 40))
    room = torch.full((3000,), torch.nan, dtype=torch.bfloat16)
    out = FastProducts().linear_into(room, x, weight, bias)
    due = nn.functional.linear(*(t.double() for t in (x, weight, bias)))
    assert out.data_ptr() == room.data_ptr() and torch.equal(out, due.bfloat16())
    # As the gradients of the head ask for them: both operands as others lie.
    slope = out.clamp(-8, 8)
    due = slope.double() @ weight.double()
    assert torch.equal(FastProducts().linear_into(room[out.numel() :], slope, weight.t()), due.bfloat16())
    due = slope.double().t() @ x.double()
    assert torch.equal(
        FastProducts().linear_into(torch.empty_like(weight).flatten(), slope.t(), x.t()), due.bfloat16()
    )
    assert torch.equal(transposed_product(slope, x), due.bfloat16())


@pytest.mark.usefixtures("widened")
def test_selective_recomputation_keeps_a_product_in_float32(monkeypatch):
    calls, multiply = [], module._widened_into
    monkeypatch.setattr(module, "_widened_into", lambda *given: calls.append(1) or multiply(*given))
    x, weight, _ = whole((9,), 24, 40)

    def contexts():
        return create_selective_checkpoint_contexts(activations._keeps)

    checkpoint(lambda: linear(x, weight).tanh(), use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(calls) == 3
    checkpoint(lambda: linear(x, weight).tanh(), use_reentrant=False).sum().backward()
    assert len(calls) == 3 + 4


@pytest.mark.usefixtures("widened")
def test_no_kernel_is_kept_of_a_product_in_float32():
    assert not is_kept_by_size(torch.empty(600, 600, dtype=torch.bfloat16))
    assert is_kept_by_size(torch.empty(600, 600))


@pytest.mark.parametrize(
    ("machine", "capability", "is_widened"),
    [("x86_64", "AVX2", True), ("x86_64", "AVX512", False), ("aarch64", "DEFAULT", False)],
)
def test_which_processors_multiply_bfloat16(machine, capability, is_widened, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert module._is_without_bfloat16() is is_widened
