"""Trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.telemetry.trackers.protocol import PROJECT, Start, columns_of

if TYPE_CHECKING:
    import trackio


class Trackio:
    """Writes to a Trackio run, by default a database in trackio/ of the run directory."""

    def __init__(self, run: trackio.Run) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        columns = columns_of(rows)
        data = [[row.get(column) for column in columns] for row in rows]
        self._run.log({name: trackio.Table(columns=columns, data=data)}, step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish()


def open_tracker(start: Start) -> Trackio:
    """Open a run; without a Space or a server in the environment nothing leaves this machine."""
    # Trackio reads this once, while it is imported.
    os.environ.setdefault("TRACKIO_DIR", str(start.output_dir.absolute() / "trackio"))
    import trackio

    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
        name=start.run_name,
        config=dict(start.config),
        embed=False,
    )
    return Trackio(run)
