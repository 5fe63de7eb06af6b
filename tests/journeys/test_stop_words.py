"""Stop words from the command line, YAML and Python to what is trained, evaluated and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import covey as package
from covey.errors import ConfigError
from journeys.helpers import covey, flags, read_lines, rollouts, rows, small, succeed, write_jsonl

WORDS = ["</think>", "+1"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", rows(20))
    write_jsonl(tmp_path / "held.jsonl", rows(7, start=100))


def check(records: list[dict[str, Any]]) -> None:
    """Every completion ends with the first stop word in it, or where it would have ended without."""
    assert records
    for record in records:
        at = [record["text"].find(word) + len(word) for word in WORDS if word in record["text"]]
        assert (len(record["text"]) == min(at)) if at else record["finish"] in ("stop", "length")
        assert not at or record["finish"] == "stop"
        assert record["stop_strings"] == WORDS
        # The token that completes it is trained.
        assert all(record["trained_mask"]) and len(record["sampler_logprobs"]) == len(record["trained_mask"])


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_completions_end_at_them(tmp_path: Path, engine: str) -> None:
    options = small("train.jsonl", "run", val_dataset=["held.jsonl"], eval_strategy="steps", eval_steps=1)
    succeed("train", *flags(options), "--engine", engine, "--stop_words", *WORDS)
    for lines in rollouts(Path("run")):
        check(lines)
    succeed("eval", "run/checkpoint-2")
    (evaluated,) = Path("run/evaluations/checkpoint-2").glob("*held*.jsonl")
    check(read_lines(evaluated))


def test_from_python_and_yaml(tmp_path: Path) -> None:
    package.train(**small("train.jsonl", "one"), stop_words=WORDS)
    words = "\n".join(f'  - "{word}"' for word in WORDS)
    Path("two.yaml").write_text(f"stop_words:\n{words}\n")
    succeed("train", "two.yaml", *flags(small("train.jsonl", "two")))
    check(rollouts(Path("one"))[0])
    assert [r["completion_ids"] for r in rollouts(Path("one"))[0]] == [
        r["completion_ids"] for r in rollouts(Path("two"))[0]
    ]


def test_a_resumed_run_keeps_them(tmp_path: Path) -> None:
    package.train(**small("train.jsonl", "run"), stop_words=WORDS)
    again = small("train.jsonl", "run", max_steps=3, resume_from_checkpoint="latest")
    with pytest.raises(ConfigError, match="stop_words"):
        package.train(**again)
    package.train(**again, stop_words=WORDS)
    check(rollouts(Path("run"))[-1])


def test_one_that_no_text_contains_is_refused(tmp_path: Path) -> None:
    done = covey("plan", *flags(small("train.jsonl", "run")), "--stop_words", "<|im_end|>\\n")
    assert done.code == 2 and "E109" in done.err and "--stop_words '<|im_end|>'" in done.err
