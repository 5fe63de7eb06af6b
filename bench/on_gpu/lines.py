"""What a part has found, one JSON line a case, written at once: what was finished before a kill is kept."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# A case is checked and right or wrong, is measured only, was left out for time, or could not be done.
Status = Literal["ok", "FAILED", "measured", "skipped", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a case gave: `passed` is None where nothing is checked; `predicted` is for one H100."""

    figures: Mapping[str, Any]
    passed: bool | None = None
    predicted: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(slots=True, kw_only=True)
class Lines:
    """The lines of one part, which has until `deadline` on the clock of `time.monotonic`."""

    part: str
    path: Path
    small: bool
    deadline: float

    @property
    def left_s(self) -> float:
        """Seconds that the part has left."""
        return self.deadline - time.monotonic()

    def case(self, name: str, work: Callable[[], Found], *, needs_s: float = 0.0) -> bool:
        """Do one case and write its line; whether it was done. It is left out where time is short."""
        if not self.small and self.left_s < needs_s:
            why = f"{max(self.left_s, 0):.0f} s are left and this case needs about {needs_s:.0f} s"
            self._write(name, "skipped", why=why)
            return False
        began = time.monotonic()
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - the cases behind this one go on, whatever it was
            traceback.print_exc()
            first = (str(error).strip() or "no message").splitlines()[0]
            self._write(name, "error", why=f"{type(error).__name__}: {first[:300]}")
            return False
        status: Status = "measured" if found.passed is None else "ok" if found.passed else "FAILED"
        figures = {**found.figures, "seconds": time.monotonic() - began}
        self._write(name, status, figures, found.predicted, found.why)
        return True

    def _write(
        self,
        case: str,
        status: Status,
        figures: Mapping[str, Any] | None = None,
        predicted: Mapping[str, Any] | None = None,
        why: str = "",
    ) -> None:
        line = {
            "part": self.part,
            "case": case,
            "status": status,
            "figures": {k: _short(v) for k, v in (figures or {}).items()},
            "predicted": dict(predicted or {}),
            "why": why,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a results file; the last one may be cut where its writer was killed."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
