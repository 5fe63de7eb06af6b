"""The run directory as the run's own: locked by the first rank, for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from covey.checks.output.judge import output_dir_problems
from covey.checks.run.look import output_state
from covey.comm import Comm
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.facts import OutputFacts, RunOwner
from covey.telemetry.owner import LOCK, Lock, take


@contextmanager
def owned(config: Config, output: OutputFacts, comm: Comm) -> Iterator[Lock | None]:
    """Own the run directory from here on; the first rank holds the lock, the others have None. Collective.

    ConfigError on every rank (E410) where another process has come first, (E401) where it has even ended in
    between, and (E403) where there can be no lock.
    """
    lock: Lock | None = None
    said: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            Path(config.output_dir).mkdir(parents=True, exist_ok=True)
            taken = take(Path(config.output_dir))
        except OSError as error:
            said = {"error": f"{error.strerror or error} ({LOCK})"}
        else:
            lock = taken if isinstance(taken, Lock) else None
            said = {} if lock is not None else {"owner": asdict(taken)}  # type: ignore[call-overload]
            said["state"] = output_state(Path(config.output_dir))
    try:
        _refuse(config, output, comm.gather_json(said)[0])
        yield lock
    finally:
        if lock is not None:
            lock.release()


def _refuse(config: Config, output: OutputFacts, said: dict[str, Any]) -> None:
    if "error" in said:
        now = replace(output, state="not_writable")
    else:
        owner = RunOwner(**said["owner"]) if "owner" in said else None
        now = replace(output, owner=owner, state=said["state"])
    if now != output and (found := output_dir_problems(config, now, said.get("error", ""))):
        raise ConfigError(found)
