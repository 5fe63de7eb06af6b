"""The three layouts of a stream, on rows small enough to write the whole answer out."""

from __future__ import annotations

import pytest
import torch

from covey.token_streams import Row, build_stream
from covey.types import StreamSegment
from support.rows import random_rows


def row(prompt: list[int], own: list[int], key: int, trained: list[bool] | None = None) -> Row:
    return Row(
        token_ids=prompt + own,
        is_trained=trained if trained is not None else [False] * len(prompt) + [True] * len(own),
        prompt_length=len(prompt),
        prompt_key=key,
    )


def seg(start: int, length: int, parent: int | None = None) -> StreamSegment:
    return StreamSegment(start=start, length=length, parent=parent)


# Two siblings of the prompt 1 2 3, with completions 4 5 and 6, and one row of the prompt 7 with completion
# 8 9. The last token of a row predicts nothing: rows are 1 2 3 4, 1 2 3 and 7 8 long in the forward pass.
ROWS = [row([1, 2, 3], [4, 5], 0), row([1, 2, 3], [6], 0), row([7], [8, 9], 1)]


def as_lists(rows: list[Row], kind: str) -> dict[str, object]:
    stream = build_stream(rows, kind)
    tensors = ("tokens_T", "positions_T", "context_U", "context_N", "target_N", "sequence_N")
    assert {getattr(stream, name).dtype for name in tensors} == {torch.int64}
    return {
        "tokens": stream.tokens_T.tolist(),
        "positions": stream.positions_T.tolist(),
        "segments": stream.segments,
        "num_rows": stream.num_rows,
        "predictor": stream.context_U[stream.context_N].tolist(),
        "target": stream.target_N.tolist(),
        "sequence": stream.sequence_N.tolist(),
    }


def test_padded():
    assert as_lists(ROWS, "padded") == {
        "tokens": [1, 2, 3, 4, 1, 2, 3, 0, 7, 8, 0, 0],
        "positions": [0, 1, 2, 3] * 3,
        "segments": (seg(0, 4), seg(4, 4), seg(8, 4)),
        "num_rows": 3,
        "predictor": [2, 3, 6, 8, 9],
        "target": [4, 5, 6, 8, 9],
        "sequence": [0, 0, 1, 2, 2],
    }


def test_packed():
    assert as_lists(ROWS, "packed") == {
        "tokens": [1, 2, 3, 4, 1, 2, 3, 7, 8],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 1],
        "segments": (seg(0, 4), seg(4, 3), seg(7, 2)),
        "num_rows": 1,
        "predictor": [2, 3, 6, 7, 8],
        "target": [4, 5, 6, 8, 9],
        "sequence": [0, 0, 1, 2, 2],
    }


def test_prefix():
    # The second sibling trains one token, which the prompt's last position predicts: it has no segment of
    # its own.
    assert as_lists(ROWS, "prefix") == {
        "tokens": [1, 2, 3, 4, 7, 8],
        "positions": [0, 1, 2, 3, 0, 1],
        "segments": (seg(0, 3), seg(3, 1, 0), seg(4, 1), seg(5, 1, 2)),
        "num_rows": 1,
        "predictor": [2, 3, 2, 4, 5],
        "target": [4, 5, 6, 8, 9],
        "sequence": [0, 0, 1, 2, 2],
    }


def test_prefix_keeps_row_order_where_siblings_are_apart():
    got = as_lists([ROWS[0], ROWS[2], row([1, 2, 3], [6, 5, 4], 0)], "prefix")
    # Families in order of their first row: prompt 1 2 3, then 4, then 6 5, then prompt 7, then 8.
    assert got["tokens"] == [1, 2, 3, 4, 6, 5, 7, 8]
    assert got["positions"] == [0, 1, 2, 3, 3, 4, 0, 1]
    assert got["segments"] == (seg(0, 3), seg(3, 1, 0), seg(4, 2, 0), seg(6, 1), seg(7, 1, 3))
    assert got["target"] == [4, 5, 8, 9, 6, 5, 4]
    assert got["predictor"] == [2, 3, 6, 7, 2, 4, 5]
    assert got["sequence"] == [0, 0, 1, 1, 2, 2, 2]


def test_what_siblings_begin_with_is_there_once():
    # Completions 3 4 5 (twice), 3 4 6 7, 8 9 and 3: without their last tokens 3 4, 3 4 6, 8 and none.
    rows = [row([1, 2], own, 0) for own in ([3, 4, 5], [3, 4, 6, 7], [8, 9], [3, 4, 5], [3])]
    assert as_lists([*rows, row([1, 2], [3, 4], 1)], "prefix") == {
        "tokens": [1, 2, 3, 4, 6, 8, 1, 2, 3],
        "positions": [0, 1, 2, 3, 4, 2, 0, 1, 2],
        "segments": (seg(0, 2), seg(2, 2, 0), seg(4, 1, 1), seg(5, 1, 0), seg(6, 2), seg(8, 1, 4)),
        "num_rows": 1,
        "predictor": [1, 2, 3, 1, 2, 3, 4, 1, 5, 1, 2, 3, 1, 7, 6 + 2],
        "target": [3, 4, 5, 3, 4, 6, 7, 8, 9, 3, 4, 5, 3, 3, 4],
        "sequence": [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4, 5, 5],
    }


