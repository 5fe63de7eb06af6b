"""`covey selftest`: the device, the model, and the checks one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from covey.errors import ConfigError, GuardStop
from covey.plan.problem import problem
from covey.quickstart.built_in import directory_of
from covey.selftest import report
from covey.selftest.checks import Measured, checks
from covey.selftest.subject import refuse, subject, write_random_model
from covey.texts import tr
from covey.training.process import own_device
from covey.types import Fix, Problem


def selftest(
    device: str, model: str | None, say: Callable[[str], None], *, ignore_forecast: bool = False
) -> list[Measured]:
    """Run every check and say each line of the report.

    `device` is cpu, cuda or auto; `model` a directory, or None for the built-in random model. ConfigError
    says why it cannot start; GuardStop (F120) carries what failed.
    """
    target = _device(device)
    with tempfile.TemporaryDirectory(prefix="covey-selftest-") as work:
        directory = Path(work) if model is None else directory_of(model)
        if model is None:
            write_random_model(directory)
        else:
            refuse(directory, target, ignore_forecast=ignore_forecast)
        try:
            rows = _table(target, directory, model, say)
        except torch.OutOfMemoryError as error:
            raise ConfigError([_ran_out(error)]) from error
    say("")
    say(report.verdict(rows))
    if any(row.failed for row in rows):
        raise GuardStop(report.finding(rows, target))
    return rows


def _table(
    device: torch.device, directory: Path, model: str | None, say: Callable[[str], None]
) -> list[Measured]:
    """Say the header, and every check as it is done."""
    tested = subject(device, directory, is_built_in=model is None)
    for text in report.header(tested, model):
        say(text)
    rows = []
    for row in checks(tested):
        say(report.line(row))
        rows.append(row)
    return rows


def _ran_out(error: torch.OutOfMemoryError) -> Problem:
    return problem(
        "E211",
        "model",
        str(error).partition(". ")[0],
        tr("The model is too large for a self-test in float32, or other programs use the device."),
        Fix(text=tr("leave out --model: the built-in model uses the same code")),
        Fix(text=tr("`covey selftest --device cpu`")),
    )


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            [
                problem(
                    "E104",
                    "device",
                    tr("torch sees no CUDA device on this machine."),
                    tr("There is no GPU or no driver, or this build of torch supports only CPUs."),
                    Fix(text=tr("`covey selftest --device cpu`")),
                )
            ]
        )
    return torch.device("cpu") if asked == "cpu" else own_device()
