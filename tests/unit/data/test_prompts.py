"""What becomes of a row's prompt: system turns, raw strings, cuts, opened tags, media, rows left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.data.errors import DataError, TemplateError
from covey.data.prompt import SYSTEM_PRESETS, system_text
from covey.data.rows import PromptOptions, prompt_table
from covey.data.text import load_codec

USER = {"role": "user", "content": "Q?"}
ASKED = "<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n"


def table(rows, codec, *, max_length=None, progress=None, **options):
    return prompt_table(
        rows, codec, max_length=max_length, options=PromptOptions(**options), progress=progress
    )


def only(row, codec, **options):
    (entry,) = table([row], codec, **options).entries
    return entry


def system_turn(text):
    return f"<|im_start|>system\n{text}<|im_end|>\n"


# -- system ------------------------------------------------------------------------------------------------


def test_system_is_put_in_front_of_every_templated_prompt(codec):
    for row in ({"question": "Q?"}, {"messages": [USER]}, {"prompt": [USER]}):
        assert only(row, codec, system="Be brief.").text == system_turn("Be brief.") + ASKED
        assert only(row, codec).text == ASKED


def test_the_rows_own_system_comes_first(codec):
    own = {"role": "system", "content": "Mine."}
    for row in ({"messages": [own, USER], "system": "column"}, {"question": "Q?", "system": "Mine."}):
        entry = only(row, codec, system="Be brief.")
        assert entry.text == system_turn("Mine.") + ASKED
        assert entry.messages == (own, USER)
    assert only({"question": "Q?", "system": " "}, codec, system="Be brief.").messages[0]["content"] == (
        "Be brief."
    )


def test_a_system_column_that_is_used_does_not_go_to_the_rewards(codec):
    row = {"question": "Q?", "system": "Mine.", "solution": "3"}
    assert only(row, codec).columns == {"solution": "3"}
    raw = {"prompt": "Q?", "system": "Mine."}
    assert only(raw, codec, system="Be brief.").columns == {"system": "Mine."}
    assert only(raw, codec, system="Be brief.").text == "Q?"


def test_what_system_may_be(tmp_path):
    file = tmp_path / "system.txt"
    file.write_text("From a file.\n", encoding="utf-8")
    assert system_text(str(file)) == "From a file."
    assert system_text("Be brief.") == "Be brief."
    assert system_text("x" * 10_000) == "x" * 10_000
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in system_text("r1") == SYSTEM_PRESETS["r1"]
    with pytest.raises(DataError, match="but it does not exist"):
        system_text(str(tmp_path / "nowhere.txt"))


# -- raw and templated -------------------------------------------------------------------------------------


def test_apply_chat_template_makes_a_prompt_string_a_user_turn(codec):
    assert only({"prompt": "Q?"}, codec).text == "Q?"
    entry = only({"prompt": "Q?"}, codec, apply_chat_template=True, system="S")
    assert entry.text == system_turn("S") + ASKED
    rows = [{"prompt": "Q?"}, {"question": "Q?"}]
    assert table(rows, codec).num_raw == 1
    assert table(rows, codec, apply_chat_template=True).num_raw == 0


def test_only_raw_prompts_get_the_tokenizers_own_bos(model_dir):
    codec = replace(load_codec(model_dir()), prefix_ids=(7,))
    raw, chat, two = table([{"prompt": "12"}, {"question": "12"}, {"prompt": "34"}], codec).entries
    (plain,) = codec.encode(["12"])
    assert tuple(raw.token_ids) == (7, *plain)
    assert tuple(two.token_ids) == (7, *codec.encode(["34"])[0])
    assert tuple(chat.token_ids) == codec.encode([chat.text])[0]


def test_messages_without_a_template_say_what_to_type(model_dir):
    directory = model_dir()
    (directory / "chat_template.jinja").unlink()
    codec = load_codec(directory)
    with pytest.raises(TemplateError, match="--chat_template FILE or --chat_template chatml"):
        table([{"question": "Q?"}], codec)
    assert only({"prompt": "Q?"}, codec).text == "Q?"


def test_a_row_that_the_template_refuses_is_named(model_dir):
    codec = load_codec(
        model_dir(template="{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}x")
    )
    with pytest.raises(TemplateError, match=r"row 2: .*one turn"):
        table([{"question": "Q?"}, {"messages": [USER, USER]}], codec)


# -- what a prompt has opened ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "opened"),
    [
        ("<think>\\n", "<think>\n"),
        ("<think>", "<think>"),
        ("<reasoning>\\n\\n", "<reasoning>\n\n"),
        ("<Thinking>", "<Thinking>"),
        ("<answer>", "<answer>"),
        ("[THINK]", "[THINK]"),
        ("<think>\\n\\n</think>\\n\\n", ""),
        ("</think>", ""),
        ("<b>", ""),
        ("", ""),
    ],
)
def test_what_a_template_opens_of_the_assistants_turn(end, opened, model_dir):
    codec = load_codec(model_dir(template="{{ messages[-1]['content'] }}{{ '\\nA: " + end + "' }}"))
    assert only({"question": "Q?"}, codec).opened == opened


def test_a_tag_in_the_question_opens_nothing(model_dir, codec):
    question = "Answer inside <answer>"
    assert only({"question": question}, codec).opened == ""
    bare = load_codec(model_dir(template="{{ messages[-1]['content'] + '\\n' }}"))
    assert only({"question": question}, bare).opened == ""


def test_a_raw_prompt_may_open_a_tag_too(codec):
    entry = only({"prompt": "Q?\nAssistant: <think>\n"}, codec)
    assert entry.opened == "<think>\n"
    assert tuple(entry.token_ids) == codec.encode([entry.text])[0]


# -- too long ----------------------------------------------------------------------------------------------


def test_cut_from_the_left(codec):
    rows = [{"prompt": "123456"}, {"prompt": "12"}, {"prompt": "1234"}]  # a digit is a token
    found = table(rows, codec, max_length=3, truncation_strategy="left")
    assert [p.text for p in found.entries] == ["456", "12", "234"]
    assert [len(p.token_ids) for p in found.entries] == [3, 2, 3]
    assert (found.num_cut, found.left_out, found.longest_in_data) == (2, {}, 6)
    assert tuple(found.entries[0].token_ids) == codec.encode(["456"])[0]
    assert table(rows, codec, max_length=3).num_cut == 0


def test_a_cut_prompt_keeps_its_special_tokens_in_the_text(codec):
    (entry,) = table([{"question": "123"}], codec, max_length=6, truncation_strategy="left").entries
    assert entry.text == "3<|im_end|>\n<|im_start|>assistant\n"
    assert len(entry.token_ids) == 6
    assert codec.encode([entry.text])[0] == tuple(entry.token_ids)


# -- left out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"solution": "1"}, "no_prompt"),
        ({"prompt": "  \n"}, "no_prompt"),
        ({"messages": [{"role": "system", "content": "S"}]}, "no_prompt"),
        ({"prompt": 0}, "wrong_type"),
        ({"prompt": 3.5}, "wrong_type"),
        ({"prompt": {"role": "user"}}, "wrong_type"),
        ({"question": True}, "wrong_type"),
        ({"messages": ["a", "b"]}, "wrong_type"),
        ({"messages": [{"role": "user", "content": None}]}, "wrong_type"),
        ({"messages": [{"content": "Q?"}]}, "wrong_type"),
        ({"messages": [{"role": "user", "content": 3}]}, "wrong_type"),
    ],
)
def test_rows_that_are_no_prompts_are_left_out_by_reason(row, reason, codec):
    found = table([{"question": "Q?"}, row, {"question": "Q?"}, row], codec)
    assert found.left_out == {reason: 2}
    assert found.left_out_rows == {reason: (1, 3)}
    assert [p.id for p in found.entries] == [0, 2]


def test_the_first_rows_of_each_reason_are_kept(codec):
    rows = [{"prompt": None} if i % 2 else {"prompt": "1" * 9} for i in range(20)]
    found = table(rows, codec, max_length=5)
    assert found.left_out == {"too_long": 10, "no_prompt": 10}
    assert found.left_out_rows == {"too_long": (0, 2, 4, 6, 8), "no_prompt": (1, 3, 5, 7, 9)}


# -- media -------------------------------------------------------------------------------------------------

PICTURE = [{"type": "image"}, {"type": "text", "text": "what?"}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "Q?", "images": ["a.png"]}, ("images",)),
        ({"question": "Q?", "audio": {"bytes": b"1"}}, ("audio",)),
        ({"messages": [{"role": "user", "content": PICTURE}]}, ("messages",)),
        ({"messages": [{"role": "user", "content": "<image>what?"}]}, ("messages",)),
        ({"prompt": "<image>what?"}, ("prompt",)),
        ({"prompt": "what?", "image": "a.png"}, ("image",)),
        ({"question": "Q?", "images": [], "video": None}, ()),
        ({"question": "Write a page with a <video> tag."}, ()),
    ],
)
def test_media_are_reported_never_dropped(row, columns, codec):
    found = table([row], codec)
    assert found.media_columns == columns
    assert found.left_out == ({"media": 1} if columns else {})


# -- many rows ---------------------------------------------------------------------------------------------


def test_progress_is_told_in_chunks_and_numbers_go_on(codec):
    told = []
    rows = [{"prompt": str(i)} for i in range(4_500)]
    found = table(rows, codec, progress=lambda done, total: told.append((done, total)))
    assert told == [(2_000, 4_500), (4_000, 4_500), (4_500, 4_500)]
    assert [p.id for p in found.entries] == list(range(4_500))
    assert found.entries[4_321].text == "4321"
    later = prompt_table(rows[:3], codec, max_length=None, first_id=100)
    assert [p.id for p in later.entries] == [100, 101, 102]
