"""A run directory in which something is not as a run left it: a code before anything starts, and nothing that
was there is lost."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from covey.telemetry.owner import Lock, take
from journeys.helpers import Done, covey, events, flags, metrics, small, succeed


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints to go on from."""
    run = tmp_path_factory.mktemp("finished") / "run"
    plan = {"max_steps": 4, "save_steps": 2, "keep_trainer_state": 2}
    succeed("train", *flags(small("quickstart#64", run, **plan)))
    return run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Path:
    """A copy of that run to damage."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def go_on(resume: str = "latest", **changes: object) -> Done:
    plan = {"max_steps": 5, "save_steps": 2, "keep_trainer_state": 2, **changes}
    return covey("train", *flags(small("quickstart#64", "run", **plan)), "--resume_from_checkpoint", resume)


def content(run: Path) -> dict[str, str]:
    """Every file and link below a directory, with a digest of what is in it."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def put(name: str, at: int, byte: bytes) -> Callable[[Path], None]:
    """Change one byte of a file."""

    def change(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[at : at + 1] = byte
        (run / name).write_bytes(data)

    return change


def line(name: str, text: str) -> Callable[[Path], None]:
    """Add a line to a file."""

    def change(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(text + "\n")

    return change


def instead(name: str, kind: str) -> Callable[[Path], None]:
    """Put a file, a directory or a link under a name."""

    def change(run: Path) -> None:
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kind == "file":
            path.write_text("mine")
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("checkpoint-4")

    return change


REFUSED = {
    "a byte that is no UTF-8": ("E411", put("metrics.jsonl", 40, b"\xff")),
    "another name in a step": ("E411", lambda run: renamed(run / "metrics.jsonl", '"step"', '"stop"')),
    "a step that is a word": ("E411", lambda run: renamed(run / "metrics.jsonl", '"step": 2', '"step": "2"')),
    "a line of events": ("E411", line("events.jsonl", "{")),
    "an event without a step": ("E411", line("events.jsonl", '{"kind": "saved"}')),
    "a directory for metrics": ("E412", instead("metrics.jsonl", "directory")),
    "a directory for the plan": ("E412", instead("plan.json", "directory")),
    "a file for rollouts": ("E412", instead("rollouts", "file")),
    "a file called checkpoint-8": ("E412", instead("checkpoint-8", "file")),
    "a link called checkpoint-8": ("E412", instead("checkpoint-8", "link")),
    "a directory for the lock": ("E412", instead("run.lock", "directory")),
}


def renamed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_gone_on_with_is_refused_and_the_fix_mends_it(case: str, here: Path) -> None:
    code, damage = REFUSED[case]
    damage(here)
    before = content(here)
    done = go_on()
    assert done.code == 2 and done.err.startswith(code), done.err
    assert "Traceback" not in done.err and content(here) == before
    moves = re.findall(r"do (mv \S+ \S+)", " ".join(done.err.split()))
    assert len(moves) == 1, done.err
    subprocess.run(moves[0], shell=True, check=True)
    assert go_on().code == 0
    assert [record["step"] for record in metrics(here)][-1] == 5
    kept = set(content(here).values())
    source = moves[0].split()[1].removeprefix("run/")
    assert all(d in kept for n, d in before.items() if n == source or n.startswith("checkpoint-4/"))


def drop(name: str) -> Callable[[Path], None]:
    """Delete a directory."""
    return lambda run: shutil.rmtree(run / name)


DAMAGED = {
    "a bit of the weights": put("checkpoint-4/model.safetensors", 5000, b"x"),
    "a cut state": lambda run: (run / "checkpoint-4/trainer/state.json").write_text("{"),
    "no trainer": drop("checkpoint-4/trainer"),
    "an empty manifest": lambda run: (run / "checkpoint-4/manifest.json").write_text(""),
    "a manifest of another step": lambda run: shutil.copy(
        run / "checkpoint-2/manifest.json", run / "checkpoint-4/manifest.json"
    ),
    "a newer one without files": lambda run: (run / "checkpoint-9").mkdir(),
}


@pytest.mark.parametrize(("case", "asked"), [*((c, "latest") for c in DAMAGED), ("a cut state", "auto")])
def test_a_damaged_checkpoint_is_named_before_an_older_one_is_used(case: str, asked: str, here: Path) -> None:
    DAMAGED[case](here)
    name = "checkpoint-9" if "newer" in case else "checkpoint-4"
    before = "checkpoint-4" if "newer" in case else "checkpoint-2"
    done = go_on(asked)
    assert done.code == 0, done.err
    (found,) = [e for e in events(here, "finding") if e["code"] == "W160"]
    assert name in found["seen"]
    said = " ".join(done.out.split())
    assert f"W160 run/{name}" in said and f"continues from run/{before} instead" in said


@pytest.mark.parametrize("asked", ["latest", "auto"])
def test_the_only_checkpoint_is_not_thrown_away(asked: str, here: Path) -> None:
    shutil.rmtree(here / "checkpoint-2")
    DAMAGED["a bit of the weights"](here)
    before = content(here)
    done = go_on(asked)
    assert done.code == 2 and done.err.startswith("E404") and "model.safetensors" in done.err
    assert content(here) == before


@pytest.mark.parametrize("asked", ["run", "run/checkpoint-7"])
def test_the_newest_checkpoint_is_what_to_type_where_none_is_named(asked: str, here: Path) -> None:
    """`auto` would begin anew where the run is to be continued in another directory."""
    done = go_on(asked)
    assert done.code == 2 and done.err.startswith("E404")
    assert "type   --resume_from_checkpoint run/checkpoint-4" in done.err


def without_lines(run: Path) -> None:
    """The first two steps are lost, and the last line in its middle."""
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]).rstrip()[:-9])


