"""A digest of a reward function changes with what it does, and not with its comments or where it stands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from covey.rewards.function_text import function_digest

FIRST = "def score(completions):\n    return [1.0 for _ in completions]\n"


def digest_in(file: Path, text: str, name: str = "score") -> str | None:
    file.write_text(text)
    return function_digest(f"{file}:{name}", None)


def test_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    first = digest_in(file, FIRST)
    assert first is not None
    moved = f"import os\n\n\n# A comment.\n{FIRST}".replace("    return", "    # Another one.\n    return")
    assert digest_in(file, moved) == first
    assert digest_in(file, FIRST.replace("1.0", "2.0")) not in (first, None)
    assert digest_in(file, "class A:\n" + "    " + FIRST.replace("\n ", "\n     "), "A.score") == first
    assert digest_in(file, "def score(:\n") is digest_in(file, "score = len\n") is None


def test_of_objects() -> None:
    def score(completions: list[str], bonus: float = 0.0) -> list[float]:
        return [bonus for _ in completions]

    class Judge:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [1.0 for _ in completions]

    known = function_digest("score", score)
    assert known is not None and known == function_digest("score", partial(score, bonus=1.0))
    assert function_digest("Judge", Judge()) not in (known, None)
    assert function_digest("lambda", lambda completions: [1.0]) is None
    assert function_digest("accuracy", None) is function_digest("len", len) is None
