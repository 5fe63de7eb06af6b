"""Attention of a stream in C against attention written out token by token in float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from covey.models.attention import AttentionOptions
from covey.models.attention_native import Families
from covey.models.native.library import open_library
from support.attention import SEGMENTS, dense, dense_mask, random_segments

QUERIES, KEYS, WIDTH = 4, 2, 64


def in_c(library, families, heads, weight):
    """Values, and the gradient of their sum times `weight`."""
    arguments = families.arguments(heads=QUERIES, key_heads=KEYS, head_width=WIDTH, scaling=0.3)
    held = torch.empty(arguments.threads * library.attention_scratch(ctypes.byref(arguments)))
    out, lse, gradient = torch.empty_like(weight), torch.empty(weight.shape[:2]), torch.empty_like(heads)
    parts = {"x": heads, "out": out, "lse": lse, "grad": weight, "grad_x": gradient, "held": held}
    for name, tensor in parts.items():
        setattr(arguments, name, tensor.data_ptr())
    library.attend(ctypes.byref(arguments))
    library.attend_backward(ctypes.byref(arguments))
    return out, gradient


def both(segments, computed, seed, assert_close_guarded, threads=1):
    """Values and gradient of the heads of `segments`, as `computed` lays them out, against the definition."""
    library = open_library()
    assert library is not None, "these tests need a C compiler"
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
