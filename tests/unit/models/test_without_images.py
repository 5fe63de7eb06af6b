"""Passes without images on ranks that share a model: nothing changes, and the vision tower takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.models.vision.tower import WithoutImages
from support.vision import FAMILIES, medium, policy_of, row

TEXT = [row([11, 12, 13, 14], [40, 41, 42], "text")]
SEEING = [row([9, medium("dog", 2, 3), 10], [30, 31, 32], "dog")]
WAYS: tuple[WithoutImages, ...] = ("zeros", "gradients", "pass")


def gradients(policy: Policy, rows: Any) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Return the logprobs of rows, their gradients, and the order in which those of the tower come."""
    policy.zero_grad()
    order: list[str] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    ]
    logprob_N = policy(micro_of(rows, policy.stream, policy.device)).logprob_N
    logprob_N.sum().backward()
    for hook in hooks:
        hook.remove()
    found = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return logprob_N.detach(), found, [name for name in order if ".visual." in name]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_a_gradient_and_no_number_changes(family: str, how: WithoutImages) -> None:
    policy = policy_of(family)
    expected, plain, order = gradients(policy, TEXT)
    assert not order and not any(".visual." in name for name in plain)
    policy.without_images = how
    found, both, order = gradients(policy, TEXT)
    assert torch.equal(found, expected)
    assert all(torch.equal(both[name], gradient) for name, gradient in plain.items())
    names = {name for name, _ in policy.named_parameters() if ".visual." in name}
    assert set(order) == names == both.keys() - plain.keys()
    assert not any(both[name].any() for name in names)
    if how != "zeros":
        # DeepSpeed adds up what comes at the same place of this order on each rank.
        assert order == gradients(policy, SEEING)[2]


@pytest.mark.parametrize("how", WAYS)
def test_where_nothing_is_trained_there_is_nothing_to_do(how: WithoutImages) -> None:
    """But for weights that are gathered as the tower runs."""
    policy = policy_of("qwen2_5_vl")
    calls: list[int] = []
    assert policy.vision is not None
    policy.vision.towers(policy.model)[0].register_forward_hook(lambda *_: calls.append(1))
    policy.without_images = how
    micro = micro_of(TEXT, policy.stream, policy.device)
    with torch.no_grad():
        policy(micro)
    assert len(calls) == (how == "pass")
    policy.vision.towers(policy.model)[0].requires_grad_(False)
    policy(micro).logprob_N.sum().backward()
    assert len(calls) == 2 * (how == "pass")
    assert policy.model.get_input_embeddings().weight.grad is not None


def test_a_frozen_language_model_still_has_a_loss() -> None:
    policy = policy_of("qwen2_5_vl")
    assert policy.vision is not None
    policy.requires_grad_(False)
    policy.vision.towers(policy.model)[0].requires_grad_(True)
    policy.without_images = "zeros"
    _, found, _ = gradients(policy, TEXT)
    assert found and not any(gradient.any() for gradient in found.values())
