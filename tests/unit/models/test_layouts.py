"""Every implementation of stream attention against the dense oracle: values and gradients.

What runs here: masked rows and eager attention as they are; flex attention through torch's own unfused
implementation, which on a CPU it keeps for passes without gradient and here is let through; flash attention
with a stand-in for its kernels that has their documented meaning. bench/gpu.py holds the compiled kernels to
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounterWithBackend

from covey.kernels.protocol import AttentionOptions
from covey.kernels.torch_.kernels import TorchKernels
from covey.models import flash, flex
from covey.models import policy as policy_module
from covey.models.attention import StreamLayout
from covey.models.flex import FlexLayout
from covey.models.layouts import stream_layout
from covey.models.policy import Policy
from covey.models.prefix import Prefix
from covey.models.probe import micro_of
from covey.types import StreamSegment
from support.attention import (
    OPTIONS,
    SEGMENTS,
    H,
    K,
    T,
    dense,
    dense_mask,
    leaves,
    options_of,
    random_segments,
)

KINDS = ("sdpa", "eager", "flex")
# Without parents: what packed rows are.
ROWS = tuple(StreamSegment(start=s.start, length=s.length) for s in SEGMENTS)


@pytest.fixture(autouse=True)
def _flex_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)


def assert_is_dense(kind, segments, name, key_heads, assert_close_guarded, seed=0):
    query, key, value, sinks = leaves(sum(s.length for s in segments), key_heads, seed)
    options = options_of(name, sinks)
    got = stream_layout(kind, segments, "cpu", TorchKernels()).attend(0, query, key, value, options)
    sees = dense_mask(tuple(segments), options.sliding_window)
    expected = dense(query, key, value, sees, options)
    assert_close_guarded(got.detach(), expected.detach(), rtol=1e-5)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(7))
    wanted = {"query": query, "key": key, "value": value}
    if options.sinks_H is not None:
        wanted["sinks"] = sinks
    leaf = list(wanted.values())
    found = torch.autograd.grad((got * weight).sum(), leaf)
    right = torch.autograd.grad((expected * weight.double()).sum(), leaf)
    for which, actual, exact in zip(wanted, found, right, strict=True):
        # With a window of one key and no sink the softmax is 1 whatever the scores: their gradient is 0.
        if name == "window_of_one" and which in ("query", "key"):
            assert float(actual.abs().max()) < 1e-5
        else:
            assert_close_guarded(actual, exact, rtol=1e-5)


@pytest.mark.parametrize("key_heads", [H, K, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_against_a_dense_mask(kind, name, key_heads, assert_close_guarded):
    assert_is_dense(kind, SEGMENTS, name, key_heads, assert_close_guarded)


@pytest.mark.parametrize("key_heads", [H, K, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("segments", [SEGMENTS, ROWS], ids=["shared", "packed"])
def test_flash_against_a_dense_mask(segments, name, key_heads, flash_kernels, assert_close_guarded):
    assert_is_dense("flash_attn", segments, name, key_heads, assert_close_guarded)
    # A sink is out of the kernels' reach.
    assert flash_kernels == ([] if name in ("sinks", "everything") else [T])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [*KINDS, "flash_attn"])
@pytest.mark.usefixtures("flash_kernels")
def test_random_streams(kind, seed, assert_close_guarded):
    name = list(OPTIONS)[seed % len(OPTIONS)]
    assert_is_dense(kind, random_segments(seed), name, K, assert_close_guarded, seed)


def test_float32_takes_masked_rows(flash_kernels, monkeypatch):
    monkeypatch.setattr(flash, "_DTYPES", (torch.bfloat16,))
    query, key, value, _ = leaves(T, K)
    options = AttentionOptions(scaling=0.3)
    got = stream_layout("flash_attn", ROWS, "cpu", TorchKernels()).attend(0, query, key, value, options)
    assert torch.equal(got, StreamLayout(ROWS).attend(0, query, key, value, options))
    assert flash_kernels == []


def test_layers_that_flash_leaves_to_masked_rows_are_of_the_same_pass(flash_kernels):
    """The prompt's own, though its first layers have been kept when the first of these comes."""
    query, key, value, sinks = leaves(9, K)
    plain, other = AttentionOptions(scaling=0.3), AttentionOptions(scaling=0.3, sinks_H=sinks)
    layout = stream_layout("flash_attn", SEGMENTS[:1], "cpu", TorchKernels(), Prefix(9))
    layout.attend(0, query, key, value, plain)
    got = layout.attend(1, query, key, value, other)
    assert flash_kernels == [9]
    assert torch.equal(got, StreamLayout(SEGMENTS[:1]).attend(1, query, key, value, other))


@pytest.mark.parametrize("window", [None, 1, 60, 128, 300])
def test_the_blocks_of_flex_attention_are_those_that_hold_something(window):
    lengths = [
        (300, None),
        (90, 0),
        (40, 0),
        (200, 0),
        (130, None),
        (64, 4),
        (70, 5),
        (90, 4),
        (257, None),
        (128, None),
    ]
    segments, start = [], 0
    for length, parent in lengths:
        segments.append(StreamSegment(start=start, length=length, parent=parent))
        start += length
    layout = FlexLayout(segments, "cpu", compiled=False)
    mask = layout.block_mask(window)
    total = mask.shape[-1]
    assert total % flex.BLOCK == 0 and total - start < flex.BLOCK
    padding = [StreamSegment(start=start, length=total - start)] if total > start else []
    sees = dense_mask((*segments, *padding), window)
    token = torch.arange(total)
    asked = mask.mask_mod(torch.zeros(1), torch.zeros(1), token[:, None], token[None])
    assert torch.equal(asked, sees)
    blocks = sees.unflatten(0, (-1, flex.BLOCK)).unflatten(2, (-1, flex.BLOCK)).sum((1, 3))
    for count, number, wanted in (
        (mask.kv_num_blocks, mask.kv_indices, (blocks > 0) & (blocks < flex.BLOCK**2)),
        (mask.full_kv_num_blocks, mask.full_kv_indices, blocks == flex.BLOCK**2),
    ):
        for row, there in enumerate(wanted):
            listed = number[0, 0, row, : int(count[0, 0, row])]
            assert listed.tolist() == there.nonzero()[:, 0].tolist()
    if window is None:
        assert int(mask.full_kv_num_blocks.sum()) > 0
    assert int((blocks == 0).sum()) > 0


