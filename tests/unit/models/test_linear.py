"""oneDNN's products against float64, forwards and backwards, wherever the tests run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from covey.models import linear as module
from covey.models.linear import FastLinear, linear, transposed_product, use_fast_products


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product takes the path that is the faster one on some machines."""
    monkeypatch.setattr(module, "_ONEDNN", True)
    monkeypatch.setattr(module, "_SMALL", 1)
    monkeypatch.setattr(module, "_SMALL_SIDE", 1)


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
    monkeypatch.setattr(module, "_ONEDNN", False)
    model = nn.Sequential(nn.Linear(3, 4))
    use_fast_products(model)
    assert type(model[0]) is nn.Linear
    x, weight, bias = leaves((40,), 24, 40)
    assert torch.equal(linear(x, weight, bias), nn.functional.linear(x, weight, bias))
