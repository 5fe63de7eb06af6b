"""What ranks must have alike, and how a difference between up to 64 of them is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.checks.survey import survey
from covey.comm import LocalComm
from covey.config.resolve import from_dict
from covey.errors import ConfigError
from covey.texts.catalogue import catalogue
from covey.training.agreement import FIXES, Values, disagreement, refuse_differences, values_of
from support.vision import picture

OPTIONS: dict[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart#16"],
    "reward_funcs": ["accuracy"],
    "max_completion_length": 8,
    "output_dir": "run",
}


def ranks_with(world: int, kind: str, name: str, **changes: Any) -> list[Values]:
    """Values of ranks that are alike but for those named in `changes`, as `r7`."""
    return [{kind: {name: changes.get(f"r{rank}", changes["rest"])}} for rank in range(world)]


def seen(of_ranks: list[Values]) -> str:
    (problem,) = disagreement(of_ranks)
    assert problem.code == "E378" and problem.fixes
    return problem.seen


def test_one_rank_that_differs_is_named_first() -> None:
    of_ranks = ranks_with(8, "package", "transformers", r1="5.17.0", rest="5.23.0")
    assert seen(of_ranks) == "Rank 1: transformers 5.17.0; ranks 0, 2-7: 5.23.0."
    assert disagreement(of_ranks)[0].option == "transformers"


@pytest.mark.parametrize(
    ("kind", "words"), [("package", "not installed"), ("environment", "not set"), ("data", "none")]
)
def test_what_a_rank_lacks_is_said(kind: str, words: str) -> None:
    of_ranks: list[Values] = [{kind: {"x": "1"}} for _ in range(4)]
    of_ranks[3] = {}
    assert seen(of_ranks) == f"Rank 3: x {words}; ranks 0-2: 1."


def test_the_message_of_64_ranks_stays_short() -> None:
    """Every rank has a value of its own; every second rank has another; and everything differs."""
    own = ranks_with(64, "option", "seed", rest=0)
    for rank, values in enumerate(own):
        values["option"]["seed"] = rank  # type: ignore[index]
    assert seen(own) == "Rank 63: --seed 63; rank 62: 62; ranks 1-61: 61 other values; rank 0: 0."
    halves = ranks_with(64, "package", "torch", rest="2.13", **{f"r{n}": "2.12" for n in range(0, 64, 2)})
    assert seen(halves) == (
        "Ranks 1, 3, 5, 7, 9, 11, and 26 more: torch 2.13; ranks 0, 2, 4, 6, 8, 10, and 26 more: 2.12."
    )
    all_kinds: list[Values] = [
        {kind: {f"{kind}-{n}": rank % 2 for n in range(20)} for kind in FIXES if kind != "object"}
        for rank in range(64)
    ]
    (problem,) = disagreement(all_kinds)
    assert len(problem.seen) < 900 and "96 more differ" in problem.seen
    assert len(problem.fixes) == len(FIXES) - 1


def values(tmp_path: Path, environment: dict[str, str] | None = None, **changes: Any) -> Values:
    config = from_dict({**OPTIONS, **changes}, 2).config
    with survey(config, 2) as found:
        return values_of(config, found, environment or {})


def names_of(of_ranks: list[Values]) -> list[str]:
    return [
        name
        for kind in FIXES
        for name in of_ranks[0][kind] | of_ranks[1][kind]  # type: ignore[operator]
        if of_ranks[0][kind].get(name) != of_ranks[1][kind].get(name)
    ]


def test_equal_contents_under_other_paths_are_the_same(tmp_path: Path) -> None:
    """Data, a reward's code and a system message, copied."""
    of_ranks = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "d.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 8)
        (folder / "mine.py").write_text(
            "def judge(completions, **kwargs):\n    return [0.0] * len(completions)\n"
        )
        (folder / "system.txt").write_text("Answer.")
        given = {
            "dataset": [str(folder / "d.jsonl")],
            "reward_funcs": ["accuracy", f"{folder / 'mine.py'}:judge"],
            "system": str(folder / "system.txt"),
        }
        of_ranks.append(values(tmp_path, **given))
    assert names_of(of_ranks) == []


