"""The ranks of a run as actors of Ray: the run of torchrun to the bit, its endings, and what stands in the
way."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from covey.checkpoint.read import verify
from covey.checks.ray.look import silence
from covey.cli.listening import processes_below
from faults import rank_run
from journeys.helpers import assert_same_run, covey, flags, rows, small, write_jsonl
from support.processes import _free_port
from support.ranks import MARK, left, marked, run_ranks

pytestmark = pytest.mark.multi

_LIMIT_S = 120


def run(words: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "covey", *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def options(folder: Path, **changes: object) -> dict[str, object]:
    """Two ranks on the built-in task."""
    write_jsonl(folder / "d.jsonl", rows(12))
    return small("d.jsonl", "run", per_device_train_batch_size=4, nproc_per_node=2, **changes)


def test_a_ray_of_its_own(tmp_path: Path) -> None:
    """Nothing differs from torchrun but the line on Ray, and nothing is left of it."""
    given = options(tmp_path, max_steps=3, save_steps=3)
    folders = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    own = {MARK: str(tmp_path), "TMPDIR": str(folders), "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    ray = run(["train", *flags({**given, "launcher": "ray"})], tmp_path, **own)
    out, err = ray.communicate(timeout=_LIMIT_S)
    assert ray.returncode == 0, err + out
    assert left(str(tmp_path), 3) == []
    assert [path.name for path in folders.iterdir() if path.name.startswith("covey")] == []
    shutil.rmtree(folders)
    (tmp_path / "run").rename(tmp_path / "ray")
    plain = run_ranks(rank_run.__file__, "none", "none", "0", "train", *flags(given), folder=tmp_path)
    assert plain.code == 0, plain.said
    assert_same_run(tmp_path / "ray", tmp_path / "run", step=3)
    # One voice: what is printed differs in the opening words alone.
    texts = (out + err, plain.said)
    kinds = [[line.split()[0] for line in text.splitlines() if line[:1].strip()] for text in texts]
    assert kinds[0] == ["ray", *kinds[1]]
    opening = out[: out.index("run  ")]
    assert "on all addresses" in opening and "token" in opening
    assert len(re.findall(r"\b\d{4,5}\b", opening)) >= 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A Ray of two CPUs that is not covey's, with a token; the variables that lead to it."""
    port = _free_port()
    address = f"127.0.0.1:{port}"
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
    # The path of a socket has at most 107 letters.
    folder = tempfile.mkdtemp(prefix="covey-test-", dir="/tmp")
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"),
        *(f"--port={port}", "--num-cpus=2", "--node-ip-address=127.0.0.1", "--include-dashboard=false"),
        *(f"--object-store-memory={80 << 20}", f"--temp-dir={folder}"),
    ]
    log = (Path(folder) / "log").open("w")
    head = subprocess.Popen(
        command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
    )
    try:
        until = time.monotonic() + 60
        while silence(address):
            assert head.poll() is None and time.monotonic() < until, Path(log.name).read_text()
            time.sleep(0.1)
        yield {**own, "RAY_ADDRESS": address}
    finally:
        for process in [head.pid, *processes_below(head.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        head.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def steps(folder: Path) -> int:
    """Steps on record."""
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def started(words: list[str], folder: Path, cluster: Mapping[str, str]) -> subprocess.Popen[str]:
    """A run in a cluster that has taken two steps."""
    child = run(words, folder, **cluster, **{MARK: str(folder)})
    until = time.monotonic() + _LIMIT_S
    while steps(folder) < 2:
        if child.poll() is not None or time.monotonic() > until:
            child.kill()
            pytest.fail(child.communicate()[1])
        time.sleep(0.05)
    return child


def actor_of(rank: int, mark: str) -> int:
    """The process of the actor above a rank."""
    for process in marked(mark):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_text().split("\0")
            if f"RANK={rank}" in environment:
                launcher = next(word for word in environment if word.startswith("COVEY_LAUNCHER="))
                return int(launcher.partition("=")[2].split()[0])
    raise AssertionError(f"rank {rank} is not there")


def test_a_killed_actor_and_a_signal(cluster: Mapping[str, str], tmp_path: Path) -> None:
    """The run ends with one message that names the rank, or saves and ends; the cluster goes on."""
    words = ["train", *flags(options(tmp_path, max_steps=4000, save_steps=2, launcher="ray"))]
    child = started(words, tmp_path, cluster)
    os.kill(actor_of(1, str(tmp_path)), signal.SIGKILL)
    out, err = child.communicate(timeout=_LIMIT_S)
    assert child.returncode == 1, err
    assert re.findall(r"^([EF]\d{3}) ", err, re.MULTILINE) == ["F133"], err
    assert "rank 1" in " ".join(err.split()) and left(str(tmp_path), 3) == []
    assert cluster["RAY_ADDRESS"] in out and not silence(cluster["RAY_ADDRESS"])
    (tmp_path / "run").rename(tmp_path / "killed")
    child = started(words, tmp_path, cluster)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=_LIMIT_S)
    assert child.returncode == 130, err
    assert verify(tmp_path / "run" / f"checkpoint-{steps(tmp_path)}").trainer
    assert "--resume_from_checkpoint latest" in out and left(str(tmp_path), 3) == []


def test_what_stands_in_the_way(
    cluster: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is one problem, before a weight is loaded."""
    words = ["train", *flags({**options(tmp_path, launcher="ray"), "nproc_per_node": 3})]
    child = run(words, tmp_path, **cluster)
    out, err = child.communicate(timeout=_LIMIT_S)
    assert (child.returncode, out) == (2, ""), err
    assert "E389" in err and "--nproc_per_node 2" in err and not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    words = ["train", *flags(options(tmp_path, launcher="ray"))]
    for address in ("127.0.0.1:1", "ray://127.0.0.1:10001", "host"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        done = covey(*words)
        assert done.code == 2 and "E388" in done.err and address in done.err
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a)
    )
    monkeypatch.setenv("RAY_ADDRESS", "local")
    done = covey(*words)
    assert done.code == 2 and "E116" in done.err and "covey[ray]" in done.err
