"""Attention of a stream in C against attention written out token by token in float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from covey.kernels.cpu import attention as compiled_attention
from covey.kernels.cpu.attention import Attention, Families, serves
from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.protocol import AttentionOptions
from covey.models.attention import StreamLayout
from covey.types import StreamSegment
from support.attention import SEGMENTS, dense, dense_mask, random_segments
from support.processors import library_for, processors

QUERIES, KEYS, WIDTH = 4, 2, 64


@pytest.fixture(scope="module", params=processors())
def library(request, tmp_path_factory):
    return library_for(request.param, tmp_path_factory)


def in_c(library, families, heads, weight):
    """Values, and the gradient of their sum times `weight`."""
    arguments = Attention(heads=QUERIES, key_heads=KEYS, head_width=WIDTH, scaling=0.3)
    families.put(arguments)
    held = torch.empty(arguments.threads * library.attention_scratch(ctypes.byref(arguments)))
    out, lse, gradient = torch.empty_like(weight), torch.empty(weight.shape[:2]), torch.empty_like(heads)
    parts = {"x": heads, "out": out, "lse": lse, "grad": weight, "grad_x": gradient, "held": held}
    for name, tensor in parts.items():
        setattr(arguments, name, tensor.data_ptr())
    library.attend(ctypes.byref(arguments))
    library.attend_backward(ctypes.byref(arguments))
    return out, gradient


def both(library, segments, computed, seed, assert_close_guarded, threads=1):
    """Values and gradient of the heads of `segments`, as `computed` lays them out, against the definition."""
    total = sum(s.length for s in segments)
    g = torch.Generator().manual_seed(seed)
    heads = torch.randn(total, QUERIES + 2 * KEYS, WIDTH, generator=g)
    weight = torch.randn(total, QUERIES, WIDTH, generator=g)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, got_gradient = in_c(library, Families.of(computed), heads, weight)
    finally:
        torch.set_num_threads(before)
    exact = heads.detach().double().requires_grad_()
    parts = (x.transpose(0, 1)[None] for x in exact.split([QUERIES, KEYS, KEYS], dim=1))
    expected = dense(*parts, dense_mask(segments, None), AttentionOptions(scaling=0.3))[0].transpose(0, 1)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), exact)
    assert_close_guarded(got, expected.detach(), rtol=1e-5)
    assert_close_guarded(got_gradient, expected_gradient, rtol=1e-5)


def test_a_stream_with_trees(library, assert_close_guarded):
    both(library, SEGMENTS, SEGMENTS, 0, assert_close_guarded, threads=2)


@pytest.mark.parametrize("seed", range(8))
def test_random_streams(library, seed, assert_close_guarded):
    segments = random_segments(seed)
    both(library, segments, segments, seed, assert_close_guarded)


def test_another_tree_would_fail_the_comparison(library, assert_close_guarded):
    broken = (*SEGMENTS[:11], replace(SEGMENTS[11], parent=8), *SEGMENTS[12:])
    with pytest.raises(AssertionError):
        both(library, SEGMENTS, broken, 0, assert_close_guarded)


def written_out(heads, weight):
    """The gradient by the definition, in the dtype that it is given."""
    exact = heads.detach().clone().requires_grad_()
    query, key, value = (x.transpose(0, 1) for x in exact.split([QUERIES, KEYS, KEYS], dim=1))
    key, value = (x.repeat_interleave(QUERIES // KEYS, dim=0) for x in (key, value))
    hidden = ~dense_mask(SEGMENTS, None)
    scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(hidden, float("-inf"))
    return torch.autograd.grad(((scores.softmax(-1) @ value).transpose(0, 1) * weight).sum(), exact)[0]


@pytest.mark.parametrize("part", [slice(0, QUERIES), slice(QUERIES, QUERIES + KEYS)], ids=["queries", "keys"])
def test_values_that_are_nearly_alike_are_as_exact_as_float32_lets_them(library, part):
    """What is alike cancels in the gradient: the rest is as far off as a softmax in float32 leaves it."""
    own = plain = 0.0
    total = sum(s.length for s in SEGMENTS)
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        heads = 0.7 + 0.05 * torch.randn(total, QUERIES + 2 * KEYS, WIDTH, generator=g)
        weight = 0.7 + 0.05 * torch.randn(total, QUERIES, WIDTH, generator=g)
        exact = written_out(heads.double(), weight.double())[:, part]
        own += float((in_c(library, Families.of(SEGMENTS), heads, weight)[1][:, part] - exact).abs().max())
        plain += float((written_out(heads, weight)[:, part] - exact).abs().max())
    assert 0 < own < 2 * plain


PLAIN = AttentionOptions(scaling=0.3)


def by_layout(library, segments, heads, weight, options=PLAIN):
    """The same as `in_c` through the layout of a stream, as the modules of a model call it."""
    leaf = heads.detach().clone().requires_grad_()
    query, key, value = (x.transpose(0, 1)[None] for x in leaf.split([QUERIES, KEYS, KEYS], dim=1))
    attention = CpuKernels(library).stream(segments, 0, "cpu")
    out = StreamLayout(segments, attention=attention).attend(0, query, key, value, options)[0].transpose(0, 1)
    (gradient,) = torch.autograd.grad((out * weight).sum(), leaf)
    return out.detach(), gradient


@pytest.fixture
def calls(monkeypatch):
    """The functions of the library that were called."""
    names: list[str] = []
    run = compiled_attention._Call.run

    def counted(self, name, **tensors):
        names.append(name)
        run(self, name, **tensors)

    monkeypatch.setattr(compiled_attention._Call, "run", counted)
    return names


def drawn(seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    total = sum(s.length for s in SEGMENTS)
    shapes = (total, QUERIES + 2 * KEYS, WIDTH), (total, QUERIES, WIDTH)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


@pytest.mark.parametrize("window", [None, 100])
def test_the_layout_of_a_stream_takes_it(library, window, calls, assert_close_guarded):
    heads, weight = drawn()
    options = AttentionOptions(scaling=0.3, sliding_window=window)
    got = by_layout(library, SEGMENTS, heads, weight, options)
    assert calls == ["attend", "attend_backward"]
    for actual, due in zip(got, by_layout(None, SEGMENTS, heads, weight), strict=True):
        assert_close_guarded(actual, due, rtol=1e-5)
    assert calls == ["attend", "attend_backward"]


def test_in_bfloat16_what_comes_out_is_rounded_and_nothing_else(library, assert_close_guarded):
    low = drawn(dtype=torch.bfloat16)
    got = by_layout(library, SEGMENTS, *low)
    exact = by_layout(library, SEGMENTS, *(x.float() for x in low))
    for actual, due in zip(got, exact, strict=True):
        assert actual.dtype == torch.bfloat16
        assert_close_guarded(actual, due.bfloat16(), rtol=1e-7)


@pytest.mark.parametrize(
    "other", [{"sliding_window": 4}, {"softcap": 2.0}, {"sinks_H": torch.zeros(QUERIES)}, {"dropout": 0.5}]
)
def test_what_is_not_plain_is_left_to_torch(library, other, calls):
    heads, weight = drawn()
    by_layout(library, SEGMENTS, heads, weight, AttentionOptions(scaling=0.3, **other))
    assert calls == []


def test_heads_and_threads_that_it_serves(library):
    families = Families.of(SEGMENTS)
    query, value = torch.zeros(5, QUERIES, WIDTH), torch.zeros(5, KEYS, WIDTH)
    assert serves(library, families, query, value)
    assert serves(library, families, query.bfloat16(), value.bfloat16())
    assert not serves(library, families, query.double(), value.double())
    assert not serves(library, families, query, torch.zeros(5, KEYS, 2 * WIDTH))
    assert not serves(library, families, torch.zeros(5, 3, WIDTH), value)
    assert not serves(library, families, query[..., :-1], value[..., :-1])
    # Families with 10 of 12 pairs and with 1 and 1: of two key heads a third thread would have too little.
    root, *alone = (StreamSegment(start=at, length=n) for at, n in ((0, 4), (4, 1), (5, 1)))
    uneven = Families.of([root, *alone])
    assert uneven.largest_share == 10 / 12
    # With two tokens more behind the first family's root, which see 5 and 6: 21 of 23.
    child = StreamSegment(start=4, length=2, parent=0)
    alone = [replace(segment, start=segment.start + 2) for segment in alone]
    assert Families.of([root, child, *alone]).largest_share == 21 / 23
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert serves(library, uneven, query, value) == (threads == 2)
    finally:
        torch.set_num_threads(before)
