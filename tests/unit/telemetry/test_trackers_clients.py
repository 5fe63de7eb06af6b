"""The real clients, offline: what they are given is read back from the files that they leave."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.telemetry.trackers.factory import start

STEPS = {10: 0.25, 20: 0.5, 40: 0.75}
ROWS = [
    {"step": 40, "prompt": "2|2", "completion": "four\nlines", "reward": 1.0, "finish": "stop"},
    {"step": 40, "prompt": "3", "completion": "zwölf", "reward": None, "finish": "length"},
]
_OURS = ("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_")


@pytest.fixture(autouse=True)
def bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, no settings of whoever runs the test, no network."""
    for name in [name for name in os.environ if name.startswith(_OURS)]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home / name))
    # Set here first, so that what the adapters set for themselves is undone with the test.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "out" / "trackio"))

    connect = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test reached for {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


def record(name: str, tmp_path: Path, config: Mapping[str, Any] | None = None) -> tuple[Path, list[str]]:
    """Report three steps and a table; return the run directory and what was said."""
    lines: list[str] = []
    events: list[object] = []
    trackers = start(
        [name],
        run_name="first",
        output_dir=tmp_path / "out",
        config=config or {"learning_rate": 1e-6, "model": "tiny"},
        say=lines.append,
        event=lambda kind, **fields: events.append((kind, fields)),
        may_exit=False,
    )
    for step, reward in STEPS.items():
        trackers.log(step, {"reward": reward, "rewards/acc/mean": 0.0, "kl": None})
    trackers.table(40, "completions", ROWS)
    trackers.close(0)
    assert events == []
    # A machine under load takes seconds to import a client.
    return tmp_path / "out", [line for line in lines if not line.startswith("waiting for ")]


def end_wandb() -> None:
    """Wait for wandb's service, which writes shortly after a run ends, and forget wandb's settings."""
    import wandb

    wandb.teardown()


def test_tensorboard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, lines = record("tensorboard", tmp_path)
    assert (lines, capfd.readouterr().out) == ([], "")
    found = EventAccumulator(str(out / "runs"))
    found.Reload()
    assert {e.step: e.value for e in found.Scalars("reward")} == STEPS
    assert {e.step: e.value for e in found.Scalars("rewards/acc/mean")} == dict.fromkeys(STEPS, 0.0)
    assert "kl" not in found.Tags()["scalars"]
    (table,) = found.Tensors("completions/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert table.step == 40
    assert "| 40 | 2\\|2 | four<br>lines | 1.0 | stop |" in text
    (config,) = found.Tensors("config/text_summary")
    assert "| learning_rate | 1e-06 |" in config.tensor_proto.string_val[0].decode()


def test_wandb(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, lines = record("wandb", tmp_path)
    end_wandb()
    assert len(lines) == 1
    assert lines[0].startswith("wandb: nobody is logged in, so this run is recorded offline")
    assert capfd.readouterr() == ("", "")
    (run,) = (out / "wandb").glob("offline-run-*")
    (data,) = run.glob("*.wandb")
    for word in (b"reward", b"rewards/acc/mean", b"learning_rate", b"first"):
        assert word in data.read_bytes()
    (table,) = run.glob("files/media/table/completions_40_*.table.json")
    written = json.loads(table.read_text(encoding="utf-8"))
    assert written["columns"] == list(ROWS[0])
    assert written["data"] == [list(row.values()) for row in ROWS]


def test_swanlab(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, lines = record("swanlab", tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith("swanlab: there is no API key, so this run is recorded offline")
    assert capfd.readouterr() == ("", "")
    (data,) = out.glob("swanlog/run-*/*.swanlab")
    content = data.read_bytes()
    assert b"reward" in content
    assert b"rewards/acc/mean" in content
    (config,) = out.glob("swanlog/run-*/files/config.yaml")
    assert "learning_rate" in config.read_text(encoding="utf-8")
    (table,) = out.glob("swanlog/run-*/media/echarts/*.json")
    assert "zw" in table.read_text(encoding="utf-8")


def test_mlflow(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from mlflow import MlflowClient

    options = {f"option_{i}": i for i in range(150)}
    out, lines = record("mlflow", tmp_path, options)
    assert (lines, capfd.readouterr()) == ([], ("", ""))
    client = MlflowClient(tracking_uri=(out / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("covey")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {name: str(value) for name, value in options.items()}
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, "reward")} == STEPS
    assert set(run.data.metrics) == {"reward", "rewards/acc/mean"}
    path = client.download_artifacts(run.info.run_id, "completions/step-000040.json")
    written = json.loads(Path(path).read_text(encoding="utf-8"))
    assert written["columns"] == list(ROWS[0])
    assert written["data"] == [list(row.values()) for row in ROWS]


def test_trackio(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A release too old to log a step of ours does not import here either.
    out, lines = record("trackio", tmp_path)
    assert (lines, capfd.readouterr()) == ([], ("", ""))
    with sqlite3.connect(out / "trackio" / "covey.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    logged = [(run, step, json.loads(metrics)) for run, step, metrics in rows]
    assert {s: m["reward"] for _, s, m in logged if "reward" in m} == STEPS
    assert {run for run, _, _ in logged} == {"first"}
    (table,) = (m["completions"] for _, _, m in logged if "completions" in m)
    assert table["_value"] == ROWS


def test_what_the_environment_says_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setenv("WANDB_DIR", str(theirs))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "their-project")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (theirs / "ml").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "their-experiment")
    assert record("wandb", tmp_path)[1] == []
    end_wandb()
    assert record("mlflow", tmp_path)[1] == []
    (data,) = theirs.glob("wandb/offline-run-*/*.wandb")
    assert b"their-project" in data.read_bytes()
    assert MlflowClient(tracking_uri=(theirs / "ml").as_uri()).get_experiment_by_name("their-experiment")
    assert not (tmp_path / "out").exists()
