"""The head's blocks by Triton against blocks in torch, as Triton's interpreter computes them.

Run by test_gpu_head.py with TRITON_INTERPRET=1: Triton asks for it when it is first imported in a process."""

from __future__ import annotations

import pytest
import torch

from covey.kernels import protocol
from covey.kernels.gpu import head as gpu_head
from covey.kernels.gpu import kernels as gpu_kernels
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.protocol import HeadSpec
from covey.kernels.torch_.head import TorchHead
from covey.kernels.torch_.kernels import TorchKernels
from covey.models.head import token_stats
from covey.types import KeptSets, KeptTokens

N, U, D, V = 13, 9, 8, 37
# Some tokens follow one context, of which some are the same token; context 4 predicts nothing.
CONTEXT = [0, 1, 0, 2, 3, 3, 5, 6, 0, 7, 8, 6, 2]
# Some cells of one context, several contexts with a part of the vocabulary, everything.
BLOCKS = [(1, 5), (4, 4 * 10), (5, 5 * V), (512, 1 << 21)]


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """As if there were one; a program takes several turns for a row."""
    monkeypatch.setattr(gpu_kernels, "has_compiler", lambda device: True)
    monkeypatch.setattr(gpu_head, "_WIDTH", 8)


# Of each token one id, a list or a bitmap; some tokens have no set.
SETS = [[3], [1, 2], range(0, V, 2), [], [5, 7], range(V), [4], [3, 6], [2], [], [8, 9], [3], [1, 30]]


def kept_of(target):
    sets = KeptSets.of(
        [[*ids, t] if len(ids) else ids for ids, t in zip(SETS, target.tolist(), strict=True)], V
    )
    return KeptTokens(
        vocab=V, count_N=torch.tensor(sets.counts.copy()), words_K=torch.tensor(sets.words.copy())
    )


def results(kernels, dtype, spec, on_logprob, on_entropy, has_sets=False):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(U, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    target = torch.randint(V, (N,), generator=g).index_fill_(0, torch.tensor([0, 2, 7, 11]), 3)
    target[torch.isin(target, torch.tensor(spec.banned))] = 3
    temperature = (0.5 + torch.rand(U, generator=g))[CONTEXT]
    context = torch.tensor(CONTEXT)
    kept = kept_of(target) if has_sets else None
    logprob, entropy, _ = token_stats(hidden, weight, None, context, target, temperature, spec, kernels, kept)
    weights = torch.randn(2, N, generator=g)
    loss = (on_logprob * weights[0] * logprob + on_entropy * weights[1] * entropy).sum()
    return logprob.detach(), entropy.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("losses", [(1, 0), (1, 1)])
@pytest.mark.parametrize("has_sets, banned", [(False, ()), (True, ()), (False, (0, *range(10, 15), 36))])
def test_in_float32_it_is_the_blocks_in_torch(
    has_sets, banned, block, losses, monkeypatch, assert_close_guarded
):
    monkeypatch.setattr(protocol, "_BLOCK", {"cpu": block})
    spec = HeadSpec(scale=0.3, banned=banned)
    got = results(GpuKernels(), torch.float32, spec, *losses, has_sets)
    due = results(TorchKernels(), torch.float32, spec, *losses, has_sets)
    for actual, expected in zip(got, due, strict=True):
        assert_close_guarded(actual, expected, rtol=2e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_in_bfloat16_it_is_too(block, monkeypatch, assert_close_guarded):
    monkeypatch.setattr(protocol, "_BLOCK", {"cpu": block})
    got = results(GpuKernels(), torch.bfloat16, HeadSpec(), 1, 1)
    due = results(TorchKernels(), torch.bfloat16, HeadSpec(), 1, 1)
    for actual, expected in zip(got[:2], due[:2], strict=True):
        assert_close_guarded(actual, expected, rtol=2e-5)
    # The interpreter cuts what a GPU rounds: by up to one part in 128.
    for actual, expected in zip(got[2:], due[2:], strict=True):
        assert float((actual.float() - expected.float()).norm() / expected.float().norm()) < 8e-3


def test_large_and_broken_logits():
    """Nothing overflows, and what is not finite stays to be seen."""
    hidden, weight = torch.tensor([[100.0]]), torch.tensor([[1.0], [-1.0], [0.99]])
    one = torch.zeros(1, dtype=torch.long)
    logprob, entropy, _ = token_stats(hidden, weight, None, one, one, torch.ones(1), HeadSpec(), GpuKernels())
    assert logprob.item() == pytest.approx(-0.313262, abs=1e-5)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-5)
    weight[1] = float("nan")
    logprob, *_ = token_stats(hidden, weight, None, one, one, torch.ones(1), HeadSpec(), GpuKernels())
    assert logprob.isnan().all()


def test_which_heads_it_serves(monkeypatch):
    weight = torch.zeros(4, 2)
    assert type(GpuKernels().head(weight, None, HeadSpec(scale=2.0))) is gpu_head.FusedHead
    assert type(GpuKernels().head(weight, torch.zeros(4), HeadSpec())) is TorchHead
    assert type(GpuKernels().head(weight, None, HeadSpec(softcap=3.0))) is TorchHead
    monkeypatch.setattr(gpu_kernels, "has_compiler", lambda device: False)
    assert type(GpuKernels().head(weight, None, HeadSpec())) is TorchHead