def test_the_compiled_function_serves_every_length(
    monkeypatch, tiny_model, random_rows, assert_close_guarded
):
    """Traced and differentiated as on a GPU, with torch's own operators where there the kernels would be."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(flex, "_COMPILED", torch.compile(torch_flex.flex_attention, backend=counter))
    torch._dynamo.reset()

    def check(rows: list[StreamSegment], name: str) -> None:
        query, key, value, sinks = leaves(sum(s.length for s in rows), K)
        options = options_of(name, sinks)
        got = FlexLayout(rows, "cpu", compiled=True).attend(0, query, key, value, options)
        exact = StreamLayout(rows).attend(0, query, key, value, options)
        assert_close_guarded(got.detach(), exact.detach(), rtol=1e-5)
        found, wanted = (torch.autograd.grad(x.square().sum(), [query, key, value]) for x in (got, exact))
        for actual, expected in zip(found, wanted, strict=True):
            assert_close_guarded(actual, expected, rtol=1e-5)

    prompt = StreamSegment(start=0, length=150)
    child = StreamSegment(start=150, length=90, parent=0)
    tails = [StreamSegment(start=240, length=n) for n in (20, 150, 300, 500)]
    for tail in tails:
        check([prompt, child, tail], "plain")
    # The first length, and one graph for all others.
    assert counter.frame_count == 2
    for name in ("window", "everything", "window"):
        check([prompt, child, tails[1]], name)
    assert counter.frame_count == 4
    with torch.no_grad():
        for tail in tails:
            query, key, value, _ = leaves(240 + tail.length, K)
            layout = FlexLayout([prompt, child, tail], "cpu", compiled=True)
            layout.attend(0, query, key, value, AttentionOptions(scaling=0.3))
    assert counter.frame_count == 5
    # Recomputation goes through it, bit for bit.
    policy = Policy(tiny_model("qwen3")).train()
    monkeypatch.setattr(
        policy_module,
        "stream_layout",
        lambda _, s, d, kernels, prefix: FlexLayout(s, d, compiled=True, prefix=prefix),
    )
    micro = micro_of(random_rows((11, (9, 4, 1)), (5, (8, 2))), "prefix", policy.device)
    results = []
    for kind in ("none", "selective", "full"):
        policy.keep_activations(kind)
        policy.zero_grad(set_to_none=True)
        logprob = policy(micro).logprob_N
        logprob.square().sum().backward()
        results.append([logprob.detach(), *(p.grad.clone() for p in policy.parameters())])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
    torch._dynamo.reset()


def test_dropout_takes_masked_rows(monkeypatch):
    layout = FlexLayout(SEGMENTS, "cpu", compiled=False)
    query, key, value, _ = leaves(T, K)
    options = AttentionOptions(scaling=0.3, dropout=0.5)
    torch.manual_seed(0)
    got = layout.attend(0, query, key, value, options)
    torch.manual_seed(0)
    assert torch.equal(got, StreamLayout(SEGMENTS).attend(0, query, key, value, options))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["eager", "flex", "flash_attn"])
@pytest.mark.usefixtures("flash_kernels")
def test_a_policy_is_the_same_function(kind, family, tiny_model, random_rows, assert_close_guarded):
    policy = Policy(tiny_model(family))
    rows: Sequence[object] = random_rows((11, (9, 4, 1)), (5, (8, 2)))

    def value_and_gradient() -> tuple[torch.Tensor, torch.Tensor]:
        stats = policy(micro_of(rows, policy.stream, policy.device))
        leaf = policy.model.get_input_embeddings().weight
        (gradient,) = torch.autograd.grad(stats.logprob_N.square().sum(), leaf)
        return stats.logprob_N.detach(), gradient

    expected = value_and_gradient()
    policy.attention = kind
    for got, exact in zip(value_and_gradient(), expected, strict=True):
        assert_close_guarded(got, exact, rtol=1e-5)


@pytest.mark.parametrize("follows", [False, True])
def test_flex_always_gets_the_same_strides(follows, monkeypatch):
    """Whatever the length of a stream: other strides would be compiled anew, in the middle of a run."""
    seen = set()

    def attend(query, key, value, **_):
        seen.add(tuple(x.is_contiguous() for x in (query, key, value)))
        return torch.zeros_like(query), SimpleNamespace(lse=torch.zeros(query.shape[:3]))

    for length in (127, 128, 129, 256):
        segments = [StreamSegment(start=0, length=length)]
        prefix = Prefix(length) if follows else None
        layout = FlexLayout(segments, "cpu", compiled=False, prefix=prefix)
        monkeypatch.setattr(layout, "_attend", attend)
        # As a model's heads come: of tokens first.
        heads = [torch.randn(1, length, n, 16).transpose(1, 2) for n in (4, 2, 2)]
        layout.attend(0, *heads, AttentionOptions(scaling=1.0))
    assert seen == {(True, True, True)}
