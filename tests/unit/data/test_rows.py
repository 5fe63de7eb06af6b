"""Rows and the prompts they hold: which column, what is templated, what is left out and counted."""

from __future__ import annotations

import json

import pytest

from covey.data.rows import PROMPT_COLUMNS, DataError, prompt_table, read_rows
from covey.types import Origin

USER = {"role": "user", "content": "What is 1+2?"}
RENDERED = "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n"


def only(row, codec):
    (entry,) = prompt_table([row], codec, max_length=None).entries
    return entry


# -- which column ------------------------------------------------------------------------------------------


# An instruction has the input below it (tests of forms).
@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 6, 8])
def test_the_first_column_present_is_the_prompt(first, codec):
    def value(name):
        is_list = name in ("messages", "conversations", "conversation")
        return [{"role": "user", "content": name}] if is_list else name

    row = {name: value(name) for name in reversed(PROMPT_COLUMNS[first:])} | {"solution": "3"}
    entry = only(row, codec)
    assert PROMPT_COLUMNS[first] in entry.text
    # Every other column, prompts that were not chosen included, goes to the rewards.
    assert entry.columns == {k: v for k, v in row.items() if k != PROMPT_COLUMNS[first]}


@pytest.mark.parametrize("empty", [None, "", []])
def test_an_empty_column_is_none(empty, codec):
    assert only({"prompt": empty, "question": "Q?"}, codec).text.startswith("<|im_start|>user\nQ?")


# -- what the model sees -----------------------------------------------------------------------------------


def test_a_prompt_string_is_as_it_is(codec):
    entry = only({"prompt": "  What is 1+2?\n"}, codec)
    assert entry.text == "  What is 1+2?\n"
    assert entry.messages is None
    assert codec.tokenizer.decode(list(entry.token_ids), skip_special_tokens=False) == entry.text


def test_a_trailing_assistant_turn_is_the_gold_and_is_dropped(codec):
    gold = {"role": "assistant", "content": "3"}
    assert only({"messages": [USER, gold]}, codec).text == RENDERED
    assert only({"messages": [USER, gold, gold]}, codec).text == RENDERED
    # One in the middle is part of the conversation.
    entry = only({"messages": [USER, gold, USER]}, codec)
    assert entry.messages == (USER, gold, USER)
    assert entry.text == RENDERED + "3<|im_end|>\n" + RENDERED


def test_the_rows_are_not_changed(codec):
    row = {"messages": [USER, {"role": "assistant", "content": "3"}], "solution": "3"}
    before = json.dumps(row)
    prompt_table([row], codec, max_length=None)
    assert json.dumps(row) == before


# -- what is left out --------------------------------------------------------------------------------------


def test_too_long_is_left_out_and_counted(codec):
    rows = [{"prompt": "1" * n, "solution": n} for n in (3, 6, 5, 9)]  # a digit is a token
    table = prompt_table(rows, codec, max_length=5)
    assert [len(p.token_ids) for p in table.entries] == [3, 5]
    # An id stays the row's number in its source.
    assert [p.id for p in table.entries] == [0, 2]
    assert [p.columns["solution"] for p in table.entries] == [3, 5]
    assert table.left_out == {"too_long": 2}
    assert (table.longest, table.longest_in_data) == (5, 9)


def test_a_prompt_is_marked_with_its_draw(codec):
    table = prompt_table([{"prompt": "1"}, {"prompt": "2", "solution": "x"}], codec, max_length=None)
    origin = Origin(epoch=1, rollout=5, attempt=2)
    taken = table.take(1, origin)
    assert taken.origin == origin
    assert (taken.id, taken.text, taken.columns) == (1, "2", {"solution": "x"})
    assert taken.token_ids == tuple(table.entries[1].token_ids)


# -- files -------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "a", "solution": "1"}, {"prompt": "é\u2028", "solution": "2"}]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl(tmp_path):
    text = "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS) + "\n\n"
    assert read_rows(write(tmp_path / "x.jsonl", text)) == ROWS


@pytest.mark.parametrize(
    "text",
    ['[{"a": 1},\n {"a": 2}]', '{"a": 1}\n{"a": 2}\n', '{\n"a": 1}\n{\n"a":\n2}', '\ufeff {"a": 1} {"a": 2}'],
)
def test_json_is_a_list_or_objects_in_a_row(text, tmp_path):
    assert read_rows(write(tmp_path / "x.json", text)) == [{"a": 1}, {"a": 2}]


def test_json_keeps_what_a_table_would_change(tmp_path):
    rows = [{"a": {"b": 1}, "t": "\ud83d"}, {"a": {"c": None}, "n": 2**70}]
    assert read_rows(write(tmp_path / "x.json", json.dumps(rows))) == rows


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_another_encoding_is_named(name, tmp_path):
    for encoding in ("utf-16", "utf-32"):
        (tmp_path / name).write_bytes("question,solution\na,b\n".encode(encoding))
        with pytest.raises(DataError, match=f"is {encoding.upper()} text, not UTF-8"):
            read_rows(tmp_path / name)
    (tmp_path / name).write_bytes('{"question": "ä"}\nä'.encode("gb18030"))
    with pytest.raises(DataError, match="UTF-8"):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_directory_with_half_a_pair_is_refused_with_its_line(name, tmp_path):
    from covey.data.sources import load_source, parse_source, stream_rows

    whole = [{"question": "\U0001f600 \\ud83d", "solution": "1"}]
    (tmp_path / name).write_text("\n".join(json.dumps(row) for row in whole), encoding="utf-8")
    source = parse_source(str(tmp_path))
    assert load_source(source, use_hf=True, seed=0, shuffle=False).rows == whole
    with (tmp_path / name).open("a") as file:
        file.write("\n" + json.dumps({"question": "\ud83d", "solution": "1"}))
    with pytest.raises(DataError, match=rf"{name}, line 2: the text contains half of a surrogate pair"):
        load_source(source, use_hf=True, seed=0, shuffle=False)
    with pytest.raises(DataError, match=rf"{name}, line 2: the text contains half of a surrogate pair"):
        list(stream_rows([source], use_hf=True)())
