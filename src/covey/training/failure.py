"""What is said of a process that cannot go on."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import NamedTuple

from covey.activity import Activity, moment_words
from covey.codes import CODES
from covey.errors import CoveyError, OtherRankFailed, RunFailed
from covey.exits import GUARDED
from covey.health.hang import newest_checkpoint
from covey.health.record import fields_of
from covey.plan.disk import size
from covey.plan.words import coded, flags, sentence
from covey.telemetry.files import RunFiles
from covey.telemetry.owner import Changed, Lock
from covey.texts import joined, tr, visible
from covey.texts.language import spoken
from covey.training.machines import Failed
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
            seen=tr("{where}: {words}", where=where, words=words),
            why=CODES["F132"].why,
            cause="",
            fixes=(_go_on(output_dir),),
            step=step,
        )
    path = error.filename or output_dir
    is_full = error.errno in _FULL
    free = tr("; {size} are free on its disk", size=size(_free(output_dir))) if is_full else ""
    first = tr("make {output_dir} writable first", output_dir=output_dir)
    if is_full:
        first = tr("free some space on the disk first, or keep fewer checkpoints: --save_total_limit 1")
    elif error.errno == errno.EEXIST:
        first = tr(
            "move it away first: mv {quote} {quote2}",
            quote=shlex.quote(str(path)),
            quote2=shlex.quote(f"{path}.mine"),
        )
    return Finding(
        code="F130",
        seen=tr("{path} could not be written: {words}{free}", path=path, words=words, free=free),
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


class Where(NamedTuple):
    """The process that something happened to; `output_dir` is None before the run has it, and `host` is
    empty where there is one machine."""

    rank: int
    world: int
    activity: Activity
    output_dir: Path | None
    host: str = ""

    def in_words(self) -> str:
        """`rank 1 of 2`, `rank 1 of 2 on node2`, or `the run`."""
        if self.world == 1:
            return tr("the run")
        return tr(
            "rank {rank} of {world}{words}",
            rank=self.rank,
            world=self.world,
            words=tr(" on {host}", host=self.host) if self.host else "",
        )

    def moment(self) -> str:
        """`update, micro-batch 2 of 4, after step 3`."""
        now = self.activity.moment
        return moment_words(now.phase, self.activity.step, now.micro, now.num_micro)

    def fixes(self) -> tuple[Fix, ...]:
        """Where the stack is, and how the run goes on."""
        if self.output_dir is None:
            return (_go_on(None),)
        stack = Fix(
            text=tr(
                "the full Python traceback is in {stack_path}",
                stack_path=stack_path(self.output_dir, self.rank),
            )
        )
        return (stack, _go_on(self.output_dir))


def failed(error: BaseException, where: Where) -> Finding:
    """F131: what an exception says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    at = (
        tr(
            ", at {name}:{lineno} in {name2}",
            name=Path(frames[-1].filename).name,
            lineno=frames[-1].lineno,
            name2=frames[-1].name,
        )
        if frames
        else ""
    )
    words = " ".join(str(error).split())
    said = tr("{name}{words}", name=type(error).__name__, words=": " + words if words else "")
    return Finding(
        code="F131",
        seen=tr(
            "{in_words} failed in {moment}: {said:.600}{at}",
            in_words=where.in_words(),
            moment=where.moment(),
            said=said,
            at=at,
        ),
        why=CODES["F131"].why,
        cause="",
        fixes=where.fixes(),
        step=where.activity.step,
    )


