"""The language of messages: where it is taken from, and what it changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.language import in_chinese
from covey.cli.main import main
from covey.cli.show import finding_text, problem_text
from covey.cli.verbs import VERBS
from covey.codes import CODES
from covey.config.argv import take_out
from covey.errors import GuardStop
from covey.options.verbs import CommonOptions
from covey.plan.problem import problem
from covey.plan.words import columns
from covey.texts import tr
from covey.texts.language import LANGUAGE, language_of, passed_on
from covey.types import Finding, Fix
from support.verbs import WORDS, Run, raises

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def test_the_locale_decides_and_its_first_variable_counts() -> None:
    assert language_of({}) == "en"
    assert language_of({"LANG": "zh_CN.UTF-8"}) == "zh"
    assert language_of({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}) == "zh"
    assert language_of({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}) == "en"
    assert language_of({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}) == "zh"
    assert language_of({"LANG": "zh_CN.UTF-8", LANGUAGE: "en"}) == "en"


@pytest.mark.parametrize(
    "words",
    [
        ["--lang", "zh", "train", "a.yaml", "--seed", "1"],
        ["train", "--lang", "zh", "a.yaml", "--seed", "1"],
        ["train", "a.yaml", "--lang=ZH", "--seed", "1"],
        ["train", "a.yaml", "--seed", "1", "--lang", "zh"],
        ["train", "--lang", "en", "a.yaml", "--seed", "1", "--lang", "zh"],
        ["train", "a.yaml", "--seed", "1", "--LANG=zh"],
    ],
)
def test_the_word_may_stand_anywhere(words: list[str]) -> None:
    common, rest = take_out("", words, CommonOptions)
    assert (common.typed["lang"].value, common.problems) == ("zh", [])
    assert rest == ["train", "a.yaml", "--seed", "1"]


def test_the_word_is_stronger_than_the_locale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN")
    assert main(["explain", "E202", "--lang", "en"]) == 0
    assert not CHINESE.search(capsys.readouterr().out)
    assert main(["explain", "E202"]) == 0
    assert CHINESE.search(capsys.readouterr().out)


def test_another_language_is_refused_in_that_of_the_locale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--lang", "fr"]) == 2
    assert "lang is fr; it takes en, zh (flag --lang)." in capsys.readouterr().err
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert main(["plan", "--lang", "fr"]) == 2
    said = capsys.readouterr().err
    assert "lang 为 fr" in said and "en、zh（命令行 --lang）。" in said


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_the_word(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each verb refuses a wrong word in Chinese, and has nothing to say about --lang."""
    words = {"explain": ["E999"], "export": ["absent"], "eval": []}.get(verb, ["--num_generation", "8"])
    assert main([verb, *words, "--lang", "zh"]) == 2
    said = capsys.readouterr().err
    assert "lang：" not in said and "  现象      " in said and "nothing was started" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_does_not_see_the_word_and_the_processes_it_starts_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch)
    spoken: list[str | None] = []

    def ends() -> int:
        spoken.append(os.environ.get(LANGUAGE))
        return 0

    run.ends = ends
    assert main(["train", *WORDS, "--lang", "zh"]) == 0
    assert main(["train", *WORDS]) == 0
    assert spoken == ["zh", "en"] and LANGUAGE not in os.environ
    chinese, plain = run.got
    assert chinese.config == plain.config and "lang" not in chinese.config.model_dump()
    assert chinese.problems == plain.problems


def test_what_is_passed_on_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LANGUAGE, "en")
    with pytest.raises(KeyError), passed_on("zh"):
        assert os.environ[LANGUAGE] == "zh"
        raise KeyError
    assert os.environ[LANGUAGE] == "en"


def test_a_guard_that_stops_a_run_says_so_in_chinese(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Finding(
        code="F102",
        seen=tr(
            "step {step}: {seen}",
            step=3,
            seen=tr("trained tokens have advantages, but the gradient is exactly 0"),
        ),
        why="Nothing is learned, and nothing else would say so: loss and reward look as usual.",
        cause=(
            "The loss is not connected to the weights: parameters are frozen, or a layer detaches its output."
        ),
        step=3,
    )
    run = Run(monkeypatch)
    run.ends = raises(GuardStop(found))
    assert main(["train", *WORDS, "--lang", "zh"]) == 3
    said = capsys.readouterr().err
    assert said.splitlines()[:2] == [
        "F102 第 3 步：有优势值却没有梯度",
        "  现象      第 3 步：参与训练的 token 有优势值，梯度却恰好是 0。",
    ]
    assert said == finding_text(found, "zh") + "\n"
    assert "advantages" not in said


def test_a_sentence_without_a_counterpart_stays_and_the_rest_is_chinese() -> None:
    english = problem(
        "E201",
        "num_generations",
        "A sentence of tomorrow.",
        "",
        Fix(text="use another loss", edits={"seed": 3}),
    )
    chinese = in_chinese(english)
    assert chinese.seen == "A sentence of tomorrow."
    assert chinese.fixes == (Fix(text="换用另一种损失", edits={"seed": 3}),)
    assert problem_text(english, "zh").splitlines()[:2] == [
        "E201 num_generations：每组少于两条回答",
        "  现象      A sentence of tomorrow.",
    ]
    assert "  改为      --seed 3" in problem_text(english, "zh")
    assert "可能原因" not in problem_text(english, "zh")


def test_a_reason_of_its_own_is_not_that_of_the_code() -> None:
    found = Finding(code="F101", seen="s", why="Completions without a reward are left out of their groups; "
                    "none was scored 0.", cause="c", step=None)  # fmt: skip
    assert in_chinese(found).why == "没有奖励的回答从组里剔除；没有任何回答因此记 0 分。"


def test_lines_are_at_most_a_hundred_columns_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chinese characters take two; a line of flags to type is never broken."""
    main(["train", "--num_generations", "7", "--lr", "1", "--lang", "zh"])
    lines = [line for line in capsys.readouterr().err.splitlines() if " --" not in line]
    assert 90 < max(map(columns, lines)) <= 100


def test_explain_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "e202", "--lang", "zh"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "E202 一次 rollout 装不下整数个组"
    assert "num_generations 的整数倍" in "".join(line.strip() for line in rest)
    assert main(["--lang", "zh", "explain"]) == 0
    listed = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in listed] == list(CODES)
    assert all(CHINESE.search(line) for line in listed)
    assert main(["explain", "e202"]) == 0
    assert not CHINESE.search(capsys.readouterr().out)


def test_explain_says_where_a_code_is_written_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "F108"]) == 0
    assert "in the documentation\n    docs/first-run.md#is-it-learning\n" in capsys.readouterr().out
    assert main(["explain", "F108", "--lang", "zh"]) == 0
    assert "文档\n    docs/first-run.md#is-it-learning\n" in capsys.readouterr().out
    assert main(["explain", "E999"]) == 2
    assert "`covey explain E4" in capsys.readouterr().err


def test_a_shell_with_a_chinese_locale_sees_chinese(tmp_path: Path) -> None:
    away = ("LC_ALL", "LC_MESSAGES", LANGUAGE, "WORLD_SIZE", "RANK")
    clean = {name: value for name, value in os.environ.items() if name not in away}
    done = subprocess.run(
        [sys.executable, "-m", "covey", "train", "--num_generations", "7"],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        env={**clean, "LANG": "zh_CN.UTF-8", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "E202 num_generations：一次 rollout 装不下整数个组" in done.stderr
    assert "什么都没有启动，也没有写入。" in done.stderr.replace("；", "。")
