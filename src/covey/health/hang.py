"""The files of a hang, and what they say together: who works, and who only waits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from covey.activity import moment_words, ranks_word
from covey.codes import CODES
from covey.types import Finding, Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a rank is. `seconds` is since it last got on, `allowed_s` what it may take; `service` are the
    rollout servers that it waits for; `beat` counts looks of its watchdog."""

    rank: int
    world: int
    pid: int
    host: str
    phase: str
    step: int
    micro: int
    num_micro: int
    seconds: float
    allowed_s: float
    collective: str
    num_collectives: int
    frame: str
    memory: Mapping[str, float]
    beat: int
    service: str = ""

    def words(self) -> str:
        """`update, micro-batch 2 of 4, after step 12`."""
        return moment_words(self.phase, self.step, self.micro, self.num_micro)

    def line(self) -> str:
        """One line with everything that a person looks for."""
        waits = f"; waits in {self.collective} #{self.num_collectives}" if self.collective else ""
        waits += f"; waits for {self.service}" if self.service else ""
        memory = "".join(f"; {name} {value:g}" for name, value in self.memory.items())
        return (
            f"rank {self.rank} of {self.world}, process {self.pid} on {self.host}: {self.words()}; "
            f"{self.seconds:.1f} s without progress, {self.allowed_s:.0f} s allowed{waits}; "
            f"at {self.frame or 'no frame'}{memory}"
        )


def write_status(path: Path, status: Status) -> None:
    """Put a status in its place at once; unlike a record it need not outlive a loss of power."""
    part = path.with_name(f".tmp-{path.name}")
    try:
        part.write_text(json.dumps(asdict(status)) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_status(path: Path) -> Status | None:
    """The status in a file; None where there is none, or one of another version."""
    try:
        return Status(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def status_path(output_dir: Path, rank: int) -> Path:
    """Where a rank's watchdog says how it is."""
    return output_dir / f"status-rank-{rank}.json"


def next_hang(output_dir: Path) -> Path:
    """The first of `hang-0001`, `hang-0002`, … that no earlier hang has taken."""
    taken = [int(p.name[5:]) for p in output_dir.glob("hang-*") if p.name[5:].isdigit()]
    return output_dir / f"hang-{max(taken, default=0) + 1:04d}"


def finding_of(statuses: Sequence[Status], directory: Path) -> Finding:
    """Who waits for whom, from the statuses of the ranks that answered.

    A rank inside a collective only waits. One elsewhere works or is stuck, and one that did not answer is
    stopped or gone.
    """
    world = statuses[0].world
    waiting = [s for s in statuses if s.collective]
    working = [s for s in statuses if not s.collective]
    silent = sorted(set(range(world)) - {s.rank for s in statuses})
    latest = max(statuses, key=lambda s: s.seconds - s.allowed_s)
    seen = (
        f"no progress for {latest.seconds:.0f} s in {latest.words()}, with {latest.allowed_s:.0f} s allowed"
    )
    who = [f"rank {s.rank} is in {s.words()}, at {s.frame}" for s in working] if world > 1 else []
    if world == 1:
        seen += f"; it stands at {latest.frame}"
    who += [f"rank {s.rank} waits for the rollout server {s.service}" for s in working if s.service]
    by_place: dict[str, list[int]] = {}
    for status in waiting:
        where = f"{status.collective} #{status.num_collectives} of {status.words()}, at {status.frame}"
        by_place.setdefault(where, []).append(status.rank)
    who += [
        f"{ranks_word(ranks)} wait{'s' if len(ranks) == 1 else ''} in {where}"
        for where, ranks in by_place.items()
    ]
    who += [f"{ranks_word(silent)} did not answer"] if silent else []
    newest = newest_checkpoint(directory.parent)
    return Finding(
        code="F301",
        seen=". ".join([seen, *(w[0].upper() + w[1:] for w in who)]),
        why=CODES["F301"].why,
        cause=_cause(working, silent, len(by_place)),
        fixes=(
            Fix(text=f"the stacks of every thread are in {directory}"),
            Fix(
                text="goes on from the newest checkpoint; a main thread that is stuck can save none",
                edits={"resume_from_checkpoint": str(newest)},
            )
            if newest
            else Fix(text="start again: no checkpoint was saved yet, and a stuck main thread can save none"),
        ),
        step=latest.step,
    )


def _cause(working: Sequence[Status], silent: Sequence[int], num_places: int) -> str:
    if silent:
        return (
            f"The others wait for {ranks_word(silent)}: stopped, on a machine that is gone, or inside native "
            "code that lets no other thread run."
        )
    if served := sorted({s.service for s in working if s.service}):
        return f"No completion came from {', '.join(served)}."
    if len(working) == 1:
        only = working[0]
        others = "" if only.world == 1 else f" of rank {only.rank}, which the others wait for"
        return f"What stands at the top of the stack{others}: {only.frame}."
    if working:
        return "A service, disk or device that all of them need does not answer."
    if num_places > 1:
        return "The ranks wait at different places, each for the others."
    return "All ranks are in the same collective: the network or the device between them does not answer."


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The checkpoint of the last step that has a manifest; its files are not read."""
    whole = [p.parent for p in output_dir.glob("checkpoint-*/manifest.json")]
    numbered = {int(p.name[11:]): p for p in whole if p.name[11:].isdigit()}
    return numbered[max(numbered)] if numbered else None