def of_others(
    code: str, who: str, activity: Activity | None, output_dir: Path | None, seconds: float = 0.0
) -> Finding:
    """F133, F134 or F136: other processes of the run, which `who` names, have been killed, are stopped or
    give no sign, as `code` says, and for how long. `activity` is None where that of the run is not known."""
    during = (
        ""
        if activity is None
        else tr(" in {moment_words}", moment_words=moment_words(activity.moment.phase, activity.step))
    )
    waits = tr("{during}, and the others wait for it", during=during)
    match code:
        case "F133":
            last = tr("; the last heartbeat was {seconds:.0f} s ago", seconds=seconds) if seconds else ""
            seen = tr("{who} ended without an error message{during}{last}", who=who, during=during, last=last)
            cause = tr(
                "It was killed by the system because memory ran out (see dmesg on its machine), by "
                "a scheduler or by hand; or its machine went down."
            )
        case "F134":
            seen = tr(
                "{who} has been stopped for {seconds:.0f} s{waits}", who=who, seconds=seconds, waits=waits
            )
            cause = tr(
                "It received SIGSTOP or was suspended: by a scheduler that suspends jobs, `kill "
                "-STOP`, or Ctrl-Z."
            )
        case _:
            seen = tr(
                "{who} sent no heartbeat for {seconds:.0f} s{waits}", who=who, seconds=seconds, waits=waits
            )
            cause = tr("The machine or its network is down, or its processes are stopped.")
    return Finding(
        code=code,
        seen=seen,
        why=CODES[code].why,
        cause=cause,
        fixes=(_go_on(output_dir),),
        step=None if activity is None else activity.step,
    )


def text_of(finding: Finding) -> list[str]:
    """A finding in its four parts, as lines."""
    parts = [finding.seen, finding.why, finding.cause]
    lines = coded(finding.code, joined(" ", [sentence(p) for p in parts if p]))
    for fix in finding.fixes:
        lines += coded("", sentence(fix.text))
        # In one line, so that it can be copied.
        lines += [f"{'':<10}{flags(fix.edits)}"] if fix.edits else []
    return lines


def record(finding: Finding, output_dir: Path | None, lock: Lock | None) -> None:
    """Put a finding on record where that can be done.

    Neither is a directory that was deleted made again for it, nor is it for another one in its place; and one
    in which nothing has been written stays free for the next start.
    """
    if output_dir is None or not isfile(output_dir / "config.yaml"):
        return
    with contextlib.suppress(OSError, CoveyError):
        if lock is not None:
            lock.check()
        RunFiles(output_dir).append_event("finding", step=finding.step, **fields_of(finding))


def say(finding: Finding) -> None:
    """Print a finding past the terminal's lock, which the main thread may hold."""
    os.write(2, (visible("\n".join(text_of(finding))) + "\n").encode())


def say_of_another(failed: Failed) -> None:
    """Print in a line what another machine has said in full."""
    what = (
        tr(": {name} {seen}", name=failed.name, seen=failed.seen)
        if failed.name
        else tr(" with exit code {code}", code=failed.code)
    )
    words = tr(
        "covey: rank {rank} on {host} ended the run{what}", rank=failed.rank, host=failed.host, what=what
    )
    os.write(2, spoken(tr("{words}. See the output of that machine for details.\n", words=words)).encode())


def stack_path(output_dir: Path, rank: int) -> Path:
    """The file for the stack of a rank that failed."""
    return output_dir / f"failed-rank-{rank}.txt"


def _go_on(output_dir: Path | None) -> Fix:
    if output_dir is None:
        return Fix(text=tr("run the same command again; this run had not saved anything yet"))
    newest = newest_checkpoint(output_dir)
    text = (
        tr("no checkpoint was saved yet, so this starts at step 0")
        if newest is None
        else tr("resume from {newest}", newest=newest)
    )
    return Fix(text=text, edits={"resume_from_checkpoint": "auto"})


def _free(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def is_of_another(error: BaseException) -> bool:
    """Whether another process is the cause: it could not do its part, or is not there any more, which torch
    says in words alone."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed")
    is_of_network = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return is_of_network or isinstance(error, OtherRankFailed)


def write_stack(output_dir: Path, rank: int, error: BaseException) -> None:
    """Keep the whole stack of an exception, with those that it followed from."""
    text = "".join(traceback.format_exception(error))
    descriptor = os.open(stack_path(output_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