ROLLOUT = "rollouts/rollout-000003.jsonl"


def without_a_part(run: Path) -> None:
    """The run had two ranks, and the file of the second is lost."""
    (run / ROLLOUT).rename(run / "rollouts" / "rollout-000003.0-of-2.jsonl")


LOST = {
    "no metrics": (
        lambda run: (run / "metrics.jsonl").unlink(),
        "metrics.jsonl is gone, with the metrics of 4",
    ),
    "lines of metrics": (without_lines, "lacks 3 steps; the first missing step is 1, the last 4"),
    "no rollouts": (drop("rollouts"), "rollouts has no file of rollout 3"),
    "an empty rollout": (
        lambda run: (run / ROLLOUT).write_text(""),
        "rollout 3 in run/rollouts has no records",
    ),
    "a part of a rollout": (without_a_part, "it lacks rollout-000003.1-of-2.jsonl"),
    "a torn rollout": (
        lambda run: (run / ROLLOUT).write_text((run / ROLLOUT).read_text()[:-20]),
        f"{ROLLOUT} is damaged in line",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_records_that_are_gone_are_named_and_the_run_goes_on(case: str, here: Path) -> None:
    damage, words = LOST[case]
    damage(here)
    done = go_on()
    assert done.code == 0, done.err
    (found,) = [e for e in events(here, "finding") if e["code"] == "W164"]
    assert words in found["seen"]
    assert "W164" in done.out
    assert [record["step"] for record in metrics(here)][-1] == 5


@pytest.mark.parametrize("change", [{}, {"rollout_log": "none"}, {"rollout_log": 2}])
def test_nothing_is_said_of_records_that_were_never_written(change: dict[str, object], here: Path) -> None:
    if change:
        (here / ROLLOUT).unlink()
    done = go_on(**change)
    assert done.code == 0 and "W164" not in done.out + done.err


def test_torn_lines_and_hidden_leftovers_are_no_obstacle(here: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        with (here / name).open("a") as file:
            file.write('{"step": 5, "rol')
    (here / ".tmp-checkpoint-6-0a1b2c3d").mkdir()
    for leftover in (".tmp-plan.json", "rollouts/.tmp-rollout-000004.jsonl", ".tmp-checkpoint-6-0a1b2c3d/a"):
        (here / leftover).write_text("half")
    (here / "run.lock").write_text('{"pid": 1')
    assert go_on().code == 0
    assert [record["step"] for record in metrics(here)] == [1, 2, 3, 4, 5]
    assert not list(here.rglob(".tmp-*"))


MOMENTS = ("run.lock", ".tmp-config.yaml", "config.yaml", "plan.json", "rollouts", "metrics.jsonl", "staging")


@pytest.mark.parametrize("moment", MOMENTS[::2])
def test_auto_starts_anew_after_a_kill_before_the_first_checkpoint(moment: str, here: Path) -> None:
    """Whatever of its first files the killed run had written."""
    for checkpoint in here.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for name in ("events.jsonl", "reward.png"):
        (here / name).unlink()
    written = MOMENTS[: MOMENTS.index(moment) + 1]
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "rollouts"):
        if name not in written:
            shutil.rmtree(here / name) if (here / name).is_dir() else (here / name).unlink()
    (here / "run.lock").write_text("{}")
    (here / ".tmp-config.yaml").write_text("seed")
    if moment == "staging":
        (here / ".tmp-checkpoint-2-0a1b2c3d").mkdir()
        (here / ".tmp-checkpoint-2-0a1b2c3d" / "model.safetensors").write_text("half")
    before = {n: d for n, d in content(here).items() if n.split("/")[0] in written[2:6]}
    done = go_on("latest")
    assert done.code == 2 and done.err.startswith("E404")
    done = go_on("auto", max_steps=2)
    assert done.code == 0, done.err
    assert [record["step"] for record in metrics(here)] == [1, 2]
    kept = content(here)
    assert {f"superseded/1/{name}": digest for name, digest in before.items()}.items() <= kept.items()
    again = go_on("auto", max_steps=3)
    assert again.code == 0 and "resumed   at step 2" in again.out


def test_auto_does_not_start_in_a_directory_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.txt").write_text("mine")
    words = flags(small("quickstart#64", "photos"))
    done = covey("train", *words, "--resume_from_checkpoint", "auto")
    assert done.code == 2 and done.err.startswith("E402")


def test_a_checkpoint_of_another_run_does_not_go_on_in_a_directory_that_holds_one(here: Path) -> None:
    shutil.copytree(here, "other")
    before = content(here)
    done = go_on("other/checkpoint-2")
    assert done.code == 2 and done.err.startswith("E401")
    assert content(here) == before


@pytest.mark.parametrize("what", ["new", "overwrite", "auto", "latest"])
def test_a_directory_in_use_is_refused(what: str, here: Path) -> None:
    lock = take(here)
    assert isinstance(lock, Lock)
    before = content(here)
    more = {
        "new": [],
        "overwrite": ["--overwrite_output_dir", "true"],
        "auto": ["--resume_from_checkpoint", "auto"],
        "latest": ["--resume_from_checkpoint", "latest"],
    }[what]
    done = covey("train", *flags(small("quickstart#64", "run")), *more)
    assert (
        done.code == 2
        and done.err.startswith("E410")
        and f"process {json.loads(lock.path.read_text())['pid']}" in done.err
    )
    assert content(here) == before
    assert covey("doctor", "run").code == 0
    lock.release()
