"""Words of a command that look like something else: text with a dash, lists with commas, sections of YAML."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from covey.config.flags import parse


def values(*words: str) -> dict[str, Any]:
    parsed = parse(words)
    assert parsed.problems == ()
    return {name: typed.value for name, typed in parsed.typed.items()}


def codes(*words: str) -> list[tuple[str, str]]:
    return [(p.code, p.option) for p in parse(words).problems]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("system", "- be brief"),
        ("system", "-be brief, - and kind"),
        ("system", "-- be brief"),
        ("system", "-brief"),
        ("system", "-x=1"),
        ("system", "---\nbe brief"),
        ("system", "–"),
        ("system", "-简短"),
        ("step_separator", "---"),
        ("step_separator", "--"),
        ("step_separator", "- "),
        ("judge_prompt", "-{completion}"),
        ("run_name", "-1st"),
    ],
)
def test_text_with_a_dash_in_front(option: str, text: str) -> None:
    assert values(f"--{option}", text, "--seed", "3") == {option: text, "seed": 3}
    assert values(f"--{option}={text}") == {option: text}


def test_stop_words_are_what_was_typed() -> None:
    """White space, commas and brackets belong to them; a shell hands \\n on as two characters."""
    words = ["</answer>", "a, b", "[end]", "- ", r"\n\nQuestion:", " ", "none"]
    read = ["</answer>", "a, b", "[end]", "- ", "\n\nQuestion:", " ", "none"]
    assert values("--stop_words", *words, "--seed", "3") == {"stop_words": read, "seed": 3}
    assert values("--stop_words", "#") == {"stop_words": ["#"]}
    assert values("--stop_words", "none") == {"stop_words": []}
    assert codes("--stop_words", "") == [("E103", "stop_words")]
    assert codes("--stop_words", "a", "") == [("E103", "stop_words")]


def test_text_that_looks_like_a_flag_stands_behind_an_equals_sign() -> None:
    assert values("--system=--seed", "--seed=-1") == {"system": "--seed", "seed": -1}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--sytem", "x"), [("E101", "sytem")]),
        (("-sytem", "x"), [("E101", "sytem")]),
        (("--model", "m", "--sytem=x"), [("E101", "sytem")]),
        (("--model", "m", "-sytem", "x"), [("E101", "sytem")]),
        (("--streaming", "-zzz"), [("E101", "zzz")]),
        (("--system", "--zzz"), [("E103", "system"), ("E101", "zzz")]),
        (("--system", "-seed", "3"), [("E103", "system")]),
        (("--beta", "-inf"), [("E103", "beta")]),
    ],
)
def test_a_flag_is_still_a_flag(words: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    assert codes(*words) == expected


def test_numbers_below_zero() -> None:
    words = ("--reward_weights", "-1", "-.5", "-1e-5", "--max_steps", "-1", "--repetition_max_penalty", "-2")
    assert values(*words) == {
        "reward_weights": [-1.0, -0.5, -1e-5],
        "max_steps": -1,
        "repetition_max_penalty": -2.0,
    }


@pytest.mark.parametrize(
    ("option", "word", "expected"),
    [
        ("reward_funcs", "accuracy,format", ["accuracy", "format"]),
        ("reward_funcs", "accuracy, rewards.py:mine ,", ["accuracy", "rewards.py:mine"]),
        ("reward_funcs", '["accuracy", "format"]', ["accuracy", "format"]),
        ("reward_funcs", "[accuracy, 'format']", ["accuracy", "format"]),
        ("reward_weights", "1,0.5", [1.0, 0.5]),
        ("target_modules", "q_proj,v_proj", ["q_proj", "v_proj"]),
        ("modules_to_save", "embed_tokens,lm_head", ["embed_tokens", "lm_head"]),
        ("interleave_prob", "0.3,0.7", [0.3, 0.7]),
        ("dataset", "a.jsonl,org/name:main@train#5", ["a.jsonl", "org/name:main@train#5"]),
        ("report_to", "wandb,tensorboard", ["wandb", "tensorboard"]),
        ("target_modules", r".*\.(q|v)_proj{1,2}", [r".*\.(q|v)_proj{1,2}"]),
    ],
)
def test_lists_with_commas(option: str, word: str, expected: list[Any], tmp_path: Path) -> None:
    assert values(f"--{option}", word) == {option: expected}
    assert values(f"--{option}={word}") == {option: expected}
    if not word.startswith("["):
        (tmp_path / "c.yaml").write_text(f"{option}: '{word}'\n")
        assert values(str(tmp_path / "c.yaml")) == {option: expected}


@pytest.mark.parametrize("form", ["{}", "name={}", "{}#3", "{}@train", "{}:main@train#3"])
def test_a_file_keeps_its_comma(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry = form.format("sums,easy.jsonl")
    assert values("--dataset", entry)["dataset"] == entry.split(",")
    Path("sums,easy.jsonl").touch()
    assert values("--dataset", entry, "x,y") == {"dataset": [entry, "x", "y"]}
    # A name that is there does not hold the list together that it stands in.
    Path("quickstart").mkdir()
    assert values("--dataset", "quickstart#4,x") == {"dataset": ["quickstart#4", "x"]}


def test_all_trackers_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorboard", "mlflow"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert values("--report_to", "all") == {"report_to": ["tensorboard", "mlflow"]}
    there.clear()
    assert values("--report_to", "all") == {"report_to": ["none"]}
    assert codes("--report_to", "al") == [("E104", "report_to")]


def test_mappings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "columns:\n  text: question\nchat_template_kwargs: {thinking: false, tools: [a]}\n"
        "task_rewards: {math: 'accuracy,format', chat: accuracy}\n"
    )
    assert values(str(file)) == {
        "columns": {"text": "question"},
        "chat_template_kwargs": {"thinking": False, "tools": ["a"]},
        "task_rewards": {"math": ["accuracy", "format"], "chat": ["accuracy"]},
    }
    # An object of another tool is named as such, and what nobody knows as a section that there is none of.
    file.write_text("gradient_checkpointing_kwargs: {use_reentrant: false}\nzoo: {a: 1}\n")
    assert codes(str(file)) == [("W108", "gradient_checkpointing_kwargs"), ("E101", "zoo")]
