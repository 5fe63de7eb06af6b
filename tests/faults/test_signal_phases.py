"""What a signal does in each phase of a run: the tables of docs/signals.md."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey import train
from covey.activity import Activity
from covey.checkpoint import write
from covey.checkpoint.read import verify
from covey.checkpoint.registry import Registry
from covey.cli.main import main
from covey.health.rules import Rules
from covey.learner.backends.single import SingleBackend
from covey.training import build, process, saving
from covey.training.evaluate import Evaluator
from covey.training.limits import Signals

SMALL: dict[str, Any] = {
    "model": "quickstart",
    "dataset": ["quickstart#64"],
    "reward_funcs": ["accuracy"],
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "max_steps": 3,
}
WORDS = [
    *("train", "--model", "quickstart", "--dataset", "quickstart#64", "--reward_funcs", "accuracy"),
    *("--max_completion_length", "8"),
]
EVALUATED = {"val_dataset": ["quickstart#8"], "eval_steps": 1, "eval_on_start": False}


def signalled(
    patch: pytest.MonkeyPatch, owner: Any, name: str, *numbers: int, call: int = 0
) -> Callable[[], int]:
    """Send signals at the end of one call of a function, and count its calls."""
    real, calls = getattr(owner, name), 0

    def sends(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        answer = real(*args, **kwargs)
        if calls == call + 1:
            for number in numbers:
                signal.raise_signal(number)
        return answer

    patch.setattr(owner, name, sends)
    return lambda: calls


def checkpoints(run: Path) -> list[str]:
    """Everything of checkpoints in a run directory, also what is half written."""
    return sorted(path.name for path in run.glob("*checkpoint-*"))


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def ended_by_sigterm(run: Path, **options: Any) -> str:
    """The newest checkpoint of a run that SIGTERM ends; it can be resumed from."""
    with pytest.raises(SystemExit) as ended:
        train(**{**SMALL, **options}, output_dir=str(run))
    assert ended.value.code == 143
    newest = checkpoints(run)[-1]
    assert verify(run / newest).trainer
    return newest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_while_weights_load(
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command ends with the signal's code, without a checkpoint or a word."""
    signalled(monkeypatch, build, "backend_for", number)
    assert main([*WORDS, "--max_steps", "1", "--output_dir", str(tmp_path / "run")]) == code
    assert checkpoints(tmp_path / "run") == [] and not (tmp_path / "run" / "config.yaml").exists()
    assert capsys.readouterr().err == ""


def test_in_the_first_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is finished, and the untrained model is saved."""
    signalled(monkeypatch, Evaluator, "_collect", signal.SIGTERM)
    assert ended_by_sigterm(tmp_path / "run", **{**EVALUATED, "eval_on_start": True}) == "checkpoint-0"


def test_in_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is finished, recorded and saved."""
    signalled(monkeypatch, SingleBackend, "backward", signal.SIGTERM)
    assert ended_by_sigterm(tmp_path / "run") == "checkpoint-1"
    assert steps(tmp_path / "run") == [1]


def test_in_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is finished and recorded with its step; the next rollout is not begun."""
    signalled(monkeypatch, Evaluator, "_collect", signal.SIGTERM)
    assert ended_by_sigterm(tmp_path / "run", **EVALUATED) == "checkpoint-1"
    (record,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert "eval_reward" in record


def test_before_an_evaluation_that_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal in the update does not leave out the evaluation of this step."""
    signalled(monkeypatch, SingleBackend, "backward", signal.SIGTERM)
    evaluations = signalled(monkeypatch, Evaluator, "_collect")
    assert ended_by_sigterm(tmp_path / "run", **EVALUATED) == "checkpoint-1"
    assert evaluations() == 1


def test_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is finished; with steps left in the rollout, one more step is taken and saved."""
    with monkeypatch.context() as patch:
        signalled(patch, saving, "write_checkpoint", signal.SIGTERM)
        assert ended_by_sigterm(tmp_path / "run", save_steps=1) == "checkpoint-1"
    signalled(monkeypatch, saving, "write_checkpoint", signal.SIGTERM)
    assert ended_by_sigterm(tmp_path / "more", save_steps=1, num_iterations=2) == "checkpoint-2"


def test_after_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is complete, and ends with 0."""
    signalled(monkeypatch, Rules, "check", signal.SIGTERM, call=2)
    outcome = train(**SMALL, output_dir=str(tmp_path / "run"))
    assert (outcome.exit_code, outcome.step) == (0, 3)
    assert verify(outcome.checkpoint).trainer


def test_a_second_interrupt_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of the checkpoint that was being written; the one before it stays."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signalled(patch, Registry, "states", signal.SIGINT, signal.SIGINT, call=1)
        with pytest.raises(KeyboardInterrupt) as ended:
            train(**SMALL, save_steps=1, output_dir=str(run))
    assert str(ended.value) == ""
    assert checkpoints(run) == ["checkpoint-1"] and verify(run / "checkpoint-1").trainer


def test_a_second_interrupt_while_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden directory is removed."""
    signalled(monkeypatch, write, "write_shards", signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(**SMALL, save_steps=1, output_dir=str(tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == []


def test_sigterm_and_then_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind SIGTERM ends at once; SIGTERM behind either one changes nothing but the exit code."""
    with monkeypatch.context() as patch:
        signalled(patch, SingleBackend, "backward", signal.SIGTERM, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(**SMALL, output_dir=str(tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == []
    for first in (signal.SIGTERM, signal.SIGINT):
        with monkeypatch.context() as patch:
            signalled(patch, SingleBackend, "backward", first, signal.SIGTERM)
            assert ended_by_sigterm(tmp_path / f"twice-{first}") == "checkpoint-1"


def test_only_two_signals_are_handled() -> None:
    """All others do what the system does: SIGHUP and SIGUSR1 end the process, and nothing is saved."""
    own = [number for number in signal.valid_signals() if number not in process.SIGNAL_CODES]
    before = [signal.getsignal(number) for number in own]
    with process.handlers(Signals(), Activity()):
        assert [signal.getsignal(number) for number in own] == before
        assert all(callable(signal.getsignal(number)) for number in process.SIGNAL_CODES)
    assert process.SIGNAL_CODES == {signal.SIGINT: 130, signal.SIGTERM: 143}
