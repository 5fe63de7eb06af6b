"""The chunked head against a plain log_softmax in float64: values, all gradients, any chunk size."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from covey.kernels import protocol
from covey.kernels.cpu import head as compiled_head
from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.protocol import HeadSpec
from covey.kernels.torch_.kernels import TorchKernels
from covey.models.head import _Head, head_spec, token_stats
from support.processors import library_for, processors

N, U, D, V = 13, 9, 8, 37
# What each token is predicted from: some from one context, of which some are the same token; context 4
# predicts nothing.
CONTEXT = [0, 1, 0, 2, 3, 3, 5, 6, 0, 7, 8, 6, 2]


def make(has_bias: bool, seed: int = 0) -> dict[str, torch.Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(U, D, generator=g).requires_grad_(),
        "weight": torch.randn(V, D, generator=g).requires_grad_(),
        "bias": torch.randn(V, generator=g).requires_grad_() if has_bias else None,
        "context": torch.tensor(CONTEXT),
        "target": torch.randint(V, (N,), generator=g).index_fill_(0, torch.tensor([0, 2, 7, 11]), 3),
        "temperature": (0.5 + torch.rand(U, generator=g))[CONTEXT],
    }


def plain(
    x: dict[str, torch.Tensor | None], spec: HeadSpec
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The definition in float64, with its own leaves."""
    leaves = {
        k: x[k].detach().double().requires_grad_() for k in ("hidden", "weight", "bias") if x[k] is not None
    }
    logits = leaves["hidden"][x["context"]] @ leaves["weight"].t()
    if "bias" in leaves:
        logits = logits + leaves["bias"]
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logprobs = (logits / x["temperature"].double()[:, None]).log_softmax(-1)
    chosen = logprobs[torch.arange(N), x["target"]]
    return chosen, -(logprobs.exp() * logprobs).sum(-1), list(leaves.values())


SPECS = [HeadSpec(), HeadSpec(scale=0.3), HeadSpec(softcap=5.0), HeadSpec(scale=2.0, softcap=3.0)]


TORCH = TorchKernels()
# Contexts of a block and its cells: of each context one value or a few at a time, several contexts with a
# part of the vocabulary, with the whole of it, and everything at once.
BLOCKS = [(1, 1), (1, 5), (4, 4 * 10), (5, 5 * V), (U, U * 7), (512, 1 << 21)]


