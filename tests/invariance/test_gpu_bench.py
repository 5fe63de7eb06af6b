"""`make gpu-check`, small and on a CPU: it passes, and whatever is wrong or unfinished makes it fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu  # noqa: E402
from on_gpu.engine import agreement  # noqa: E402
from on_gpu.lines import Found, Lines, read_lines  # noqa: E402
from on_gpu.parts import ALL_SECONDS, DEFAULT_SECONDS, PARTS, Part, chosen  # noqa: E402
from on_gpu.processes import run_limited  # noqa: E402
from on_gpu.sampling import Graphs  # noqa: E402
from on_gpu.table import Ended, table  # noqa: E402
from on_gpu.train import STEPS, stepped, used  # noqa: E402

from covey.types import Completion, Finish  # noqa: E402

CHECKING = Part(number=1, name="engine", module="engine", limit_s=9, checks=True)
RAGGED = "tiny, 64 rows up to 40"
MEASURING = Part(number=4, name="decode", module="decode", limit_s=9, checks=False)


def check(out: Path, parts: str, plant: str = "", stop_at: str = "") -> tuple[int, str, list[dict[str, Any]]]:
    """Run the command; status, output and results. `plant` is code that each part's process runs first; the
    command is told to stop behind the case `stop_at`."""
    environment = dict(os.environ)
    if plant:
        out.mkdir(parents=True)
        guard = "import sys\nif '--one' in sys.orig_argv:\n"
        bench = f"sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
        code = guard + textwrap.indent(bench + textwrap.dedent(plant), "    ")
        (out / "sitecustomize.py").write_text(code)
        environment["PYTHONPATH"] = str(out)
    with subprocess.Popen(
        [sys.executable, str(ROOT / "bench/gpu.py"), "--small", "--parts", parts, "--out", str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while stop_at and not any(r["case"] == stop_at for r in read_lines(out / "results.jsonl")):
            time.sleep(0.2)
        if stop_at:
            process.terminate()
        said, _ = process.communicate(timeout=500)
    return process.returncode, said, read_lines(out / "results.jsonl")


def test_every_part_runs_and_passes(tmp_path: Path) -> None:
    code, said, results = check(tmp_path, "all")
    assert code == 0, said
    assert {r["status"] for r in results} == {"ok", "measured", "ended"}
    cases = [(r["part"], r["case"]) for r in results]
    assert {part for part, _ in cases} == {p.name for p in PARTS}
    for wanted in (
        ("machine", "imports"),
        ("engine", "gemma2 bfloat16 prefix"),
        ("engine", "self test: resume: weights"),
        ("gradients", "qwen3 bfloat16 sdpa prefix passes"),
        ("gradients", "qwen3 float32 eager packed"),
        ("train", "what it used"),
        ("families", "gpt_oss bfloat16 sdpa packed"),
        ("steps", "covey"),
    ):
        assert wanted in cases
    # Every result is in the table, and some machines hand back eight files at most.
    assert [case for _, case in cases if case != "process" and case not in said] == []
    assert "passed" in said and (tmp_path / "table.txt").read_text() in said
    assert len(list(tmp_path.iterdir())) <= 8
    assert len((tmp_path / "profile.txt").read_text().splitlines()) > 20


def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    plant = """
        from covey.kernels.torch_ import attention
        from covey.models import layouts
        own = attention.attend_eager
        attention.attend_eager = layouts.attend_eager = lambda *arguments: 1.001 * own(*arguments)
    """
    code, said, results = check(tmp_path / "out", "gradients", plant)
    failed = {r["case"] for r in results if r["status"] == "FAILED"}
    assert code == 1 and failed == {"qwen3 float32 eager prefix", "qwen3 float32 eager packed"}, said
    assert "FAILED: gradients: qwen3 float32 eager prefix FAILED" in said


def test_a_speed_without_recordings_is_a_failure(tmp_path: Path) -> None:
    plant = """
        from on_gpu import decode
        from covey.kernels.gpu.recordings import Recordings
        def fails(compute):
            raise RuntimeError("operation not permitted when stream is capturing")
        decode.recordings = lambda: Recordings(record=fails)
    """
    code, said, results = check(tmp_path / "out", "4", plant)
    failed = [r for r in results if r["status"] == "FAILED"]
    assert code == 1 and [r["case"] for r in failed] == ["tiny batch 8", "tiny batch 16", RAGGED], said
    assert all("stream is capturing" in r["why"] and "tokens_per_s" not in r["figures"] for r in failed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_to_type(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "bench/gpu.py"), "--parts", "0", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "make gpu-check SMALL=1" in done.stdout


def test_a_crash_of_one_part_loses_no_other(tmp_path: Path) -> None:
    plant = """
        import types
        module = types.ModuleType("on_gpu.decode")
        def run(lines):
            import os
            from on_gpu.lines import Found
            lines.case("first", lambda: Found(figures={"done": 1}))
            lines.case("second", lambda: 1 / 0)
            os.abort()
        module.run = run
        sys.modules["on_gpu.decode"] = module
    """
    code, said, results = check(tmp_path / "out", "decode,machine", plant)
    by_case = {(r["part"], r["case"]): r for r in results}
    assert code == 1 and by_case["decode", "first"]["figures"]["done"] == 1, said
    assert by_case["decode", "second"]["why"] == "ZeroDivisionError: division by zero"
    assert by_case["decode", "process"]["figures"]["code"] == -6
    assert by_case["machine", "imports"]["status"] == "ok"
    assert (
        "FAILED: decode: exit status -6" in said and "Traceback" in (tmp_path / "out/parts.log").read_text()
    )


def test_a_stopped_check_shows_what_was_finished(tmp_path: Path) -> None:
    plant = """
        import types
        module = types.ModuleType("on_gpu.engine")
        def run(lines):
            import time
            from on_gpu.lines import Found
            lines.case("first", lambda: Found(figures={"done": 1}, passed=True))
            time.sleep(300)
        module.run = run
        sys.modules["on_gpu.engine"] = module
    """
    code, said, results = check(tmp_path / "out", "1,2", plant, stop_at="first")
    assert code == 1 and "FAILED: engine: not finished; gradients: not finished" in said
    assert [r["case"] for r in results] == ["first"] and "first" in (tmp_path / "out/table.txt").read_text()


def test_at_its_limit_a_process_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    script = """
        import subprocess, sys, time
        for apart in (False, True):
            words = [sys.executable, "-c", "import time; time.sleep(60)"]
            child = subprocess.Popen(words, start_new_session=apart)
            print(child.pid, flush=True)
        time.sleep(60)
    """
    began = time.monotonic()
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", textwrap.dedent(script)]
        assert run_limited(command, limit_s=2, log=log, environment=os.environ) is None
    assert time.monotonic() - began < 10
    started = [int(word) for word in (tmp_path / "log").read_text().split()]
    assert len(started) == 2
    deadline = time.monotonic() + 5
    while alive := [pid for pid in started if _is_alive(pid)]:
        assert time.monotonic() < deadline, alive


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_was_finished_before_a_kill_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = Lines(part="engine", path=path, small=False, deadline=time.monotonic() + 5)
    assert lines.case("quick", lambda: Found(figures={"value": 1.23456789}, passed=True), needs_s=1)
    assert not lines.case("long", lambda: Found(figures={}, passed=True), needs_s=60)
    with path.open("a") as file:
        file.write('{"part": "engine", "case": "ha')
    results = read_lines(path)
    assert [(r["case"], r["status"]) for r in results] == [("quick", "ok"), ("long", "skipped")]
    assert results[0]["figures"]["value"] == 1.235 and "60 s" in results[1]["why"]
    found = table(results, [Ended(part=CHECKING, code=None, seconds=9.0)])
    assert found.faults == ["engine: killed at its limit"]
    assert any("value 1.2" in line for line in found.lines) and "killed at its limit of 9 s" in found.lines[0]


@pytest.mark.parametrize(
    ("part", "code", "statuses", "faults"),
    [
        (CHECKING, 0, ["ok", "skipped"], 0),
        (CHECKING, 0, ["ok", "FAILED"], 1),
        (CHECKING, 0, ["ok", "error"], 1),
        (CHECKING, 0, ["skipped"], 1),
        (CHECKING, None, ["ok"], 1),
        (CHECKING, 1, [], 2),
        # One size that does not fit into a GPU, or a late one, is reported.
        (MEASURING, 0, ["measured", "error"], 0),
        (MEASURING, None, ["measured"], 0),
        (MEASURING, 0, ["measured", "FAILED"], 1),
        (MEASURING, 0, [], 1),
        (MEASURING, 1, ["measured"], 1),
    ],
)
def test_what_is_a_fault(part: Part, code: int | None, statuses: list[str], faults: int) -> None:
    results = [
        {"part": part.name, "case": str(i), "status": s, "figures": {}, "predicted": {}, "why": ""}
        for i, s in enumerate(statuses)
    ]
    assert len(table(results, [Ended(part=part, code=code, seconds=1.0)]).faults) == faults


def test_limits_and_names_of_parts() -> None:
    assert sum(p.limit_s for p in chosen("")) <= DEFAULT_SECONDS
    assert sum(p.limit_s for p in chosen("all")) <= ALL_SECONDS
    assert [p.number for p in chosen("")] == [0, 1, 2, 3, 4]
    assert [p.name for p in chosen("steps, 1")] == ["engine", "steps"]
    with pytest.raises(ValueError, match="no such part: 9"):
        chosen("1,9")


def _completion(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion(
        request_id=0,
        token_ids=tokens,
        logprobs=logprobs,
        versions=((0, len(tokens)),),
        finish=Finish.LENGTH,
        seconds=0.0,
    )


def test_rows_are_compared_up_to_where_they_part() -> None:
    row = _completion((1, 2, 3, 4), (-1.0, -1.0, -1.0, -1.0))
    assert agreement([row], [row]) == (1.0, 0.0, 0.0)
    assert agreement([row], [_completion((1, 2, 9, 4), (-1.0, -1.5, -9.0, -9.0))]) == (0.5, 0.5, 0.25)
    assert agreement([row], [_completion((1, 2, 3, 4), (-1.0, float("nan"), -1.0, -1.0))])[0] == 0.0
    assert agreement([row], [_completion((9, 2, 3, 4), (-1.0, -1.0, -1.0, -1.0))])[0] == 0.0


def test_what_a_run_used_is_read_from_its_output() -> None:
    said = "rows are laid out as: prefix\nkernels   attention: sdpa, computed in C for plain causal attention"
    assert used(said, "").passed
    assert not used(said.replace("prefix", "packed"), "").passed
    assert not used(said.replace("sdpa", "eager"), "").passed
    assert not used(said + "\ndecoding continues without CUDA graphs", "").passed
    assert not used("", "").passed


def test_the_steps_of_a_run_are_checked() -> None:
    step = {
        "loss": 0.1,
        "grad_norm": 1.0,
        "sampling/sampling_logp_difference/mean": 1e-6,
        "time/step_s": 1.0,
        "time/rollout_s": 0.5,
    }
    whole = [step] * STEPS
    assert stepped(whole).passed
    for wrong in (
        whole[1:],
        [],
        [*whole[1:], {**step, "loss": float("nan")}],
        [*whole[1:], {**step, "sampling/sampling_logp_difference/mean": 0.2}],
        [*whole[1:], {**step, "sampling/sampling_logp_difference/mean": float("nan")}],
    ):
        assert not stepped(wrong).passed, wrong


def test_the_command_needs_nothing_of_this_environment() -> None:
    """On a machine without a network there is no .venv, and what is collected for it is no part of git."""
    shown = subprocess.run(
        ["make", "-n", "--no-print-directory", "gpu-check", "PYTHON=python3", "PARTS=1,4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (
        shown.split()
        == "python3 bench/gpu.py --parts 1,4 --out .gpu-check".replace("1,4", "'1,4'")
        .replace(".gpu-check", "'.gpu-check'")
        .split()
    )
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".gpu-check/", ".gpu-wheels/"} <= set(ignored)


def test_carried_packages_are_used_where_some_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried/__init__.py", "")
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kept")
    packages = tmp_path / "scratch/packages"
    own = gpu.environment_of_parts(tmp_path / "scratch")["PYTHONPATH"]
    assert own.split(":") == [str(ROOT / "src"), "/before"] and not packages.exists()
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    found = gpu.environment_of_parts(tmp_path / "scratch")
    assert found["PYTHONPATH"].split(":") == [str(packages), str(ROOT / "src"), "/before"]
    assert (packages / "carried/__init__.py").exists()
    own = found["TORCHINDUCTOR_CACHE_DIR"], found["TMPDIR"]
    assert all(path.startswith(str(tmp_path / "scratch")) for path in own)
    # What a caller keeps from one run to the next is used.
    assert found["TRITON_CACHE_DIR"] == "/kept"


def test_captures_are_counted_whoever_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            self.mode = capture_error_mode

        def capture_end(self) -> None:
            if self.mode == "bad":
                raise RuntimeError("capture failed")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    own = Graph.capture_begin
    with Graphs() as graphs:
        for mode in ("thread_local", "bad", "thread_local"):
            graph = Graph()
            graph.capture_begin(pool=(0, 1), capture_error_mode=mode)
            try:
                graph.capture_end()
            except RuntimeError:
                assert mode == "bad"
    assert graphs.count == 2 and graphs.seconds >= 0 and Graph.capture_begin is own


def test_what_is_carried_has_a_version() -> None:
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = {name.lower().replace("_", "-") for name in pins}
    names = [line for line in (ROOT / "bench/gpu-wheels.txt").read_text().splitlines() if line[0] != "#"]
    assert [n for n in names if "==" not in n and n.lower().replace("_", "-") not in known] == []
    trl = (ROOT / "bench/trl.txt").read_text()
    assert [n for n in names if n.startswith("trl") and n not in trl] == []


def test_results_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = Lines(part="decode", path=path, small=True, deadline=0.0)
    lines.case("a", lambda: Found(figures={"x": float("inf"), "y": "text"}, predicted={"x": [1, 2]}))
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["status"] == "measured" and line["predicted"] == {"x": [1, 2]}
