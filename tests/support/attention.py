"""Attention over a stream written out token by token in float64: what every implementation is held to."""

from __future__ import annotations

import itertools

import torch

from covey.kernels.protocol import AttentionOptions
from covey.kernels.torch_.attention import attend_masked
from covey.types import StreamSegment

H, K, D = 4, 2, 8
"""Query heads, key heads, head width."""

# Two families (prompts 9 and 5 long with completions), a packed row, a row of one token, and a tree: of what
# grows from its prompt some parts once more, and of that some again.
SEGMENTS = (
    StreamSegment(start=0, length=9),
    StreamSegment(start=9, length=6, parent=0),
    StreamSegment(start=15, length=1, parent=0),
    StreamSegment(start=16, length=12, parent=0),
    StreamSegment(start=28, length=5),
    StreamSegment(start=33, length=3, parent=4),
    StreamSegment(start=36, length=8),
    StreamSegment(start=44, length=1),
    StreamSegment(start=45, length=4),
    StreamSegment(start=49, length=2, parent=8),
    StreamSegment(start=51, length=3, parent=9),
    StreamSegment(start=54, length=2, parent=9),
    StreamSegment(start=56, length=1, parent=11),
    StreamSegment(start=57, length=4, parent=11),
    StreamSegment(start=61, length=2, parent=8),
)
T = 63

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
        above, ancestor = [], s.parent
        while ancestor is not None:
            of = segments[ancestor]
            above = [*range(of.start, of.start + of.length), *above]
            ancestor = of.parent
        for i in range(s.length):
            keys = [*above, *range(s.start, s.start + i + 1)]
            for position, key in enumerate(keys):
                sees[s.start + i, key] = window is None or len(keys) - 1 - position < window
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
    """Queries, keys, values and sinks of a stream, drawn at random."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((1, H, total, D), (1, key_heads, total, D), (1, key_heads, total, D), (H,))
    return [torch.randn(s, generator=g).requires_grad_() for s in shapes]


def options_of(name: str, sinks: torch.Tensor) -> AttentionOptions:
    """A case of OPTIONS."""
    fields = dict(OPTIONS[name])
    return AttentionOptions(scaling=0.3, sinks_H=sinks if fields.pop("sinks", False) else None, **fields)


def random_segments(seed: int) -> tuple[StreamSegment, ...]:
    """Up to four families of a prompt and up to five segments that grow from it, or from one another."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    segments: list[StreamSegment] = []
    total = 0
    for _ in range(draw(1, 5)):
        path: list[int] = []
        for i, length in enumerate([draw(1, 40), *(draw(1, 30) for _ in range(draw(0, 6)))]):
            # On the way from the root to the latest segment, anyone may have the next.
            path = path[: draw(1, len(path) + 1)] if i else []
            segments.append(StreamSegment(start=total, length=length, parent=path[-1] if i else None))
            path.append(len(segments) - 1)
            total += length
    return tuple(segments)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    """flash_attn_varlen_func as its docstring describes it, a row at a time: causal masks and windows are
    aligned to the end of queries and keys."""
    assert causal and dropout_p == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    rows, seen = (list(itertools.pairwise(ends.tolist())) for ends in (cu_seqlens_q, cu_seqlens_k))
    assert max(b - a for a, b in rows) == max_seqlen_q
    assert max(b - a for a, b in seen) == max_seqlen_k
    assert (rows[-1][1], seen[-1][1]) == (len(q), len(k))
    out = []
    for (first, end), (first_key, end_key) in zip(rows, seen, strict=True):
        key = torch.arange(end_key - first_key)
        last = torch.arange(end - first)[:, None] + len(key) - (end - first)
        visible = last >= key
        if window_size != (-1, -1):
            visible &= key >= last - window_size[0]
        options = AttentionOptions(scaling=softmax_scale, softcap=softcap or None)
        cuts = (q[first:end], k[first_key:end_key], v[first_key:end_key])
        parts = (x.transpose(0, 1)[None] for x in cuts)
        bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        out.append(attend_masked(*parts, bias[None, None], options)[0].transpose(0, 1))
    return torch.cat(out)
