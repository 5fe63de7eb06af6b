"""SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.telemetry.trackers.protocol import PROJECT, Start, columns_of
from covey.texts import tr

if TYPE_CHECKING:
    import swanlab


class SwanLab:
    """Sends to a SwanLab run under covey's own step."""

    def __init__(self, run: swanlab.Run) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import swanlab

        columns = columns_of(rows)
        table = swanlab.echarts.Table()
        table.add(columns, [[row.get(column) for column in columns] for row in rows])
        self._run.log({name: table}, step=step)

    def close(self, exit_code: int) -> None:
        if exit_code == 0:
            self._run.finish()
        else:
            self._run.finish(state="crashed", error=tr("exit code {exit_code}", exit_code=exit_code))


def open_tracker(start: Start) -> SwanLab:
    """Open a run, offline where there is no API key: SwanLab would ask on the terminal."""
    import swanlab

    settings = swanlab.Settings()
    mode = None
    if settings.mode == "online" and settings.api_key is None:
        mode = "offline"
        start.note(
            tr(
                "swanlab: there is no API key, so this run is recorded offline; `swanlab sync` sends "
                "it later (`swanlab login` or SWANLAB_API_KEY gives the key)"
            )
        )
    log_dir = start.output_dir / "swanlog"
    if "SWANLAB_LOG_DIR" not in os.environ:
        log_dir.mkdir(parents=True, exist_ok=True)
    run = swanlab.init(
        project=None if settings.project.name is not None else PROJECT,
        name=start.run_name,
        log_dir=None if "SWANLAB_LOG_DIR" in os.environ else str(log_dir),
        mode=mode,  # type: ignore[arg-type]
        config=dict(start.config),
        settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
    )
    return SwanLab(run)
