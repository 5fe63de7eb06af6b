"""Kernels of liger-kernel bound to one model, with stand-ins for them of the documented meaning."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections import Counter

import pytest
import torch

from covey.models import liger
from covey.models.liger import use_liger, wants_liger
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.plan.kernels import LIGER_FAMILIES

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert (offset, casting_mode, in_place) == (0.0, "llama", False)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Stand-ins in place of the package; counts their calls."""
    counted: Counter[str] = Counter()

    def counting(name, function):
        def called(*args):
            counted[name] += 1
            return function(*args)

        return called

    module = types.ModuleType("liger_kernel.transformers.functional")
    module.liger_rms_norm = counting("norm", rms_norm)  # type: ignore[attr-defined]
    module.liger_swiglu = counting("swiglu", swiglu)  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return counted


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", sorted(LIGER_FAMILIES))
def test_a_model_is_the_same_function(
    family, recompute, calls, tiny_model, random_rows, assert_close_guarded
):
    model, other = tiny_model(family), tiny_model(family)
    policy = Policy(model).train()
    policy.keep_activations(recompute)
    micro = micro_of(random_rows((11, (9, 4, 1)), (5, (8, 2))), "prefix", policy.device)

    def value_and_gradients():
        policy.zero_grad(set_to_none=True)
        logprob = policy(micro).logprob_N
        logprob.square().sum().backward()
        return logprob.detach(), {n: p.grad.clone() for n, p in policy.named_parameters()}

    logprob, gradients = value_and_gradients()
    assert not calls
    # Two layers of two norms and a gated layer, a last norm; Qwen 3 has a norm for queries and one for keys.
    norms = 5 + (4 if family == "qwen3" else 0)
    assert use_liger(model) == norms + 2
    again, found = value_and_gradients()
    runs = 1 if recompute == "none" else 2
    assert calls["swiglu"] == 2 * runs
    assert_close_guarded(again, logprob, rtol=1e-5)
    for name, gradient in gradients.items():
        assert_close_guarded(found[name], gradient, rtol=1e-4)
    # Another model of the same class keeps its own.
    calls.clear()
    with torch.no_grad():
        Policy(other)(micro)
    assert not calls
    assert found.keys() == dict(policy.named_parameters()).keys()


def test_another_activation_is_left_alone(calls, tiny_model):
    model = tiny_model("llama")
    model.config.hidden_act = "gelu"
    assert use_liger(model) == 5


def test_auto_needs_device_package_and_model(tiny_model, monkeypatch):
    spec = importlib.machinery.ModuleSpec("liger_kernel", None)
    for is_installed in (True, False):
        monkeypatch.setattr(
            liger.importlib.util, "find_spec", lambda name, there=is_installed: spec if there else None
        )
        assert wants_liger("auto", tiny_model("qwen3"), GPU) is is_installed
        assert not wants_liger("auto", tiny_model("gemma2"), GPU)
        assert not wants_liger("auto", tiny_model("qwen3"), CPU)
        assert wants_liger("true", tiny_model("qwen3"), GPU)
        assert not wants_liger("false", tiny_model("qwen3"), GPU)
