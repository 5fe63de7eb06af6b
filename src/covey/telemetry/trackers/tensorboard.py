"""TensorBoard's event files, under runs/ in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.telemetry.trackers.protocol import Start, columns_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes event files; a resumed run adds another file to the same curves."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.add_text(name, markdown(rows), step)

    def close(self, exit_code: int) -> None:
        self._writer.close()


def open_tracker(start: Start) -> TensorBoard:
    """Open the event file and write the configuration as a table."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(start.output_dir / "runs"), flush_secs=10)
    writer.add_text("config", markdown([{"option": k, "value": v} for k, v in start.config.items()]))
    if start.run_name is not None:
        writer.add_text("run_name", start.run_name)
    return TensorBoard(writer)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""Return rows as a markdown table: `markdown([{"a": "x|y"}])` is "| a |\n|---|\n| x\|y |"."""
    columns = columns_of(rows)
    lines = [[_cell(column) for column in columns], *([_cell(row.get(c)) for c in columns] for row in rows)]
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    # A completion that holds HTML is shown as the text that it is.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r\n", "\n").replace("\n", "<br>")
