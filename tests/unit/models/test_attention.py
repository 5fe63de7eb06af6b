"""Attention over streams against a dense mask over the whole stream: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from covey.kernels.protocol import AttentionOptions
from covey.kernels.torch_ import attention, stream
from covey.models.attention import ATTENTION_NAME, LayoutLostError, StreamLayout
from covey.types import StreamSegment
from support.attention import (
    OPTIONS,
    SEGMENTS,
    D,
    H,
    K,
    T,
    dense,
    dense_mask,
    leaves,
    options_of,
)


@pytest.mark.parametrize("key_heads", [H, K, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("buckets", ["usual", "one_each", "cut"])
def test_attend_against_a_dense_mask(name, key_heads, buckets, monkeypatch, assert_close_guarded):
    if buckets == "cut":
        monkeypatch.setattr(stream, "_CHUNK", 2)
        monkeypatch.setattr(attention, "SMALL_CELLS", 0)
    monkeypatch.setattr(stream, "SMALL_CELLS", 0)
    if buckets == "one_each":
        monkeypatch.setattr(attention, "SMALL_CELLS", 0)
        monkeypatch.setattr(stream, "SMALL_CELLS", 0)
        monkeypatch.setattr(stream, "_MAX_BUCKET_WASTE", 0.0)
    query, key, value, sinks = leaves(T, key_heads)
    options = options_of(name, sinks)
    sees = dense_mask(SEGMENTS, options.sliding_window)
    got = StreamLayout(SEGMENTS).attend(0, query, key, value, options)
    expected = dense(query, key, value, sees, options)
    assert_close_guarded(got.detach(), expected.detach(), rtol=1e-5)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(7))
    wanted = [query, key, value] + ([sinks] if options.sinks_H is not None else [])
    got_gradients = torch.autograd.grad((got * weight).sum(), wanted)
    expected_gradients = torch.autograd.grad((expected * weight.double()).sum(), wanted)
    for name_of, actual, exact in zip(
        ("query", "key", "value", "sinks"), got_gradients, expected_gradients, strict=False
    ):
        # With a window of one key and no sink the softmax is 1 whatever the scores: their gradient is 0.
        if name == "window_of_one" and name_of in ("query", "key"):
            assert float(actual.abs().max()) < 1e-6
        else:
            assert_close_guarded(actual, exact, rtol=1e-5)


@pytest.mark.parametrize(
    "broken",
    [
        # A completion that does not see its prompt, one that sees another's, two rows run together, and a
        # branch that grows from its prompt and not from what others begin with.
        (*SEGMENTS[:1], StreamSegment(start=9, length=6), *SEGMENTS[2:]),
        (*SEGMENTS[:5], StreamSegment(start=33, length=3, parent=0), *SEGMENTS[6:]),
        (*SEGMENTS[:7], StreamSegment(start=44, length=1, parent=6), *SEGMENTS[8:]),
        (*SEGMENTS[:11], StreamSegment(start=54, length=2, parent=8), *SEGMENTS[12:]),
    ],
)
def test_another_layout_would_fail_the_comparison(broken):
    query, key, value, sinks = leaves(T, K)
    options = options_of("plain", sinks)
    expected = dense(query, key, value, dense_mask(SEGMENTS, None), options)
    got = StreamLayout(broken).attend(0, query, key, value, options)
    assert float((got - expected).detach().abs().max()) > 1e-2


def test_every_segment_is_in_one_bucket_and_buckets_stay_tight():
    segments = [StreamSegment(start=0, length=300)]
    for length in (1, 2, 250, 240, 3, 260, 120):
        last = segments[-1]
        segments.append(StreamSegment(start=last.start + last.length, length=length, parent=0))
    chunks = stream._chunks(segments)
    buckets = stream._plan_buckets(chunks, stream.SMALL_CELLS)
    assert sorted(map(id, (p for b in buckets for p in b))) == sorted(map(id, chunks))
    assert 2 <= len(buckets) < len(chunks)
    needed = sum(p.queries * p.keys for p in chunks)
    padded = sum(len(b) * max(p.queries for p in b) * max(p.keys for p in b) for b in buckets)
    assert needed <= padded <= 1.5 * needed


def test_long_completions_are_cut():
    segments = [StreamSegment(start=0, length=10), StreamSegment(start=10, length=1000, parent=0)]
    chunks = stream._chunks(segments)
    assert [p.queries for p in chunks] == [10, 256, 256, 256, 232]
    assert sum(p.queries * p.keys for p in chunks[1:]) < 0.65 * 1000 * 1010


def test_the_registered_function_needs_a_layout():
    function = AttentionInterface._global_mapping[ATTENTION_NAME]
    query, key, value, _ = leaves(4, H)
    with pytest.raises(LayoutLostError, match="without the layout"):
        function(torch.nn.Identity(), query, key, value, None)


def test_the_registered_function_passes_on_what_the_layer_asks(assert_close_guarded):
    function = AttentionInterface._global_mapping[ATTENTION_NAME]
    module = torch.nn.Identity().eval()
    module.layer_idx = 3
    seen = []

    class Spy:
        def attend(self, layer, query, key, value, options):
            seen.append((layer, options))
            return query

    query, key, value, sinks = leaves(4, H)
    out, weights = function(
        module, query, key, value, None, scaling=0.5, dropout=0.9, sliding_window=2, softcap=3.0, s_aux=sinks,
        covey_layout=Spy(), position_ids=None,
    )  # fmt: skip
    assert weights is None
    assert torch.equal(out, query.transpose(1, 2))
    function(module.train(), query, key, value, None, dropout=0.9, covey_layout=Spy())
    (layer, options), (_, training) = seen
    assert layer == 3
    assert options == AttentionOptions(scaling=0.5, sliding_window=2, softcap=3.0, sinks_H=sinks, dropout=0.0)
    # Without a scaling of its own a layer has 1 / sqrt(width); dropout belongs to training.
    assert (training.scaling, training.dropout) == (pytest.approx(D**-0.5), 0.9)


class _Asked(TorchFunctionMode):
    """How torch's attention was called: grouped keys, a mask, its own causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            is_grouped = args[0].shape[1] != args[1].shape[1]
            assert kwargs["enable_gqa"] == is_grouped
            self.calls.append((is_grouped, kwargs["attn_mask"] is not None, kwargs["is_causal"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_a_gpu_is_asked_for_nothing_that_its_fused_kernels_lack(dtype, window):
    """A mask or float32 with fewer keys than queries goes to torch's math kernel, without a word."""
    segments = (
        StreamSegment(start=0, length=300),
        StreamSegment(start=300, length=40, parent=0),
        StreamSegment(start=340, length=90, parent=0),
        StreamSegment(start=430, length=120),
        StreamSegment(start=550, length=7),
    )
    tensors = (torch.empty(1, heads, 557, D, dtype=dtype, device="meta") for heads in (H, K, K))
    with _Asked() as asked:
        options = AttentionOptions(scaling=0.3, sliding_window=window)
        out = StreamLayout(segments, "meta").attend(0, *tensors, options)
    assert out.shape == (1, H, 557, D) and len(asked.calls) > 2
    for is_grouped, is_masked, is_causal in asked.calls:
        assert is_masked != is_causal
        assert not is_grouped or (not is_masked and dtype == torch.bfloat16)
    # Prompts need no mask, whatever their lengths; what goes on from them does.
    assert {is_masked for _, is_masked, _ in asked.calls} == ({True} if window else {False, True})
    if dtype == torch.bfloat16 and window is None:
        assert {is_grouped for is_grouped, is_masked, _ in asked.calls if not is_masked} == {True}


@pytest.mark.parametrize("repeats", [1, 2])
def test_prompts_of_other_lengths_need_no_mask(repeats, monkeypatch, assert_close_guarded):
    """Padding is behind a row's own tokens, so the causal mask hides it; and keys may be repeated."""
    monkeypatch.setattr(attention, "SMALL_CELLS", 0)
    monkeypatch.setattr(stream, "SMALL_CELLS", 0)
    monkeypatch.setattr(stream, "_MAX_BUCKET_WASTE", 100.0)
    if repeats > 1:
        monkeypatch.setattr(attention, "takes_groups", lambda query, bias: False)
    segments = [StreamSegment(start=s, length=n) for s, n in ((0, 9), (9, 4), (13, 1), (14, 12))]
    query, key, value, _ = leaves(26, K)
    with _Asked() as asked:
        got = StreamLayout(segments).attend(0, query, key, value, options_of("plain", None))
    assert asked.calls == [(repeats == 1, False, True)]
    expected = dense(query, key, value, dense_mask(segments, None), options_of("plain", None))
    assert_close_guarded(got.detach(), expected.detach(), rtol=1e-5)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad((got * weight).sum(), [query, key, value])
    due = torch.autograd.grad((expected * weight.double()).sum(), [query, key, value])
    for actual, exact in zip(found, due, strict=True):
        assert_close_guarded(actual, exact, rtol=1e-5)
