"""Backward passes that add gradients to where they are kept, against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from covey.learner.optimizer import Masters, OptimizerConfig
from covey.models.gradients import adding_embedding, own_gradient
from covey.models.policy import Policy
from covey.models.probe import micro_of
from support.models import policy_of

CONFIG = OptimizerConfig(betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0, max_grad_norm=0.0)
TOKENS = torch.tensor([[3, 1, 3, 0, 2, 3]])


class Model(nn.Module):
    """A model that is its embedding."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4, **options)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


def gradients_of(model: Model, *, adds: bool) -> torch.Tensor:
    weight, told = model.embedding.weight, []
    hook = weight.register_hook(lambda gradient: told.append(gradient))
    weight.grad = None
    slope = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    for part in slope:
        with adding_embedding(model, own_gradient if adds else None):
            out = model.embedding(TOKENS)
        (out[0] * part).sum().backward()
    hook.remove()
    # Of what is added by itself autograd hears that there is none.
    assert [gradient is None for gradient in told] == [adds, adds]
    return weight.grad


@pytest.mark.parametrize("padding", [None, 3])
def test_the_embedding_adds_what_autograd_would(padding, assert_close_guarded):
    model = Model(padding_idx=padding)
    expected, actual = (gradients_of(model, adds=adds).clone() for adds in (False, True))
    assert bool(expected[3].any()) == (padding is None) and not expected[4].any()
    assert_close_guarded(actual, expected, rtol=1e-6)


def test_what_others_make_of_its_output_counts(assert_close_guarded):
    model = Model()
    alone = gradients_of(model, adds=True).clone()
    model.embedding.register_forward_hook(lambda module, inputs, output: 3.0 * output)
    expected, actual = (gradients_of(model, adds=adds).clone() for adds in (False, True))
    assert_close_guarded(actual, expected, rtol=1e-6)
    assert_close_guarded(actual, 3.0 * alone, rtol=1e-6)


def test_the_embedding_listens_no_longer_than_it_adds():
    model = Model()
    with adding_embedding(model, own_gradient):
        assert len(model.embedding._forward_hooks) == 1
    assert not model.embedding._forward_hooks


class Scaled(nn.Embedding):
    """One that does more than look up."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(tokens)


@pytest.mark.parametrize("kind", ["frozen", "scaled", "bounded"])
def test_an_embedding_that_is_not_plain_is_left_alone(kind):
    model = Model(**({"max_norm": 1.0} if kind == "bounded" else {}))
    if kind == "scaled":
        model.embedding.__class__ = Scaled
    model.embedding.weight.requires_grad_(kind != "frozen")
    with adding_embedding(model, own_gradient):
        assert not model.embedding._forward_hooks


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "gemma2", "mixtral", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_adds_what_autograd_would(family, dtype, random_rows, monkeypatch):
    # With no library every family takes the way of its modules, in float32, too.
    monkeypatch.setattr(Policy, "_short", None)
    policy = policy_of(family)
    masters = Masters(policy, CONFIG, dtype)
    every = random_rows((11, (9, 4))), random_rows((5, (8, 2)))
    micros = [micro_of(rows, policy.stream, policy.device) for rows in every]
    found = []
    for adds in (False, True):
        for micro in micros:
            if adds:
                with policy.adding_gradients(masters.gradient_of):
                    stats = policy(micro)
                with masters.absorbing():
                    (stats.logprob_N.sum() + 0.3 * stats.entropy_N.sum()).backward()
            else:
                stats = policy(micro)
                (stats.logprob_N.sum() + 0.3 * stats.entropy_N.sum()).backward()
                masters.absorb()
        found.append(masters.gradients())
        for master in masters.masters:
            master.grad = None
    assert all(p.grad is None for p in policy.parameters())
    least = 1e-2 * float(torch.cat([g.flatten() for g in found[0].values()]).norm())
    limit = 1e-5 if dtype == torch.float32 else 8e-3
    guarded = set()
    for name, gradient in found[0].items():
        # In bfloat16 autograd rounds each gradient, and the sum of a tied weight's two. A bias of keys has
        # none but rounding.
        size = max(float(gradient.norm()), least)
        gaps = [float((factor * found[1][name] - gradient).norm()) / size for factor in (1.0, 0.0, -1.0, 2.0)]
        assert gaps[0] < limit, name
        if size > least:
            guarded.add(name)
            assert min(gaps[1:]) > limit, f"{name}: nothing, the opposite or twice as much would pass, too"
    weights = {id(p): n for n, p in policy.named_parameters()}
    model = policy.model
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    assert {weights[id(part.weight)] for part in both} <= guarded
