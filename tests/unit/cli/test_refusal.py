"""What is refused: one JSON object for every verb that has it, values cut, nothing that a terminal obeys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.cli.refusal import asks_for_json
from covey.cli.verbs import VERBS
from covey.options import verbs
from covey.options.declare import fields_of
from covey.texts import visible

RUN = ("--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "accuracy")
REFUSED = {
    "plan": ("plan", *RUN, "--seed", "z", "--beta", "-1"),
    "doctor": ("doctor", "gone"),
    "verify": ("verify", "gone"),
    "mismatch": ("mismatch", "gone"),
    "replay": ("replay", "gone"),
}
RUN_LINE = f"plan {' '.join(RUN)}"
LONG, HOSTILE = "x" * 100_000, "a\x1b[31mb\x9b2J\u202ec\rd"


def test_every_verb_that_has_json_is_here() -> None:
    classes = {name: getattr(verbs, f"{name.capitalize()}Options", None) for name in VERBS}
    have = {name for name, declares in classes.items() if declares and "json" in fields_of(declares)}
    assert have == REFUSED.keys()


@pytest.mark.parametrize("verb", REFUSED)
def test_the_problems_are_one_object(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*REFUSED[verb], "--json"]) == 2
    said = capsys.readouterr()
    content = json.loads(said.out)
    assert content["exit_code"] == 2 and content["problems"]
    for problem in content["problems"]:
        assert problem.keys() == {"code", "option", "severity", "seen", "why", "cause", "fixes"}
        assert f"{problem['code']} {problem['option']}" in said.err
        assert all(fix.keys() == {"text", "edits"} for fix in problem["fixes"])
    if verb == "plan":
        assert {(p["code"], p["option"]) for p in content["problems"]} >= {("E103", "seed"), ("E109", "beta")}


@pytest.mark.parametrize("verb", REFUSED)
def test_without_it_nothing_is_on_standard_output(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*REFUSED[verb], "--json=false"]) == 2
    assert capsys.readouterr().out == ""


def test_verify_has_what_it_found_beside_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert main(["verify", "--json", str(tmp_path / "gone"), str(model)]) == 2
    content = json.loads(capsys.readouterr().out)
    assert [found["kind"] for found in content["directories"]] == ["none", "model"]
    assert len(content["problems"]) == 1


def test_json_is_asked_for_whatever_else_is_wrong() -> None:
    for words in (
        "doctor --json --nothing x",
        "plan --jso x --json",
        "verify --JSON",
        "plan train --json true",
    ):
        assert asks_for_json(words.split())
    for words in ("doctor x", "plan --json false", "train --json", "explain --json", "plan --no_json"):
        assert not asks_for_json(words.split())


# A value stands last on the line. An output directory may have a hostile name: only a long one is refused.
_PLAN = "plan --reward_funcs accuracy --dataset quickstart#64"
_BEFORE_A_VALUE = (
    *(f"{RUN_LINE} --{name}" for name in ("beta", "loss_type", "columns", "report_to")),
    *(f"{_PLAN} --{name}" for name in ("model", "seed")),
    *(RUN_LINE, "explain", "verify", "doctor", "export", ""),
)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        *((words, value) for words in _BEFORE_A_VALUE for value in (LONG, HOSTILE)),
        (f"{RUN_LINE} --output_dir", LONG),
    ],
    ids=lambda word: word[:8] + word[-12:].strip() if word not in (LONG, HOSTILE) else "",
)
def test_values_are_cut_and_visible(
    words: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), value]) == 2
    said = capsys.readouterr()
    assert not set("\x1b\x9b\u202e\r") & set(said.out + said.err)
    assert visible(HOSTILE) in said.err or value == LONG
    assert len(said.out + said.err) < 3000


def test_names_of_columns_are_visible(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{f"que{HOSTILE}stion": str(n), "z" * 5000: "1"} for n in range(64)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        main(["plan", "--model", "quickstart", "--dataset", "rows.jsonl", "--reward_funcs", "accuracy"]) == 2
    )
    said = capsys.readouterr().err
    assert visible(HOSTILE) in said and not set("\x1b\x9b\u202e\r") & set(said)
    assert "… (5,000 characters)" in " ".join(said.split()) and len(said) < 3000
