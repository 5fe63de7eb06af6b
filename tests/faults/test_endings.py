"""How a run ends when it does not end by itself: signals save and say so, a guard saves and names the
cause."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey import train
from covey.checkpoint.read import find_latest, verify
from covey.comm import LocalComm
from covey.errors import CONTINUE, GuardStop
from covey.health.hang import read_status
from covey.health.rules import Rules
from covey.learner import update
from covey.learner.optimizer import Masters
from covey.learner.update import _Sums
from covey.training.evaluate import Evaluator
from covey.types import StepStats
from support.machines import plain_environment

WORDS = [
    *("--model", "quickstart", "--dataset", "quickstart#512", "--reward_funcs", "accuracy", "format"),
    *("--per_device_train_batch_size", "16", "--max_completion_length", "24", "--output_dir", "run"),
]
SMALL: dict[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart#512"],
    "reward_funcs": ["accuracy", "format"],
    "per_device_train_batch_size": 16,
    "max_completion_length": 24,
}


def steps(run: Path) -> list[int]:
    """The steps on record; a last line without its break is still being written."""
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    return [json.loads(line)["step"] for line in whole.splitlines()]


def events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        (signal.SIGINT, 1),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_saves_and_the_run_goes_on(number: signal.Signals, processes: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "covey", "train", *WORDS, "--max_steps", "2000"]
    command += ["--nproc_per_node", str(processes)]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "run"
    until = time.monotonic() + 90
    while len(steps(run)) < 3:
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], err
    assert err.count("then saving") == 1
    assert err.count("press Ctrl-C again to end at once") == (number == signal.SIGINT)
    assert not any(word in err for word in ("Traceback", "death signal", "closing signal")), err
    taken = steps(run)
    assert verify(run / f"checkpoint-{taken[-1]}").trainer
    assert "--resume_from_checkpoint latest" in out and "stopped" in out
    more = str(taken[-1] + 2)
    done = subprocess.run(
        [*command[:-2], "--max_steps", more, "--resume_from_checkpoint", "latest", *command[-2:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert steps(run) == list(range(1, int(more) + 1))


@pytest.fixture
def long_step(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two processes in the middle of a step that takes longer than torchrun waits by itself."""
    words = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "160"]
    child = subprocess.Popen(
        [sys.executable, "-m", "covey", "train", *WORDS, *words, "--nproc_per_node", "2"],
        cwd=tmp_path,
        env={**plain_environment(), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    try:
        while (status := read_status(tmp_path / "run" / "status-rank-0.json")) is None or not status.micro:
            assert child.poll() is None, child.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.05)
        yield child
    finally:
        # Its processes end with it.
        child.kill()


@pytest.mark.multi
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_several_processes_end_their_step_and_save(
    long_step: subprocess.Popen[str], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    long_step.send_signal(number)
    out, err = long_step.communicate(timeout=300)
    assert long_step.returncode == code, err
    assert steps(tmp_path / "run") == [1]
    assert verify(tmp_path / "run" / "checkpoint-1").trainer
    assert "--resume_from_checkpoint latest" in out and "Traceback" not in err


@pytest.mark.multi
def test_a_second_interrupt_ends_several_processes(long_step: subprocess.Popen[str], tmp_path: Path) -> None:
    for _ in range(2):
        long_step.send_signal(signal.SIGINT)
        time.sleep(1)
    _, err = long_step.communicate(timeout=60)
    assert long_step.returncode == 130, err
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert err.count("press Ctrl-C again") == 1 and "Traceback" not in err


@pytest.mark.multi
@pytest.mark.parametrize("killed", [[1], pytest.param([0, 1], marks=pytest.mark.slow)], ids=str)
def test_killed_before_the_save(long_step: subprocess.Popen[str], killed: list[int], tmp_path: Path) -> None:
    """Exit code 143 would say that the work is saved; the last lines say what happened, in covey's words."""
    run = tmp_path / "run"
    pids = [status.pid for rank in killed if (status := read_status(run / f"status-rank-{rank}.json"))]
    assert len(pids) == len(killed)
    long_step.send_signal(signal.SIGTERM)
    time.sleep(1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _, err = long_step.communicate(timeout=60)
    assert long_step.returncode == 1, err
    assert not list(run.glob("checkpoint-*"))
    codes = [event["code"] for event in events(run) if event["kind"] == "finding"]
    assert codes == ["F133"]
    said = err[err.index("F133") :]
    assert err.count("F133") == 1 and ("rank 1" in said or "ranks 0, 1" in said)
    assert "--resume_from_checkpoint auto" in "\n".join(said.splitlines()[-2:])
    assert not any(words in err for words in ("Traceback", "ChildFailedError", "exitcode"))


def test_no_collective_loses_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the ranks ask each other for the first time, the second time and so on, as often as a run
    of one step does: each longer run ends for it, soon."""
    with monkeypatch.context() as patch:
        calls = interrupt(patch, LocalComm, "max", -1)
        train(**SMALL, max_steps=1, output_dir=str(tmp_path / "one-step"))
    assert len(calls) > 2
    for number in calls:
        with monkeypatch.context() as patch:
            interrupt(patch, LocalComm, "max", number)
            saved = interrupted_run(tmp_path / f"run-{number}", max_steps=9)
        assert int(saved.name.removeprefix("checkpoint-")) <= 3
        assert verify(saved).trainer


def interrupted_run(output_dir: Path, **options: Any) -> Path:
    """A run that Ctrl-C ends, and with it the program; its newest checkpoint."""
    with pytest.raises(KeyboardInterrupt, match="resume_from_checkpoint=True") as ended:
        train(**SMALL, **options, output_dir=str(output_dir))
    newest = find_latest(output_dir, with_trainer=True).path
    assert newest is not None and str(newest) in str(ended.value)
    return newest


def interrupt(
    patch: pytest.MonkeyPatch, of: type, name: str, number: int, sent: int = signal.SIGINT
) -> list[int]:
    """Ctrl-C, or another signal, at the end of one call of a method, the first being 0; the calls so far.
    Those before the run has its own handler do not count: there Ctrl-C ends it as it ends any program."""
    real, calls = getattr(of, name), []
    before = (signal.getsignal(signal.SIGINT), signal.SIG_IGN)

    def interrupted(*args: Any) -> Any:
        answer = real(*args)
        if signal.getsignal(signal.SIGINT) in before:
            return answer
        if len(calls) == number:
            signal.raise_signal(sent)
        calls.append(len(calls))
        return answer

    patch.setattr(of, name, interrupted)
    return calls


def test_a_signal_behind_the_agreement_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process alone has seen when a step is agreed on does not end it there: other ranks, which
    saw it a moment later, would be left waiting. They agree in the next step, or in the next rollout."""
    interrupt(monkeypatch, Rules, "check", 1)
    saved = interrupted_run(tmp_path / "in-a-rollout", max_steps=6, num_iterations=2)
    assert saved.name == "checkpoint-2"
    with monkeypatch.context() as patch:
        interrupt(patch, Rules, "check", 0)
        saved = interrupted_run(tmp_path / "in-a-step", max_steps=6, num_iterations=2)
    assert saved.name == "checkpoint-2"
    assert steps(tmp_path / "in-a-step") == [1, 2]


def test_a_program_goes_on_with_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM ends a program as sys.exit(143) does; what is said then is what works. A reward that was
    changed in between is told of."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+1=", "solution": str(n + 1)} for n in range(32)]
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def f(completions, **columns):\n    return [float(len(text)) for text in completions]\n"
    )
    options = {**SMALL, "dataset": rows, "reward_funcs": "reward.py:f", "max_steps": 3, "save_steps": 100}
    with monkeypatch.context() as patch:
        interrupt(patch, Rules, "check", 0, signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            train(**options)
    assert ended.value.code == 143
    said = capsys.readouterr().out
    assert "the same arguments and resume_from_checkpoint=True" in said and "covey train" not in said
    reward.write_text(reward.read_text().replace("float(len(text))", "-float(len(text))"))
    outcome = train(**options, resume_from_checkpoint=True)
    assert "The code of reward.py:f has changed since" in " ".join(capsys.readouterr().out.split())
    assert "W163" in [e.get("code") for e in events(outcome.output_dir)]
    assert (outcome.exit_code, outcome.step) == (0, 3)
    assert steps(outcome.output_dir) == [1, 2, 3]


def test_a_gradient_that_is_not_finite_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN is planted in the third step's gradient: F101, weights as after the second, saved and
    recorded."""
    real = Masters.step
    held: list[torch.Tensor] = []
    count = 0

    def spoiled(self: Masters, learning_rate: float) -> StepStats:
        nonlocal count
        count += 1
        if count == 3:
            held.extend(m.detach().clone() for m in self.masters)
            assert self.masters[0].grad is not None
            self.masters[0].grad.view(-1)[7] = float("nan")
        return real(self, learning_rate)

    monkeypatch.setattr(Masters, "step", spoiled)
    run = tmp_path / "run"
    with pytest.raises(GuardStop) as stopped:
        train(**SMALL, learning_rate=1e-4, max_steps=5, output_dir=str(run))
    finding = stopped.value.finding
    assert finding.code == "F101"
    assert "nan" in finding.seen and finding.why and finding.cause and finding.fixes
    assert steps(run) == [1, 2]
    assert verify(run / "checkpoint-2").trainer
    assert [e["code"] for e in events(run) if e["kind"] == "finding"] == ["F101"]
    said = str(stopped.value).splitlines()
    assert said[0].startswith(f"F101 at step {finding.step}: ") and said[1].startswith("  cause  ")
    assert said[-2:] == [f"The run was saved in {run / 'checkpoint-2'}.", CONTINUE]
    from safetensors.torch import load_file

    saved = load_file(str(run / "checkpoint-2" / "model.safetensors"))
    assert torch.equal(saved["model.embed_tokens.weight"], held[0])


def test_a_gradient_of_zero_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is cut in front of the loss: every metric looks as usual, and the first step stops the
    run."""
    real = Masters.step

    def cut(self: Masters, learning_rate: float) -> StepStats:
        for master in self.masters:
            if master.grad is not None:
                master.grad.zero_()
        return real(self, learning_rate)

    monkeypatch.setattr(Masters, "step", cut)
    with pytest.raises(GuardStop) as stopped:
        train(**SMALL, max_steps=5, output_dir=str(tmp_path / "run"))
    assert (stopped.value.finding.code, stopped.value.finding.step) == ("F102", 1)


def test_weights_that_do_not_move_are_named(tmp_path: Path) -> None:
    """A learning rate below what float32 weights can hold."""
    with pytest.raises(GuardStop) as stopped:
        train(**SMALL, learning_rate=1e-30, max_steps=5, output_dir=str(tmp_path / "run"))
    assert (stopped.value.finding.code, stopped.value.finding.step) == ("F103", 1)


def test_a_condemned_step_is_recorded_and_not_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []
    real = Evaluator.run

    def counted(self: Evaluator) -> Any:
        evaluated.append(self.collector.comm.activity.step)
        return real(self)

    monkeypatch.setattr(Evaluator, "run", counted)
    sets = {"val_dataset": ["quickstart#8"], "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(GuardStop):
        train(**SMALL, **sets, learning_rate=1e-30, max_steps=5, output_dir=str(tmp_path / "run"))
    assert steps(tmp_path / "run") == [1] and 1 not in evaluated


def test_a_gap_that_is_not_a_number_on_one_rank_is_one_for_all() -> None:
    """Wherever the rank stands, and for both gaps: to the old logprobs and to the engine's."""
    for gaps in ([math.nan, 0.1, 0.1, math.nan], [0.1, math.nan, math.nan, 0.1]):

        class Ranks(LocalComm):
            world = 2

            def sum(self, values: Any, gaps: list[float] = gaps) -> list[float]:
                return [0.0, *gaps, *values[1 + len(gaps) :]]

        sums = _Sums(has_signal=(), gradients=[torch.zeros(1)])
        (_, *largest), _ = update._with_evidence(sums, 0.1, [], Ranks())
        assert [gap is not None and math.isnan(gap) for gap in largest] == [True, True]
