"""A program whose call of `covey.train` hangs: the call ends, the program goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faults import hung_program


def test_a_program_waits_for_trackers_until_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, hung_program.__file__, "tracker"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    said = ("tracker ", "ended: ", "went on")
    lines = [line for line in done.stdout.splitlines() if line.startswith(said)]
    assert lines == [
        "tracker   waiting for tensorboard to send the last records; Ctrl-C stops waiting",
        "tracker   interrupted; covey no longer waits for the trackers",
        "tracker   tensorboard had not finished; records that it had not sent may be lost",
        "ended: 0 4",
        "went on",
    ]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("main", ["stopped: F301", "ended: 0 4"]),
        ("thread", ["stopped: F301", "ended: 0 4"]),
        ("swallowed", ["ended: 0 4"]),
    ],
)
def test_a_call_that_hangs_ends_and_the_program_goes_on(mode: str, said: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, hung_program.__file__, mode],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(("stopped: ", "ended: "))] == said
    assert done.stderr.count("F301") == 1
    assert "restart the program" in " ".join(done.stderr.split())
    run = tmp_path / "run"
    assert "hung_program.py" in (run / "hang-0001" / "rank-0.txt").read_text()
    assert not (run / "hang-0002").exists()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e.get("code") == "F301"] == [2]


@pytest.mark.multi
def test_one_of_several_processes_says_what_is_wrong(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "from covey import train\n"
        "train(model='quickstart', dataset='quickstart#64', reward_funcs='accuracy', num_generations=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\ncovey.errors.ConfigError: ") == done.stderr.count("\nE201 ") == 1, done.stderr
