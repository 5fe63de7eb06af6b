"""--kernels torch: the same run, computed by all else by torch's operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from journeys.helpers import covey, flags, read_lines, rows, small, succeed, write_jsonl


@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_a_run_is_the_same_by_torch_alone(
    tuner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", rows(40))
    asked = {"max_steps": 3, "tuner_type": tuner, "logging_steps": 1}
    lines = {}
    for kernels in ("auto", "torch"):
        done = succeed("train", *flags(small("d.jsonl", kernels, kernels=kernels, **asked)))
        assert ("all else by torch's operators" in done.out) == (kernels == "torch")
        lines[kernels] = read_lines(tmp_path / kernels / "metrics.jsonl")
    assert len(lines["auto"]) == 3
    for one, other in zip(lines["auto"], lines["torch"], strict=True):
        for name in ("reward", "completions/mean_length", "loss", "entropy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-6), name


def test_other_words_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "d.jsonl", rows(40))
    done = covey("train", *flags(small("d.jsonl", "run", kernels="triton")))
    assert done.code == 2 and "kernels" in done.err and "auto, torch" in done.err
    assert not (tmp_path / "run").exists()
