"""A stream draws the same prompts whatever was asked before, and holds no more than its blocks."""

from __future__ import annotations

import json

import pytest

from covey.data.errors import DataError
from covey.data.rows import PromptOptions
from covey.data.sources import parse_source, stream_rows
from covey.data.stream import BLOCK, PromptStream

SIZE = 2 * BLOCK + 100


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """2,148 rows, of which every seventh has no prompt."""
    path = tmp_path_factory.mktemp("stream") / "rows.jsonl"
    rows = [{"prompt": None if i % 7 == 0 else str(i), "row": i} for i in range(SIZE)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def stream(file, codec):
    def make(text=file, *, seed=3, shuffle=True, max_length=None, columns=None):
        return PromptStream(
            stream_rows([parse_source(str(text))], use_hf=True, offline=True),
            codec,
            max_length=max_length,
            options=PromptOptions(),
            seed=seed,
            shuffle=shuffle,
            columns=columns,
        )

    return make


USABLE = [i for i in range(SIZE) if i % 7]


def ids(prompts):
    return [p.id for p in prompts]


def test_in_the_order_of_the_data_and_round_again(stream):
    drawn = stream(shuffle=False)
    taken = [drawn.take(i, 500) for i in range(5)]
    flat = [i for part in taken for i in ids(part)]
    assert flat == (USABLE + USABLE)[:2500]
    # 1,841 usable prompts: the fourth rollout begins in the first epoch and ends in the second.
    assert len(USABLE) == 1841
    assert [part[0].origin.epoch for part in taken] == [0, 0, 0, 0, 1]
    assert {p.origin for p in taken[3]} == {taken[3][0].origin}
    assert [part[0].origin.rollout for part in taken] == [0, 1, 2, 3, 4]
    assert taken[2][0].text == str(taken[2][0].id)
    assert taken[2][0].columns == {"row": taken[2][0].id}


def test_rows_are_permuted_within_their_block_only(stream):
    drawn = stream()
    epoch = [i for n in range(1841) for i in ids(drawn.take(n, 1))]
    for start in range(0, SIZE, BLOCK):
        block = [i for i in USABLE if start <= i < start + BLOCK]
        part, epoch = epoch[: len(block)], epoch[len(block) :]
        assert sorted(part) == block
        assert part != block


def test_each_block_has_an_order_of_its_own(codec):
    def rows():
        yield from ({"prompt": str(i)} for i in range(2 * BLOCK))

    drawn = PromptStream(rows, codec, max_length=None, options=PromptOptions(), seed=0, shuffle=True)
    first, second = ids(drawn.take(0, BLOCK)), ids(drawn.take(1, BLOCK))
    assert sorted(second) == [i + BLOCK for i in sorted(first)]
    assert second != [i + BLOCK for i in first]


def test_a_rollout_is_drawn_the_same_whatever_was_asked_before(stream):
    forwards = stream()
    drawn = [forwards.take(i, 300) for i in range(9)]
    assert stream().take(8, 300) == drawn[8]
    mixed = stream()
    for i in (5, 2, 2, 7, 0, 8):
        assert mixed.take(i, 300) == drawn[i]


def test_epochs_and_seeds_differ(stream):
    one = stream()
    first, second = ids(one.take(0, 1841)), ids(one.take(1, 1841))
    assert first != second
    assert sorted(first) == sorted(second) == USABLE
    assert ids(stream(seed=4).take(0, 1841)) != first


def test_the_same_prompts_in_another_order(stream):
    """Read on its own: what the first has drawn stays where it is."""
    first = stream(shuffle=False)
    begun = ids(first.take(0, 10))
    again = first.reordered(5)
    assert ids(again.take(0, len(USABLE))) == ids(stream(seed=5).take(0, len(USABLE))) != USABLE
    assert begun + ids(first.take(1, 10)) == USABLE[:20]


def test_what_is_left_out_is_counted_once(stream):
    drawn = stream(max_length=3)
    drawn.take(0, 10)
    assert drawn.num_rows_read == BLOCK
    for rollout in (3, 0, 5, 9):
        drawn.take(rollout, 300)
    # Of the rows that have a prompt, those of four digits (1,000 to 2,147) are too long.
    too_long = sum(i >= 1000 for i in USABLE)
    assert drawn.left_out == {"no_prompt": SIZE - 1841, "too_long": too_long}
    assert drawn.num_rows_read == SIZE


def test_the_first_block_says_what_can_be_known(stream):
    table = stream().first_block()
    assert len(table.entries) == sum(i < BLOCK for i in USABLE)
    assert table.columns == ("prompt", "row")


def test_a_cap_ends_every_epoch(stream, file):
    drawn = stream(f"{file}#15", shuffle=False)
    assert ids(drawn.take(0, 15)) == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 1, 2, 3]


def test_columns_are_renamed(stream):
    prompt = stream(columns={"row": "solution"}, shuffle=False).take(0, 1)[0]
    assert prompt.columns == {"solution": 1}
    with pytest.raises(DataError, match="'answer', but no row has this column"):
        stream(columns={"answer": "solution"}).first_block()


def test_a_stream_without_a_prompt_does_not_run_for_ever(stream, tmp_path):
    empty = tmp_path / "x.jsonl"
    empty.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"no usable prompt.*2 no_prompt"):
        stream(empty).take(0, 1)
    empty.write_text("")
    with pytest.raises(DataError, match="it contains no rows"):
        stream(empty).take(0, 1)


def test_a_few_blocks_are_held(codec):
    alive = {"read": 0}

    def rows():
        for i in range(50 * BLOCK):
            alive["read"] = i
            yield {"prompt": str(i)}

    drawn = PromptStream(rows, codec, max_length=None, options=PromptOptions(), seed=0, shuffle=True)
    drawn.take(0, 8)
    assert alive["read"] < BLOCK
    drawn.take(200, 8)
    assert alive["read"] < 2 * BLOCK


def test_a_row_behind_the_first_block_is_refused_when_it_comes(codec):
    rows = [{"question": f"{n}?", "solution": "1"} for n in range(BLOCK)]
    bad = {"messages": [{"role": "user", "content": "Q?"}, {"role": "model", "content": "1"}]}
    stream = PromptStream(
        lambda: iter([*rows, bad]), codec, max_length=None, options=PromptOptions(), seed=0, shuffle=False
    )
    assert stream.first_block().left_out == {}
    assert [row["question"] for row in stream.first_rows()[:2]] == ["0?", "1?"]
    assert len(stream.take(0, BLOCK)) == BLOCK
    said = f"row {BLOCK + 1} of the stream cannot be used \\(with a message of an"
    with pytest.raises(DataError, match=said):
        stream.take(1, BLOCK)