# In C where it serves the head, which is without a bias and a soft cap; elsewhere torch takes over.
HEADS = [(None, spec, has_bias) for spec in SPECS for has_bias in (False, True)]
HEADS += [(library, spec, False) for library in processors() for spec in SPECS if spec.softcap is None]
HEADS += [(processors()[0], SPECS[0], True), (processors()[0], SPECS[2], False)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("library", "spec", "has_bias"), HEADS)
def test_values_and_gradients(
    library, block, spec, has_bias, monkeypatch, tmp_path_factory, assert_close_guarded
):
    compiled = CpuKernels(library and library_for(library, tmp_path_factory))
    monkeypatch.setattr(protocol, "_BLOCK", {"cpu": block})
    x = make(has_bias)
    g = torch.Generator().manual_seed(9)
    # Only logprobs, only entropy, both: a loss may use either.
    weights = [torch.randn(2, N, generator=g) * torch.tensor([[a], [b]]) for a, b in ((1, 0), (0, 1), (1, 1))]
    for on_logprob, on_entropy in weights:
        leaves = [x[k] for k in ("hidden", "weight", "bias") if x[k] is not None]
        logprob, entropy, _ = token_stats(
            *(x[k] for k in ("hidden", "weight", "bias", "context", "target", "temperature")),
            spec,
            compiled,
        )
        assert logprob.dtype == entropy.dtype == torch.float32
        expected_logprob, expected_entropy, slow = plain(x, spec)
        assert_close_guarded(logprob.detach(), expected_logprob.detach(), rtol=1e-6)
        assert_close_guarded(entropy.detach(), expected_entropy.detach(), rtol=2e-6)
        got = torch.autograd.grad((on_logprob * logprob + on_entropy * entropy).sum(), leaves)
        loss = (on_logprob.double() * expected_logprob + on_entropy.double() * expected_entropy).sum()
        due = torch.autograd.grad(loss, slow)
        for actual, expected in zip(got, due, strict=True):
            assert_close_guarded(actual, expected, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    x = make(True)
    gradients = []
    for is_frozen in (False, True):
        weight = x["weight"].detach().requires_grad_(not is_frozen)
        outputs = token_stats(
            x["hidden"],
            weight,
            x["bias"],
            x["context"],
            x["target"],
            x["temperature"],
            HeadSpec(),
            TORCH,
        )
        leaves = [x["hidden"], x["bias"]]
        gradients.append(torch.autograd.grad(outputs[0].sum(), leaves, retain_graph=True))
        (outputs[0].sum() + outputs[1].sum()).backward()
        assert (weight.grad is None) == is_frozen
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_by_hand(assert_close_guarded):
    # Logits (ln 3, 0) at temperature 1: probabilities 3/4 and 1/4, entropy 2 ln 2 - (3/4) ln 3.
    # At temperature 1/2 the logits double: probabilities 9/10 and 1/10, entropy ln 10 - 0.9 ln 9.
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[math.log(3)], [0.0]])
    logprob, entropy, _ = token_stats(
        *(hidden, weight, None, torch.arange(2), torch.tensor([0, 1])),
        *(torch.tensor([1.0, 0.5]), HeadSpec(), TORCH),
    )
    assert_close_guarded(logprob, [math.log(0.75), math.log(0.1)], rtol=1e-6)
    expected = [2 * math.log(2) - 0.75 * math.log(3), math.log(10) - 0.9 * math.log(9)]
    assert_close_guarded(entropy, expected, rtol=1e-6)


def test_no_tokens_give_no_values_but_a_gradient():
    x = make(True)
    empty = torch.zeros(0, D, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.long)
    logprob, entropy, _ = token_stats(
        empty, x["weight"], x["bias"], nothing, nothing, torch.zeros(0), HeadSpec(), TORCH
    )
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,)
    assert x["weight"].grad.shape == (V, D)
    assert x["weight"].grad.count_nonzero() == x["bias"].grad.count_nonzero() == 0


def test_large_logits_stay_finite(assert_close_guarded):
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    logprob, entropy, _ = token_stats(
        hidden, weight, None, torch.arange(2), torch.tensor([1, 1]), torch.ones(2), HeadSpec(), TORCH
    )
    (logprob + entropy).sum().backward()
    # exp(-1e4) is 0: the second token has probability 0 in the first row and 1 in the second.
    assert_close_guarded(logprob.detach(), [-1e4, 0.0], rtol=1e-7)
    assert entropy.tolist() == [0.0, 0.0]
    assert_close_guarded(hidden.grad, [[-1.0], [0.0]], rtol=1e-7)


def test_low_precision_weights_keep_float32_outputs():
    x = make(True)
    low = [x[k].detach().bfloat16().requires_grad_() for k in ("hidden", "weight", "bias")]
    logprob, entropy, _ = token_stats(*low, x["context"], x["target"], x["temperature"], HeadSpec(), TORCH)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.dtype == entropy.dtype == torch.float32
    assert {t.grad.dtype for t in low} == {torch.bfloat16}
    # bfloat16 logits of size 10 are off by up to 0.03; a wrong row or scale is off by whole units.
    expected = plain({**x, **dict(zip(("hidden", "weight", "bias"), low, strict=True))}, HeadSpec())[0]
    assert float((logprob - expected).abs().max()) < 0.15
    assert float((2 * logprob - expected).abs().max()) > 0.15


