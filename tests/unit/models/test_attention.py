"""Attention over streams against a dense mask over the whole stream: values and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from covey.models import attention
from covey.models.attention import ATTENTION_NAME, AttentionOptions, StreamLayout
from covey.types import StreamSegment

H, K, D = 4, 2, 8

# Two families (prompts 9 and 5 long with completions), a packed row and a row of one token.
SEGMENTS = (
    StreamSegment(start=0, length=9),
    StreamSegment(start=9, length=6, parent=0),
    StreamSegment(start=15, length=1, parent=0),
    StreamSegment(start=16, length=12, parent=0),
    StreamSegment(start=28, length=5),
    StreamSegment(start=33, length=3, parent=4),
    StreamSegment(start=36, length=8),
    StreamSegment(start=44, length=1),
)
T = 45

OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 4},
    "window_of_one": {"sliding_window": 1},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": True},
    "everything": {"sliding_window": 5, "softcap": 1.5, "sinks": True},
}


def dense_mask(segments: tuple[StreamSegment, ...], window: int | None) -> torch.Tensor:
    """Which key each token sees, token by token, from the words of the definition."""
    total = sum(s.length for s in segments)
    sees = torch.zeros(total, total, dtype=torch.bool)
    for s in segments:
        parent = None if s.parent is None else segments[s.parent]
        before = 0 if parent is None else parent.length
        for i in range(s.length):
            keys = {s.start + j: before + j for j in range(i + 1)}
            if parent is not None:
                keys |= {parent.start + j: j for j in range(parent.length)}
            for key, position in keys.items():
                sees[s.start + i, key] = window is None or before + i - position < window
    return sees


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """One head at a time in float64."""
    out = []
    for h in range(query.shape[1]):
        k = h * key.shape[1] // query.shape[1]
        scores = query[0, h].double() @ key[0, k].double().t() * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = torch.where(sees, scores.exp(), 0.0)
        sink = 0.0 if options.sinks_H is None else options.sinks_H[h].double().exp()
        out.append(weights / (weights.sum(-1, keepdim=True) + sink) @ value[0, k].double())
    return torch.stack(out)[None]


def leaves(total: int, key_heads: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((1, H, total, D), (1, key_heads, total, D), (1, key_heads, total, D), (H,))
    return [torch.randn(s, generator=g).requires_grad_() for s in shapes]


def options_of(name: str, sinks: torch.Tensor) -> AttentionOptions:
    fields = dict(OPTIONS[name])
    return AttentionOptions(scaling=0.3, sinks_H=sinks if fields.pop("sinks", False) else None, **fields)


@pytest.mark.parametrize("key_heads", [H, K, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("buckets", ["usual", "one_each"])
def test_attend_against_a_dense_mask(name, key_heads, buckets, monkeypatch, assert_close_guarded):
    if buckets == "one_each":
        monkeypatch.setattr(attention, "_SMALL_CELLS", 0)
        monkeypatch.setattr(attention, "_MAX_BUCKET_WASTE", 0.0)
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
        # A completion that does not see its prompt, one that sees another's, and two rows run together.
        (*SEGMENTS[:1], StreamSegment(start=9, length=6), *SEGMENTS[2:]),
        (*SEGMENTS[:5], StreamSegment(start=33, length=3, parent=0), *SEGMENTS[6:]),
        (*SEGMENTS[:6], StreamSegment(start=36, length=9)),
    ],
)
def test_another_layout_would_fail_the_comparison(broken):
    query, key, value, sinks = leaves(T, K)
    options = options_of("plain", sinks)
    expected = dense(query, key, value, dense_mask(SEGMENTS, None), options)
    got = StreamLayout(broken).attend(0, query, key, value, options)
    assert float((got - expected).detach().abs().max()) > 1e-2


@pytest.mark.parametrize("seed", range(5))
def test_random_streams(seed, assert_close_guarded):
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    segments: list[StreamSegment] = []
    total = 0
    for _ in range(draw(1, 5)):
        parent = len(segments)
        for i, length in enumerate([draw(1, 40), *(draw(1, 30) for _ in range(draw(0, 5)))]):
            segments.append(StreamSegment(start=total, length=length, parent=parent if i else None))
            total += length
    query, key, value, sinks = leaves(total, K, seed)
    options = options_of(list(OPTIONS)[seed % len(OPTIONS)], sinks)
    sees = dense_mask(tuple(segments), options.sliding_window)
    got = StreamLayout(segments).attend(0, query, key, value, options)
    assert_close_guarded(got.detach(), dense(query, key, value, sees, options).detach(), rtol=1e-5)


def test_every_segment_is_in_one_bucket_and_buckets_stay_tight():
    segments = [StreamSegment(start=0, length=300)]
    for length in (1, 2, 250, 240, 3, 260, 120):
        last = segments[-1]
        segments.append(StreamSegment(start=last.start + last.length, length=length, parent=0))
    buckets = attention._plan_buckets(segments)
    assert sorted(i for b in buckets for i in b) == list(range(len(segments)))
    assert 2 <= len(buckets) < len(segments)
    needed = sum(s.length * attention._key_length(segments, i) for i, s in enumerate(segments))
    padded = sum(
        len(b) * max(segments[i].length for i in b) * max(attention._key_length(segments, i) for i in b)
        for b in buckets
    )
    assert needed <= padded <= 1.5 * needed


def test_the_registered_function_needs_a_layout():
    function = AttentionInterface._global_mapping[ATTENTION_NAME]
    query, key, value, _ = leaves(4, H)
    with pytest.raises(RuntimeError, match="without a layout"):
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
