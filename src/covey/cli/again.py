"""The command of processes that torchrun has started again: the same run, from its newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from covey.config import Typed
from covey.health.hang import newest_checkpoint
from covey.meeting import EarlierRun
from covey.plan.problem import warning
from covey.types import Fix, Problem

_SOURCE = "the run before the restart"


def goes_on(typed: dict[str, Typed], earlier: EarlierRun) -> tuple[dict[str, Typed], Problem]:
    """Return the options with which these processes go on with a run, and what is said of it (W162).

    They write to the same directory, and begin at its newest checkpoint. Where it has none they begin as the
    run did.
    """
    newest = newest_checkpoint(Path(earlier.output_dir))
    begun_at = typed["resume_from_checkpoint"].value if "resume_from_checkpoint" in typed else None
    is_path = begun_at not in (None, "auto", "latest")
    edits: dict[str, object] = {"output_dir": earlier.output_dir, "overwrite_output_dir": False}
    if newest is not None or not is_path:
        edits["resume_from_checkpoint"] = "auto"
    else:
        # What the first start has left in the directory holds no step that was saved.
        edits["overwrite_output_dir"] = True
    again = {**typed, **{name: Typed(value, _SOURCE) for name, value in edits.items()}}
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    where = f"goes on from {newest}" if newest is not None else "begins again, as no checkpoint was saved yet"
    # An agent on another machine may have counted more restarts than this one.
    after = f" after {earlier.failed}" if earlier.failed else ""
    number = f"restart {max(1, int(count))} of {most}"
    seen = f"The processes were started again ({number}){after}. The run {where}."
    return again, warning("W162", "max_restarts", seen, "", Fix(text="no action is needed"))
