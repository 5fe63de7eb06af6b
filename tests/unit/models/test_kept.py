"""The head within kept sets and without banned tokens against masked logits in float64: values and
gradients, any block and kernels."""

from __future__ import annotations

import math

import pytest
import torch

from covey.kernels import protocol
from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.kept import ids_of, joined, select
from covey.kernels.protocol import HeadSpec
from covey.kernels.torch_.kernels import TorchKernels
from covey.models.head import token_stats
from covey.types import KeptSets, KeptTokens
from support.processors import library_for, processors

N, U, D, V = 13, 9, 8, 70
# Tokens of one context have sets of their own, as the first tokens of siblings have.
CONTEXT = [0, 1, 0, 2, 3, 3, 5, 6, 0, 7, 8, 6, 2]
BLOCKS = [(1, 5), (4, 4 * 10), (U, U * 33), (512, 1 << 21)]
# Some blocks have no token that is not banned.
BANNED = (0, 4, *range(10, 15), 41, 69)
SPECS = [
    HeadSpec(),
    HeadSpec(scale=0.3),
    HeadSpec(scale=2.0, softcap=3.0),
    HeadSpec(scale=0.3, banned=BANNED),
    HeadSpec(scale=2.0, softcap=3.0, banned=BANNED),
]


def tensors(sets: KeptSets) -> KeptTokens:
    return KeptTokens(
        vocab=sets.vocab,
        count_N=torch.tensor(sets.counts.copy()),
        words_K=torch.tensor(sets.words.copy()),
    )


def make(has_bias, some_whole, seed=0, banned=()):
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(V, (N,), generator=g).index_fill_(0, torch.tensor([0, 2, 7, 11]), 3)
    target[torch.isin(target, torch.tensor(banned))] = 5
    # One id, lists, bitmaps, all ids.
    sizes = [1, 2, 3, 40, 5, 1, 69, V, 2, 3, 17, 33, 1]
    sets = []
    for token, size in zip(target.tolist(), sizes, strict=True):
        order = torch.randperm(V, generator=g).tolist()
        sets.append([token, *(i for i in order if i != token and i not in banned)][:size])
    if some_whole:
        sets[4], sets[9] = [], []
    return {
        "hidden": torch.randn(U, D, generator=g).requires_grad_(),
        "weight": torch.randn(V, D, generator=g).requires_grad_(),
        "bias": torch.randn(V, generator=g).requires_grad_() if has_bias else None,
        "context": torch.tensor(CONTEXT),
        "target": target,
        "temperature": (0.5 + torch.rand(U, generator=g))[CONTEXT],
    }, sets


def plain(x, sets, spec):
    """The definition in float64: logprobs and their entropy within the sets, the entropy of the whole."""
    leaves = [
        x[k].detach().double().requires_grad_() for k in ("hidden", "weight", "bias") if x[k] is not None
    ]
    logits = leaves[0][x["context"]] @ leaves[1].t()
    if x["bias"] is not None:
        logits = logits + leaves[2]
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits / x["temperature"].double()[:, None]
    # Elsewhere 0 times minus infinity would be no number.
    logits = logits.index_fill(1, torch.tensor(spec.banned, dtype=torch.long), -1e6)
    outside = torch.zeros(N, V, dtype=torch.bool)
    for n, ids in enumerate(sets):
        if ids:
            outside[n] = True
            outside[n, ids] = False
    within = logits.masked_fill(outside, -math.inf).log_softmax(-1)
    parts = (within.exp() * within).masked_fill(outside, 0.0)
    kept_entropy = -parts.sum(-1) * torch.tensor([float(bool(ids)) for ids in sets])
    whole = logits.log_softmax(-1)
    entropy = -(whole.exp() * whole).sum(-1)
    return within[torch.arange(N), x["target"]], entropy, kept_entropy.detach(), leaves


