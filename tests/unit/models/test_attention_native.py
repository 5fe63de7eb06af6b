"""Attention of a stream in C against attention written out token by token in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.models.attention import AttentionOptions, StreamLayout
from covey.models.native.library import open_library
from support.attention import SEGMENTS, dense, dense_mask, random_segments

QUERIES, KEYS, WIDTH = 4, 2, 64


def both(segments, computed, seed, assert_close_guarded, threads=1):
    """Values and gradient of the heads of `segments`, as `computed` lays them out, against the definition."""
    library = open_library()
    assert library is not None, "these tests need a C compiler"
    total = sum(s.length for s in segments)
    g = torch.Generator().manual_seed(seed)
    heads = torch.randn(total, QUERIES + 2 * KEYS, WIDTH, generator=g).requires_grad_()
    weight = torch.randn(total, QUERIES, WIDTH, generator=g)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        attention = StreamLayout(computed).compiled(library, WIDTH)
        assert not isinstance(attention, StreamLayout)
        got = attention.attend_heads(0, heads, QUERIES, 0.3)
        (got_gradient,) = torch.autograd.grad((got * weight).sum(), heads)
    finally:
        torch.set_num_threads(before)
    exact = heads.detach().double().requires_grad_()
    parts = (x.transpose(0, 1)[None] for x in exact.split([QUERIES, KEYS, KEYS], dim=1))
    expected = dense(*parts, dense_mask(segments, None), AttentionOptions(scaling=0.3))[0].transpose(0, 1)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), exact)
    assert_close_guarded(got.detach(), expected.detach(), rtol=1e-5)
    assert_close_guarded(got_gradient, expected_gradient, rtol=1e-5)


def test_a_stream_with_trees(assert_close_guarded):
    both(SEGMENTS, SEGMENTS, 0, assert_close_guarded, threads=2)


@pytest.mark.parametrize("seed", range(8))
def test_random_streams(seed, assert_close_guarded):
    segments = random_segments(seed)
    both(segments, segments, seed, assert_close_guarded)


def test_another_tree_would_fail_the_comparison(assert_close_guarded):
    broken = (*SEGMENTS[:11], replace(SEGMENTS[11], parent=8), *SEGMENTS[12:])
    with pytest.raises(AssertionError):
        both(SEGMENTS, broken, 0, assert_close_guarded)
