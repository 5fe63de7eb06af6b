"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.telemetry.trackers.protocol import PROJECT, Start, columns_of
from covey.texts import tr

if TYPE_CHECKING:
    import wandb


class Wandb:
    """Sends to a wandb run under covey's own step."""

    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        columns: list[str | int] = [*columns_of(rows)]
        data = [[row.get(str(column)) for column in columns] for row in rows]
        # A reward that is a number in one row and missing in the next is one column all the same.
        self._run.log({name: wandb.Table(columns=columns, data=data, allow_mixed_types=True)}, step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def open_tracker(start: Start) -> Wandb:
    """Open a run, offline where nobody is logged in: wandb would ask on the terminal."""
    import wandb

    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    mode = None
    if settings.mode in ("online", "run", "shared") and not wandb.login(prompt=False):
        mode = "offline"
        start.note(
            tr(
                "wandb: nobody is logged in, so this run is recorded offline; `wandb sync` sends it "
                "later (`wandb login` or WANDB_API_KEY logs in)"
            )
        )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=start.run_name,
        dir=os.environ.get("WANDB_DIR") or str(start.output_dir),
        mode=mode,  # type: ignore[arg-type]
        config=dict(start.config),
        # Without a console of wandb's own the terminal stays covey's.
        settings=wandb.Settings(silent=True, console="off"),
    )
    return Wandb(run)
