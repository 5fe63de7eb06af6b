"""`covey export`: its words, what it refuses, and what it says was done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.errors import CheckpointError, DamagedModelError
from covey.texts import tr
from support.verbs import codes_in, stand_in


@dataclass(frozen=True)
class Result:
    target: Path
    merged: bool
    num_prompts: int = 6
    max_logit_difference: float = 0.00123456
    dtype: str | None = "bfloat16"
    packed: str = ""


class Exports:
    """Stands in for the export itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.got: list[tuple[str, str, bool, str | None]] = []
        self.dtypes: list[str] = []
        self.error: Exception | None = None
        stand_in(
            monkeypatch,
            "covey.training.export",
            export=self._run,
        )

    def _run(
        self, checkpoint: Path, target: Path, *, merge: bool, base: Path | None, torch_dtype: str
    ) -> Any:
        if self.error is not None:
            raise self.error
        self.dtypes.append(torch_dtype)
        self.got.append((str(checkpoint), str(target), merge, None if base is None else str(base)))
        return Result(target, merged=merge)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Exports:
    Path("c-5").mkdir()
    Path("c-5/adapter_config.json").write_text("{}")
    return Exports(monkeypatch)


@pytest.mark.parametrize(
    ("words", "target", "merge", "base"),
    [
        ("c-5", "c-5-model", False, None),
        ("c-5 --merge", "c-5-merged", True, None),
        ("c-5 --merge-lora", "c-5-merged", True, None),
        ("c-5 --merge --output_dir o --base /b", "o", True, "/b"),
        ("--output-dir=o --base=/b c-5", "o", False, "/b"),
        # As ms-swift has it.
        ("--adapters c-5 --merge_lora true --output_dir o", "o", True, None),
        ("--ckpt_dir c-5 --merge_lora true", "c-5-merged", True, None),
        ("--model /b --adapters c-5 --merge_lora true", "c-5-merged", True, "/b"),
        ("--model c-5", "c-5-model", False, None),
    ],
)
def test_words(exports: Exports, words: str, target: str, merge: bool, base: str | None) -> None:
    assert main(["export", *words.split()]) == 0
    assert exports.got == [("c-5", target, merge, base)]


def test_what_is_said(exports: Exports, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "c-5", "--merge"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "merged: on 6 prompts the logits of the exported bfloat16 model differ from those with the adapter "
        "by at most 0.00123",
        "note: bfloat16 rounds small parts of the adapter's update away; `--torch_dtype float32` keeps all "
        "of it",
        "written to c-5-merged",
    ]
    assert main(["export", "c-5"]) == 0
    assert capsys.readouterr().out == "written to c-5-model\n"


@pytest.mark.parametrize(
    ("words", "codes", "part"),
    [
        ("absent", ["E413"], "absent: no such file or directory"),
        ("c-5 d", ["E108"], "`d` after c-5 does not belong to any option"),
        ("c-5 d --output_dirs o --merge=maybe", ["E101", "E103", "E108"], "--output_dir o"),
        ("--merge", ["E105"], "No checkpoint is given"),
        ("c-5 --output_dir --merge", ["E103"], "--output_dir"),
        ("c-5 --output_dir there", ["E402"], "there already exists"),
        ("c-5 --output_dir file/there", ["E403"], "file is a file, not a directory"),
        ("absent --output_dir there", ["E413", "E402"], "absent: no such file or directory"),
        ("c-5 --adapters d", ["E106"], "Two checkpoints are given: c-5 and d"),
        ("quickstart", ["E413"], "quickstart is a built-in model"),
        ("quickstart-tools", ["E413"], "quickstart-tools is a built-in model"),
    ],
)
def test_refusals(
    exports: Exports, words: str, codes: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there").mkdir()
    Path("file").touch()
    assert main(["export", *words.split()]) == 2
    err = capsys.readouterr().err
    assert codes_in(err) == codes
    assert part in " ".join(err.split())
    assert exports.got == []


@pytest.mark.parametrize(("words", "name"), [([], "c-5-model"), (["--merge"], "c-5-merged")])
def test_a_second_export_is_no_damaged_checkpoint(
    exports: Exports, words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).mkdir()
    assert main(["export", "c-5", *words]) == 2
    err = capsys.readouterr().err
    assert codes_in(err) == ["E402"]
    assert f"{name} already exists" in err


def test_files_at_fault_need_no_other_base(exports: Exports, capsys: pytest.CaptureFixture[str]) -> None:
    """The path stands once in front of what is wrong."""
    exports.error = DamagedModelError(
        tr("{directory}: {faults}", directory="c-5", faults="config.json is missing")
    )
    assert main(["export", "c-5", "--merge"]) == 2
    err = capsys.readouterr().err
    assert codes_in(err) == ["E415"] and "seen   c-5: config.json is missing.\n" in err
    assert "--base" not in err


@pytest.mark.parametrize(
    ("words", "fixes"),
    [
        ("c-5 --torch_dtype float32", ["--merge", "leave out --torch_dtype"]),
        ("whole --dtype bfloat16", ["leave out --torch_dtype"]),
        ("whole --merge --torch_dtype float32", ["leave out --torch_dtype"]),
    ],
)
def test_a_dtype_without_a_merge_is_refused(
    exports: Exports, words: str, fixes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("whole").mkdir()
    Path("whole/config.json").write_text("{}")
    assert main(["export", *words.split()]) == 2
    err = capsys.readouterr().err
    assert codes_in(err) == ["E115"] and all(fix in err for fix in fixes) and exports.got == []


def test_a_dtype_of_the_merge(exports: Exports) -> None:
    assert main(["export", "c-5", "--merge", "--torch_dtype", "float32"]) == 0
    assert exports.dtypes == ["float32"]


def test_an_export_that_fails_says_why(exports: Exports, capsys: pytest.CaptureFixture[str]) -> None:
    exports.error = CheckpointError("model.safetensors is cut short")
    assert main(["export", "c-5", "--merge"]) == 2
    err = capsys.readouterr().err
    assert codes_in(err) == ["E415"]
    assert "c-5: model.safetensors is cut short" in err
    assert "--base DIR" in err


def test_a_run_in_the_place_of_its_checkpoint(exports: Exports, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 10):
        Path(f"run/checkpoint-{step}").mkdir(parents=True)
    for word in ("run", "run/checkpoint-11"):
        assert main(["export", word, "--merge"]) == 2
        err = capsys.readouterr().err
        assert codes_in(err) == ["E413"]
        assert "`covey export run/checkpoint-10 --merge`" in err
    assert "checkpoint-9, checkpoint-10" in err
    assert exports.got == []


def test_nothing_to_merge_is_said(
    exports: Exports, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "covey.training.export", export=lambda *_, **__: Result(Path("o"), merged=False))
    assert main(["export", "c-5", "--merge"]) == 0
    assert "nothing was merged" in capsys.readouterr().out