@pytest.mark.parametrize(
    ("file", "words", "name"),
    [
        ("d.jsonl", '{"prompt": "1+1=", "solution": "3"}\n' * 8, "prompts"),
        (
            "mine.py",
            "def judge(completions, **kwargs):\n    return [1.0] * len(completions)\n",
            "reward_funcs",
        ),
    ],
)
def test_contents_that_differ_are_named(file: str, words: str, name: str, tmp_path: Path) -> None:
    """A gold alone, which no prompt shows, and the code of a reward."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 8)
    (tmp_path / "mine.py").write_text(
        "def judge(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    given = {
        "dataset": [str(tmp_path / "d.jsonl")],
        "reward_funcs": ["accuracy", f"{tmp_path / 'mine.py'}:judge"],
    }
    first = values(tmp_path, **given)
    (tmp_path / file).write_text(words)
    assert names_of([first, values(tmp_path, **given)]) == [name]


def test_images_that_differ_are_named(tmp_path: Path) -> None:
    """Of one size, at one path."""
    row = {"messages": [{"role": "user", "content": "<image>What?"}], "images": ["one.png"], "solution": "1"}
    (tmp_path / "d.jsonl").write_text((json.dumps(row) + "\n") * 8)
    given = {"model": "quickstart-shapes", "dataset": [str(tmp_path / "d.jsonl")]}
    found = []
    for colour in ((255, 0, 0), (0, 0, 255)):
        (tmp_path / "one.png").write_bytes(picture(colour))
        found.append(values(tmp_path, **given))
    assert names_of(found) == ["prompts"]


def test_options_and_environment_that_differ_are_named(tmp_path: Path) -> None:
    first = values(tmp_path, {"NCCL_ALGO": "Ring", "HOSTNAME": "a", "NCCL_SOCKET_IFNAME": "eth0"})
    second = values(
        tmp_path,
        {"NCCL_ALGO": "Tree", "HOSTNAME": "b", "NCCL_SOCKET_IFNAME": "ib0"},
        learning_rate=1e-5,
        output_dir="other",
    )
    assert names_of([first, second]) == ["learning_rate", "output_dir", "NCCL_ALGO"]


def test_other_objects_of_a_program_are_the_only_difference_that_is_named(tmp_path: Path) -> None:
    """Their names are options too, and what is read from them is data."""
    names = [f"object Qwen2ForCausalLM (checksum {n}{n}000000)" for n in (1, 2)]
    with survey(from_dict(OPTIONS, 2).config, 2) as found:
        of_ranks = [values_of(from_dict({**OPTIONS, "model": n}, 2).config, found, {}) for n in names]
    assert names_of(of_ranks) == ["model", "model"]
    assert disagreement(of_ranks)[0].option == "model"
    assert seen(of_ranks) == f"Rank 1: model {names[1]}; rank 0: {names[0]}."


class Two(LocalComm):
    """Two ranks, of which the other one has another version of a package."""

    world = 2

    def gather_json(self, value: Any) -> list[Any]:
        value = json.loads(json.dumps(value))
        other = {**value, "package": {**value["package"], "transformers": "5.17.0"}}
        other["data"] = {**value["data"], "prompts": ["17", other["data"]["prompts"][1]]}
        return [value, other]


def test_a_difference_ends_every_rank(tmp_path: Path) -> None:
    config = from_dict(OPTIONS, 2).config
    with survey(config, 2) as found:
        installed = dict(found.facts.machine.versions)["transformers"]
        with pytest.raises(ConfigError) as refused:
            refuse_differences(config, found, Two())
        (problem,) = refused.value.problems
        *_, digest = values_of(config, found, {})["data"]["prompts"]
        assert problem.seen == (
            f"Rank 1: prompts 17, {digest}; rank 0: 16, {digest}. "
            f"Rank 1: transformers 5.17.0; rank 0: {installed}."
        )
        chinese = catalogue("zh").said(problem.seen)
        assert "prompts" not in chinese and "digest" not in chinese and digest.split()[1] in chinese
        refuse_differences(config, replace(found), LocalComm())
