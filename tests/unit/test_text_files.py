"""What a model directory holds beside config and weights: end tokens, and one template or all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.text_files import TextFiles, copy_text_files, own_template, stops_of, write_stops


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with a template in each of the four places."""
    directory = tmp_path / "source"
    put(
        directory / "config.json",
        {"eos_token_id": 5, "bos_token_id": 1, "pad_token_id": None, "vocab_size": 9},
    )
    put(directory / "generation_config.json", {"eos_token_id": 5, "top_p": 0.9, "temperature": 0.6})
    put(directory / "tokenizer.json", "{}")
    put(directory / "tokenizer_config.json", {"eos_token": "é", "chat_template": "old", "b": 1})
    put(directory / "chat_template.jinja", "own")
    put(directory / "chat_template.json", {"chat_template": "older"})
    put(directory / "additional_chat_templates/tools.jinja", "tools")
    put(directory / "model.safetensors", "weights")
    return directory


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    directory.mkdir()
    return directory


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in directory.rglob("*") if p.is_file()}


def test_untyped_everything_is_copied_but_weights_and_config(source: Path, target: Path) -> None:
    TextFiles(origin=source).write(target)
    expected = contents(source)
    del expected["model.safetensors"], expected["config.json"]
    assert contents(target) == expected


def test_a_typed_template_is_the_only_one(source: Path, target: Path) -> None:
    TextFiles(origin=source, template="mine é\n", stop_token_ids=(7, 5)).write(target)
    assert own_template(target) == "mine é\n"
    assert sorted(contents(target)) == [
        *("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert read(target / "tokenizer_config.json") == {"eos_token": "é", "b": 1}
    assert read(target / "generation_config.json") == {
        "eos_token_id": [7, 5],
        "top_p": 0.9,
        "temperature": 0.6,
    }
    # The source is somebody's model.
    assert own_template(source) == "own" and read(source / "generation_config.json")["eos_token_id"] == 5


@pytest.mark.parametrize(
    ("said", "stops", "written"),
    [
        (5, (5,), 5),
        ([5], (5,), [5]),
        (5, (7,), 7),
        ([5, 7], (7, 5), [7, 5]),
        (None, (7, 5), [7, 5]),
    ],
)
def test_end_tokens(said: Any, stops: tuple[int, ...], written: Any, target: Path) -> None:
    """A file that lists them in this order is left as it is."""
    put(target / "generation_config.json", {"eos_token_id": said, "top_k": 3})
    before = (target / "generation_config.json").read_text()
    write_stops(target, stops, {})
    assert read(target / "generation_config.json") == {"eos_token_id": written, "top_k": 3}
    if written == said:
        assert (target / "generation_config.json").read_text() == before
    assert stops_of(target) == list(stops)


def test_without_a_generation_config_config_json_says_the_rest(source: Path, target: Path) -> None:
    (source / "generation_config.json").unlink()
    assert stops_of(source) == [5]
    TextFiles(origin=source, stop_token_ids=(7, 5)).write(target)
    assert read(target / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [7, 5]}


def test_no_end_tokens_leave_the_source_s(source: Path, target: Path) -> None:
    TextFiles(origin=source).write(target)
    assert (target / "generation_config.json").read_text() == (source / "generation_config.json").read_text()


def test_one_source_over_another(source: Path, target: Path, tmp_path: Path) -> None:
    """The templates of one directory alone, that of the later one where it has any."""
    later = tmp_path / "later"
    put(later / "tokenizer_config.json", {"chat_template": "later"})
    copy_text_files(source, target)
    copy_text_files(later, target)
    assert own_template(target) == "later"
    assert "chat_template.jinja" not in contents(target) and "chat_template.json" not in contents(target)
    assert not (target / "additional_chat_templates").exists()
    assert stops_of(target) == [5]


def test_a_source_without_a_template_leaves_the_one_that_is_there(
    source: Path, target: Path, tmp_path: Path
) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (source / name).unlink()
    bare = tmp_path / "bare"
    put(bare / "tokenizer_config.json", {"eos_token": "x"})
    copy_text_files(source, target)
    copy_text_files(bare, target)
    assert own_template(target) == "old" and read(target / "tokenizer_config.json") == {"eos_token": "x"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "b"}]}}, "b"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tools", "template": "b"}]}}, None),
        ({"chat_template.json": {"chat_template": "c"}}, "c"),
        ({}, None),
    ],
)
def test_the_template_of_a_directory(files: dict[str, Any], found: str | None, target: Path) -> None:
    for name, content in files.items():
        put(target / name, content)
    assert own_template(target) == found
