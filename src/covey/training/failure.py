"""What is said of a process that cannot go on."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.activity import Activity
from covey.codes import CODES
from covey.errors import RunFailed
from covey.exits import GUARDED
from covey.health.hang import newest_checkpoint
from covey.plan.disk import size
from covey.telemetry.owner import Changed, Lock
from covey.types import Finding, Fix

_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def unwritable(output_dir: Path, error: OSError, step: int) -> Finding:
    """F130 or F132: why the run directory cannot be written any more."""
    words = error.strerror or str(error)
    is_gone = isinstance(error, Changed) or error.errno in _GONE
    if is_gone:
        where = output_dir if isinstance(error, Changed) or error.filename is None else error.filename
        return Finding(
            code="F132",
            seen=f"{where}: {words}",
            why=CODES["F132"].why,
            cause="",
            fixes=(_go_on(output_dir),),
            step=step,
        )
    path = error.filename or output_dir
    is_full = error.errno in _FULL
    free = f"; {size(_free(output_dir))} are free on its disk" if is_full else ""
    first = f"make {output_dir} writable first"
    if is_full:
        first = "free some space on the disk first, or keep fewer checkpoints: --save_total_limit 1"
    elif error.errno == errno.EEXIST:
        first = f"move it away first: mv {shlex.quote(str(path))} {shlex.quote(f'{path}.mine')}"
    return Finding(
        code="F130",
        seen=f"{path} could not be written: {words}{free}",
        why=CODES["F130"].why,
        cause="",
        fixes=(Fix(text=first), _go_on(output_dir)),
        step=step,
    )


@contextmanager
def writing(output_dir: Path, lock: Lock | None, step: int) -> Iterator[None]:
    """Write to the run directory; RunFailed (F130, F132) where it cannot be, or is another one by now."""
    try:
        if lock is not None:
            lock.check()
        yield
    except OSError as error:
        raise RunFailed(unwritable(output_dir, error, step), GUARDED) from error


def failed(error: BaseException, rank: int, world: int, activity: Activity, output_dir: Path) -> Finding:
    """F131: what an exception says, and where it was raised."""
    who = f"rank {rank} of {world}" if world > 1 else "the run"
    frames = traceback.extract_tb(error.__traceback__)
    at = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    words = " ".join(str(error).split())
    said = f"{type(error).__name__}{': ' + words if words else ''}"
    return Finding(
        code="F131",
        seen=f"{who} failed in {activity.moment.phase}, after step {activity.step}: {said:.600}{at}",
        why=CODES["F131"].why,
        cause="",
        fixes=(Fix(text=f"the stack is in {stack_path(output_dir, rank)}"), _go_on(output_dir)),
        step=activity.step,
    )


def gone(rank: int, pid: int, activity: Activity, output_dir: Path) -> Finding:
    """F133: a process that is not there any more and said nothing."""
    return Finding(
        code="F133",
        seen=f"rank {rank} (process {pid}) ended without an error message after step {activity.step}",
        why=CODES["F133"].why,
        cause="It was killed: by the system because memory ran out (see dmesg), by a scheduler, or by hand.",
        fixes=(_go_on(output_dir),),
        step=activity.step,
    )


def stack_path(output_dir: Path, rank: int) -> Path:
    """The file for the stack of a rank that failed."""
    return output_dir / f"failed-rank-{rank}.txt"


def _go_on(output_dir: Path) -> Fix:
    newest = newest_checkpoint(output_dir)
    text = "no checkpoint was saved yet: this starts anew" if newest is None else f"goes on from {newest}"
    return Fix(text=text, edits={"resume_from_checkpoint": "auto"})


def _free(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def is_of_network(error: BaseException) -> bool:
    """Whether a collective failed because another process is not there any more."""
    words = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed")
    return isinstance(error, RuntimeError) and any(sign in words for sign in signs)


def write_stack(output_dir: Path, rank: int, error: BaseException) -> None:
    """Keep the whole stack of an exception, with those that it followed from."""
    text = "".join(traceback.format_exception(error))
    descriptor = os.open(stack_path(output_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