@pytest.mark.parametrize("library", processors())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_in_c_are_those_in_torch(
    library, threads, block, monkeypatch, tmp_path_factory, assert_close_guarded
):
    """In bfloat16: what is rounded is the same, and a slope is rounded once in both."""
    monkeypatch.setattr(protocol, "_BLOCK", {"cpu": block})
    compiled, before = CpuKernels(library_for(library, tmp_path_factory)), torch.get_num_threads()
    x = make(False)
    results = []
    torch.set_num_threads(threads)
    try:
        for way in (CpuKernels(None), compiled):
            low = [x[k].detach().bfloat16().requires_grad_() for k in ("hidden", "weight")]
            logprob, entropy, _ = token_stats(
                *(*low, None, x["context"], x["target"], x["temperature"], HeadSpec(scale=1.5)),
                way,
            )
            (logprob.sum() + 0.5 * entropy.square().sum()).backward()
            results.append((logprob.detach(), entropy.detach(), low[0].grad.float(), low[1].grad.float()))
    finally:
        torch.set_num_threads(before)
    for got, due in zip(results[1][:2], results[0][:2], strict=True):
        assert_close_guarded(got, due, rtol=2e-6)
    # A slope that lies between two numbers of bfloat16 may go either way, by one part in 256.
    for got, due in zip(results[1][2:], results[0][2:], strict=True):
        assert float((got - due).norm() / due.norm()) < 4e-3


def test_c_serves_heads_without_a_bias_and_a_soft_cap():
    weight, bias = torch.zeros(4, 2), torch.zeros(4)
    serves = compiled_head.serves
    assert serves(weight, None, HeadSpec(scale=2.0))
    assert serves(weight.bfloat16(), None, HeadSpec())
    assert not serves(weight, bias, HeadSpec())
    assert not serves(weight, None, HeadSpec(softcap=3.0))
    assert not serves(weight.half(), None, HeadSpec())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_not_hidden(dtype):
    x = make(False)
    low = [x[k].detach().to(dtype) for k in ("hidden", "weight")]
    low[1][3, 0] = float("nan")
    low = [leaf.requires_grad_() for leaf in low]
    for way in (TorchKernels(), CpuKernels(None), CpuKernels(library_for("native", None))):
        logprob, entropy, _ = token_stats(
            *low, None, x["context"], x["target"], x["temperature"], HeadSpec(), way
        )
        gradients = torch.autograd.grad(logprob.sum() + entropy.sum(), low)
        assert all(bool(part.isnan().any()) for part in (logprob, entropy, *gradients))


def test_spec_of_a_config():
    def model(**fields: object) -> SimpleNamespace:
        config = SimpleNamespace(**fields, to_dict=lambda: fields)
        config.get_text_config = lambda: config
        return SimpleNamespace(config=config)

    assert head_spec(model()) == HeadSpec()
    assert head_spec(model(final_logit_softcapping=30)) == HeadSpec(softcap=30.0)
    assert head_spec(model(final_logit_softcapping=None)) == HeadSpec()
    assert head_spec(model(logit_scale=0.25)) == HeadSpec(scale=0.25)
    assert head_spec(model(logits_scaling=8)) == HeadSpec(scale=0.125)


def test_logits_by_hand(assert_close_guarded):
    # A product of 7; times 2 is 14; capped at 10: 10 tanh(1.4).
    logits = HeadSpec(scale=2.0, softcap=10.0).bounded(torch.tensor([[7.0]]))
    assert_close_guarded(logits, [[10 * math.tanh(1.4)]], rtol=1e-6)


def test_blocks_cover_every_logit_once_and_stay_small(monkeypatch):
    for block, num, vocab in itertools.product(((1, 1), (4, 10), (8, 100)), (0, 1, 7, 20), (1, 3, 1000)):
        monkeypatch.setattr(protocol, "_BLOCK", {"cpu": block})
        made = _Head.over(num, torch.zeros(vocab, 2), None, HeadSpec(), TorchKernels())
        assert [i for s in made.context_blocks for i in range(num)[s]] == list(range(num))
        assert [i for s in made.vocab_blocks for i in range(vocab)[s]] == list(range(vocab))
        widest = max(len(range(vocab)[s]) for s in made.vocab_blocks)
        tokens = max((len(range(num)[s]) for s in made.context_blocks), default=0)
        assert tokens <= max(block[0], block[1] // vocab)
        assert tokens * widest <= max(block)
