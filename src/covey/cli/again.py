"""The command of processes that torchrun has started again: the same run, from its newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from covey.config import Typed
from covey.health.hang import newest_checkpoint
from covey.meeting import EarlierRun
from covey.plan.problem import warning
from covey.texts import tr
from covey.types import Fix, Problem

_SOURCE = tr("the run before the restart")


def goes_on(typed: dict[str, Typed], earlier: EarlierRun) -> tuple[dict[str, Typed], Problem]:
    """Return the options with which these processes go on with a run, and what is said of it (W162).

    They write to the same directory, and begin at its newest checkpoint. Where it has none they begin as the
    run did.
    """
    newest = newest_checkpoint(Path(earlier.output_dir))
    begun_at = typed["resume_from_checkpoint"].value if "resume_from_checkpoint" in typed else None
    is_path = begun_at not in (None, "auto", "latest")
    edits: dict[str, object] = {"output_dir": earlier.output_dir, "overwrite_output_dir": "false"}
    if newest is not None or not is_path:
        edits["resume_from_checkpoint"] = "auto"
    else:
        # What the first start has left in the directory holds no step that was saved.
        edits["overwrite_output_dir"] = "true"
    again = {**typed, **{name: Typed(value, _SOURCE) for name, value in edits.items()}}
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    where = (
        tr("continues from {newest}", newest=newest)
        if newest is not None
        else tr("starts from the beginning, because no checkpoint was saved yet")
    )
    # An agent on another machine may have counted more restarts than this one.
    after = tr(" after {failed}", failed=earlier.failed) if earlier.failed else ""
    number = tr("restart {count} of {most}", count=max(1, int(count)), most=most)
    seen = tr(
        "The processes were started again ({number}){after}. The run {where}.",
        number=number,
        after=after,
        where=where,
    )
    return again, warning("W162", "max_restarts", seen, "", Fix(text=tr("no action is needed")))
