"""torchrun as `covey train` starts it: ranks that save after a signal have time, and those of a failure the
time that torch gives them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from covey.cli import torchrun
from covey.meeting import EXIT_FILE
from support.machines import plain_environment

# A torch whose option is hidden is one from before 2.13.
STARTS = {
    "option": "from covey.cli import torchrun",
    "wrapped": "from covey.cli import torchrun; torchrun._option = lambda config: []",
}
RANK = """
import os, signal, sys, time

def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(2)
    open(f"saved-{os.environ['RANK']}", "w").close()
    END

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
open(f"here-{os.environ['RANK']}", "w").close()
time.sleep(60)
"""


def started(folder: Path, start: str, program: str, **environment: str) -> subprocess.Popen[str]:
    """torchrun with two ranks, and a limit of its own of a second."""
    (folder / "rank.py").write_text(program)
    own = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    return subprocess.Popen(
        [
            *(sys.executable, "-c", f"import sys; {STARTS[start]}; sys.exit(torchrun.main())"),
            *("--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"),
            "rank.py",
        ],
        cwd=folder,
        env={**plain_environment(), **own, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def names(folder: Path, what: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{what}-*"))


@pytest.mark.multi
@pytest.mark.parametrize(
    ("start", "number", "end", "code"),
    [
        ("option", signal.SIGTERM, "os._exit(0)", 143),
        ("wrapped", signal.SIGINT, "os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_ranks_have_the_time_to_save(
    tmp_path: Path, start: str, number: signal.Signals, end: str, code: int
) -> None:
    child = started(tmp_path, start, RANK.replace("END", end))
    until = time.monotonic() + 60
    while len(names(tmp_path, "here")) < 2:
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(number)
    time.sleep(0.5)
    # A scheduler may send it to all processes of the run, and more than once.
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert names(tmp_path, "saved") == ["saved-0", "saved-1"]
    assert child.returncode == code
    assert "Traceback" not in err and "signal" not in err, err


@pytest.mark.multi
@pytest.mark.parametrize(
    ("program", "code", "reports"),
    [
        ("import os, sys\nopen(os.environ['COVEY_EXIT_FILE'], 'w').write('1')\nsys.exit(1)", 1, False),
        ("import os\nos.kill(os.getpid(), 9)", 137, False),
        # Nobody but torchrun says that such ranks have failed.
        ("import sys\nsys.exit(7)", 1, True),
    ],
)
def test_torch_reports_where_no_rank_has_spoken(
    tmp_path: Path, program: str, code: int, reports: bool
) -> None:
    child = started(tmp_path, "option", program, **{EXIT_FILE: str(tmp_path / "exit")})
    _, err = child.communicate(timeout=60)
    assert child.returncode == code
    assert ("ChildFailedError" in err) == reports, err
    assert reports or "exitcode" not in err


class Signalled(Exception):
    """What torchrun raises for a signal."""


@pytest.mark.parametrize("waits", [True, False])
def test_a_failure_has_the_time_of_torch(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is another one within the handling of a signal alone, and there signals are heard no more."""
    asked: list[tuple[object, int]] = []
    ignored: list[int] = []

    class Context:
        def __init__(self) -> None:
            self.subprocess_handlers = {0: SimpleNamespace(proc=SimpleNamespace(returncode=-9))}

        def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            asked.append((death_sig, timeout))

    monkeypatch.setattr(torchrun.signal, "signal", lambda number, handler: ignored.append(number))
    codes = torchrun._wait_after_signals(Context, Signalled, waits=waits)
    Context().close()
    try:
        raise RuntimeError
    except RuntimeError:
        Context().close(timeout=7)
    assert (asked, ignored, codes) == ([(None, 30), (None, 7)], [], [])
    try:
        raise Signalled
    except Signalled:
        Context().close(signal.SIGTERM)
    assert asked[2:] == [(signal.SIGTERM, torchrun._WAIT_S if waits else 30)]
    assert ignored == [signal.SIGINT, signal.SIGTERM] and codes == [-9]


def test_this_torch_is_asked_in_its_own_words() -> None:
    from torch.distributed.launcher.api import LaunchConfig

    words = torchrun._option(LaunchConfig)
    assert bool(words) == hasattr(LaunchConfig, "shutdown_timeout")