# In C where it serves the head: without a bias and a soft cap.
HEADS = [(None, s, *of) for s in SPECS for of in ((False, False), (False, True), (True, False))]
HEADS += [(c, s, False, whole) for c in processors() for s in SPECS[:2] for whole in (False, True)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("library", "spec", "has_bias", "some_whole"), HEADS)
def test_values_and_gradients(
    library, block, spec, has_bias, some_whole, monkeypatch, tmp_path_factory, assert_close_guarded
):
    kernels = CpuKernels(library and library_for(library, tmp_path_factory))
    monkeypatch.setattr(protocol, "_BLOCK", {"cpu": block})
    x, sets = make(has_bias, some_whole, banned=spec.banned)
    kept = tensors(KeptSets.of(sets, V))
    g = torch.Generator().manual_seed(9)
    weights = [torch.randn(2, N, generator=g) * torch.tensor([[a], [b]]) for a, b in ((1, 0), (0, 1), (1, 1))]
    for on_logprob, on_entropy in weights:
        leaves = [x[k] for k in ("hidden", "weight", "bias") if x[k] is not None]
        given = (x[k] for k in ("hidden", "weight", "bias", "context", "target", "temperature"))
        logprob, entropy, kept_entropy = token_stats(*given, spec, kernels, kept)
        due_logprob, due_entropy, due_kept, slow = plain(x, sets, spec)
        assert_close_guarded(logprob.detach(), due_logprob.detach(), rtol=1e-6)
        assert_close_guarded(entropy.detach(), due_entropy.detach(), rtol=2e-6)
        assert_close_guarded(kept_entropy, due_kept, rtol=2e-6)
        # A token that was kept alone has no choice.
        assert (logprob[kept.count_N == 1] == 0.0).all() and not kept_entropy.requires_grad
        got = torch.autograd.grad((on_logprob * logprob + on_entropy * entropy).sum(), leaves)
        loss = (on_logprob.double() * due_logprob + on_entropy.double() * due_entropy).sum()
        for actual, expected in zip(got, torch.autograd.grad(loss, slow), strict=True):
            assert_close_guarded(actual, expected, rtol=1e-5)


def test_a_token_kept_alone_has_no_gradient():
    x, _ = make(False, False)
    alone = tensors(KeptSets.of([[token] for token in x["target"].tolist()], V))
    given = (x[k] for k in ("hidden", "weight", "bias", "context", "target", "temperature"))
    logprob = token_stats(*given, HeadSpec(), TorchKernels(), alone).logprob_N
    assert (logprob == 0.0).all()
    for gradient in torch.autograd.grad(logprob.sum(), [x["hidden"], x["weight"]]):
        assert (gradient == 0.0).all()


def test_sets_of_all_ids_are_no_sets(assert_close_guarded):
    x, _ = make(False, False)
    given = [x[k] for k in ("hidden", "weight", "bias", "context", "target", "temperature")]
    whole = token_stats(*given, HeadSpec(), TorchKernels())
    every = token_stats(*given, HeadSpec(), TorchKernels(), tensors(KeptSets.of([range(V)] * N, V)))
    assert_close_guarded(every.logprob_N.detach(), whole.logprob_N.detach(), rtol=1e-6)
    assert_close_guarded(every.kept_entropy_N, whole.entropy_N.detach(), rtol=1e-5)
    assert whole.kept_entropy_N is None


def test_ids_and_parts_of_sets():
    sets = [[5, 69], [7], list(range(0, 66, 2)), [], [1, 2, 3], [68]]
    kept = KeptSets.of(sets, V)
    assert [own.tolist() for own in kept] == sets and kept.widths.tolist() == [2, 1, 3, 0, 3, 1]
    given = tensors(kept)
    assert ids_of(given).tolist() == [i for own in sets for i in own]
    order = torch.tensor([4, 2, 2, 0, 3])
    assert ids_of(select(given, order)).tolist() == [i for n in order.tolist() for i in sets[n]]
    parts = [tensors(kept.part(start, end)) for start, end in ((0, 2), (2, 2), (2, 5), (5, 6))]
    assert ids_of(joined(parts)).tolist() == ids_of(given).tolist()
    assert KeptSets.joined([kept.part(0, 3), kept.part(3, 6)]) == kept
    assert kept.lacks([5, 7, 1, 0, 1, 68]) == [2, 3]


def test_bad_sets_are_refused():
    with pytest.raises(ValueError, match="outside"):
        KeptSets.of([[V]], V)
    with pytest.raises(ValueError, match="words"):
        KeptSets(vocab=V, counts=[2, 1], words=[1, 2])