@pytest.mark.parametrize("seed", range(6))
def test_a_tree_spells_every_row_and_nothing_twice(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rows = [
        row([family, *prompt], draw(0, 3, length), family)
        for family, prompt in enumerate((draw(0, 3, 4), draw(0, 3, 1), []))
        for length in draw(1, 12, 9)
    ]
    stream = build_stream(rows, "prefix")
    tokens, spelt = stream.tokens_T.tolist(), {}
    begins: dict[int, tuple[int, ...]] = {}
    for number, segment in enumerate(stream.segments):
        begin = () if segment.parent is None else begins[segment.parent]
        for place in range(segment.start, segment.start + segment.length):
            begin = (*begin, tokens[place])
            spelt[place] = begin
            assert stream.positions_T[place] == len(begin) - 1
        begins[number] = begin
    assert sorted(spelt) == list(range(len(tokens)))
    needed = {tuple(r.token_ids[:n]) for r in rows for n in range(1, len(r.token_ids))}
    assert sorted(spelt.values()) == sorted(needed)
    wanted = [tuple(r.token_ids[:n]) for r in rows for n in range(r.prompt_length, len(r.token_ids))]
    assert [spelt[place] for place in stream.context_U[stream.context_N].tolist()] == wanted


@pytest.mark.parametrize(
    ("kind", "tokens", "predictor"),
    [
        ("padded", [1, 2, 3, 4, 5, 6], [2, 5]),
        ("packed", [1, 2, 3, 4, 5, 6], [2, 5]),
        ("prefix", [1, 2, 3, 4, 5, 6], [2, 5]),
    ],
)
def test_a_tools_tokens_are_read_and_not_trained(kind, tokens, predictor):
    # Prompt 1 2 3, the model's 4, a tool's 5 6, the model's 7, and an untrained 8 that nothing needs.
    is_trained = [False, False, False, True, False, False, True, False]
    got = as_lists([row([1, 2, 3], [4, 5, 6, 7, 8], 0, is_trained)], kind)
    assert (got["tokens"], got["predictor"], got["target"]) == (tokens, predictor, [4, 7])


@pytest.mark.parametrize("kind", ["padded", "packed", "prefix"])
def test_a_row_with_nothing_to_train(kind):
    # It trains nothing and moves no other row's tokens; alone it still is a stream of at least one token.
    nothing = row([1, 2, 3], [], 0)
    alone = as_lists([nothing], kind)
    assert alone["target"] == alone["predictor"] == alone["sequence"] == []
    assert len(alone["tokens"]) >= 1
    assert alone["tokens"] == [1, 2, 3][: len(alone["tokens"])]
    both = as_lists([nothing, ROWS[2]], kind)
    assert both["target"] == [8, 9]
    assert both["sequence"] == [1, 1]
    assert [both["tokens"][i] for i in both["predictor"]] == [7, 8]


@pytest.mark.parametrize("kind", ["padded", "packed", "prefix"])
def test_the_first_token_cannot_be_trained(kind):
    with pytest.raises(ValueError, match="first token"):
        build_stream([row([1], [2], 0, [True, True])], kind)


@pytest.mark.parametrize("kind", ["padded", "packed", "prefix"])
def test_every_target_follows_its_predictor(kind):
    rows = random_rows((11, (7, 4, 1)), (6, (9, 5)), (1, (1, 3)))
    stream = build_stream(rows, kind)
    # Whatever the layout: the predictor holds the token before the target, at the position before it.
    token, position = [], []
    for r in rows:
        trained = [i for i, on in enumerate(r.is_trained) if on]
        token += [r.token_ids[i - 1] for i in trained]
        position += [i - 1 for i in trained]
    assert stream.tokens_T[stream.context_U[stream.context_N]].tolist() == token
    assert stream.positions_T[stream.context_U[stream.context_N]].tolist() == position
    assert stream.target_N.tolist() == [t for r in rows for t in r.token_ids[r.prompt_length :]]
    # Segments cover the stream in order, without gaps.
    ends = [s.start + s.length for s in stream.segments]
    assert [s.start for s in stream.segments] == [0, *ends[:-1]]
    assert ends[-1] == len(stream.tokens_T)


def test_sharing_saves_what_it_says():
    rows = random_rows((11, (7, 4, 1)), (6, (9, 5)))
    sizes = {kind: len(build_stream(rows, kind).tokens_T) for kind in ("padded", "packed", "prefix")}
    # padded 5 rows of 11 + 6; packed drops each row's last token; prefix holds 11 and 6 once.
    assert sizes == {"padded": 85, "packed": 17 + 14 + 11 + 14 + 10, "prefix": 11 + 6 + 3 + 0 + 6 + 8 + 4}
