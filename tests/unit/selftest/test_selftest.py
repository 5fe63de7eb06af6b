"""`covey selftest`: its words, its table, how it ends, and what it never prints."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covey.cli.main import main
from covey.selftest import report, run, subject
from covey.selftest.bounds import BOUNDS
from covey.selftest.checks import Measured
from covey.selftest.report import redacted
from support.models import save_model

NAME = "packing: gradient"


def test_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every row is there and passes; nothing of the environment is printed, and nothing stays on the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("MY_API_KEY", "abc123")
    assert main(["selftest", "--device=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, word in enumerate(("covey", "device", "system", "model", "layout")):
        assert lines[number].startswith(word + " ")
    assert f"torch {torch.__version__.partition('+')[0]}" in lines[0]
    assert f"{torch.get_num_threads()} thread" in lines[1]
    table = lines[lines.index("") + 2 : -2]
    assert [row.split("  ")[0] for row in table] == list(BOUNDS)
    assert all(row.endswith("  pass") for row in table)
    assert lines[-1] == f"passed: {len(BOUNDS)} of {len(BOUNDS)} checks"
    assert "abc123" not in "".join(lines)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_ends_with_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Measured(name=name, value=float(name == NAME), limit=0.5) for name in BOUNDS]
    monkeypatch.setattr(run, "checks", lambda *a: iter(rows))
    assert main(["selftest", "--device", "cpu"]) == 3
    said = capsys.readouterr()
    assert [x.split("  ")[0] for x in said.out.splitlines() if x.endswith("FAIL")] == [NAME]
    assert said.out.splitlines()[-1] == f"FAILED: 1 of {len(BOUNDS)} checks"
    assert said.err.startswith("F120\n  seen   packing: gradient is 1, but at most 5.0e-01 is allowed.")
    for part in ("why", "cause", "do", "or"):
        assert f"\n  {part}  " in said.err
    assert BOUNDS[NAME].reason in " ".join(said.err.split())
    assert BOUNDS[NAME].part in " ".join(said.err.split())


def test_the_page_has_the_bounds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "selftest.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| (\S+)(?: \((\S+)\))? \| [^|]+ \|$", page, re.MULTILINE)
    shown = {name: (float(cpu), float(other or cpu)) for name, cpu, other in rows}
    # One line stands for all losses.
    pages = {re.sub(r"^loss \w+:", "loss LOSS_TYPE:", name): bound for name, bound in BOUNDS.items()}
    assert shown == {name: (bound.cpu, bound.other) for name, bound in pages.items()}
    losses = [bound for name, bound in BOUNDS.items() if name.startswith("loss ")]
    assert {(bound.cpu, bound.other) for bound in losses} == {shown["loss LOSS_TYPE: gradient"]}


@pytest.mark.parametrize(
    ("value", "unused", "verdict"),
    [
        (4.9e-6, "", "pass"),
        (5.1e-6, "", "FAIL"),
        (math.nan, "", "FAIL"),
        (math.inf, "", "FAIL"),
        (1.0, "some reason", "not used: some reason"),
    ],
)
def test_verdicts(value: float, unused: str, verdict: str) -> None:
    row = Measured(name=NAME, value=value, limit=5e-6, unused=unused)
    assert report.line(row).endswith(f"5.0e-06  {verdict}")
    assert row.failed == (verdict == "FAIL")


def test_zero_and_almost_zero_look_different() -> None:
    lines = [report.line(Measured(name=NAME, value=v, limit=0.0)) for v in (0.0, 1e-30)]
    assert lines[0].split()[2:] == ["0", "0", "pass"]
    assert lines[1].split()[2:] == ["1.0e-30", "0", "FAIL"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/" + "somebody/models/a", "~/models/a"),
        ("/Users/" + "somebody/models/a: x", "~/models/a: x"),
        (r"C:\Users" + r"\somebody\models", r"~\models"),
        ("/data/alice42/model", "/data/~/model"),
        ("/data/alice42er/model", "/data/alice42er/model"),
        ("HF_TOKEN=hf_abc/def ghi", "[redacted]"),
        ("/a/my-api-key-123/b", "/a/[redacted]"),
        ("/a/Secrets/b\nnext", "/a/[redacted]\nnext"),
        ("torch 2.13.0, 2 threads", "torch 2.13.0, 2 threads"),
    ],
)
def test_redaction(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "alice42")
    assert redacted(text) == shown


def test_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert redacted(f"model {tmp_path}/m, x") == "model ~/m, x"


def test_a_model_that_is_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--model", "no/such/model"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("E301 model") and said.out == ""


def test_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("E104 device")


@pytest.mark.parametrize(("what", "code"), [("memory", "E211"), ("disk", "E407")])
def test_too_large(
    what: str, code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before a weight is loaded; the built-in model of 0.83 M parameters takes 40 and 12 bytes each."""
    free = {"memory": 1 << 40, "disk": 1 << 40, what: 9_000_000}
    monkeypatch.setattr(subject, "free_memory", lambda cuda: free["memory"])
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda path: SimpleNamespace(free=free["disk"]))
    monkeypatch.setattr(run, "subject", lambda *a, **k: pytest.fail("loaded"))
    assert main(["selftest", "--device", "cpu", "--model", "quickstart"]) == 2
    assert capsys.readouterr().err.startswith(f"{code} model")


def test_memory_that_runs_out_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    monkeypatch.setattr(run, "checks", runs_out)
    assert main(["selftest", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith("E211 model\n  seen   Tried to allocate 20 GiB.")


def test_a_model_that_mixes_packed_rows(tmp_path: Path) -> None:
    """It is trained and sampled otherwise, so what it would do to streams is shown and fails nothing."""
    model = save_model("lfm2", tmp_path / "model")
    said: list[str] = []
    rows = run.selftest("cpu", str(model), said.append)
    unused = {row.name: row.value for row in rows if row.unused}
    shared = ("prompt sharing: gradient", "LoRA, prompt sharing: gradient")
    assert unused.keys() == {"packing: gradient", *shared}
    assert all(value > 1e-3 for value in unused.values())
    assert [row.name for row in rows if row.failed] == []
    assert said[-1] == f"passed: {len(BOUNDS) - 3} of {len(BOUNDS) - 3} checks"
    assert said[4] == "layout  padded rows, because the model mixes packed rows (F105), sdpa attention"
