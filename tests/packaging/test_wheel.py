"""The built wheel works in an empty environment, keeps a torch that is there, and carries what it needs."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.needs("a registry")
def test_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("covey-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for folder in ("model", "tools_model"):
        for file in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
            assert f"covey/quickstart/{folder}/{file}" in names
    assert not any(n.startswith(("tests", "bench", "recipes")) for n in names)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, "torch", cwd=tmp_path)
    (before,) = environment.glob("lib/python3*/site-packages/torch/version.py")
    stamp = before.stat().st_mtime_ns
    # No constraints here: an existing torch that is new enough is kept.
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    assert before.stat().st_mtime_ns == stamp
    assert "covey" in run(environment / "bin" / "covey", "--version", cwd=tmp_path)
    out = run(environment / "bin" / "covey", "quickstart", "--max_steps", "2", cwd=tmp_path)
    assert "held-out accuracy" in out
