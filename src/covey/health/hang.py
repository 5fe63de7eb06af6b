"""The files of a hang, and what they say together: who works, and who only waits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from covey.activity import moment_words, ranks_word
from covey.codes import CODES
from covey.texts import capital, joined, plural, tr
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
        waits = (
            tr(
                "; waits in {collective} #{num_collectives}",
                collective=self.collective,
                num_collectives=self.num_collectives,
            )
            if self.collective
            else ""
        )
        waits += tr("; waits for {service}", service=self.service) if self.service else ""
        memory = "".join(f"; {name} {value:g}" for name, value in self.memory.items())
        return tr(
            "rank {rank} of {world}, process {pid} on {host}: {words}; {seconds:.1f} s without "
            "progress, {allowed_s:.0f} s allowed{waits}; at {frame}{memory}",
            rank=self.rank,
            world=self.world,
            pid=self.pid,
            host=self.host,
            words=self.words(),
            seconds=self.seconds,
            allowed_s=self.allowed_s,
            waits=waits,
            frame=self.frame or tr("an unknown place"),
            memory=memory,
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
    seen = tr(
        "no progress for {seconds:.0f} s in {words}, with {allowed_s:.0f} s allowed",
        seconds=latest.seconds,
        words=latest.words(),
        allowed_s=latest.allowed_s,
    )
    who = []
    if world == 1:
        seen += tr("; it is stuck at {frame}", frame=latest.frame)
    else:
        who = [
            tr("rank {rank} is in {words}, at {frame}", rank=s.rank, words=s.words(), frame=s.frame)
            for s in working
        ]
    who += [
        tr("rank {rank} waits for the rollout server {service}", rank=s.rank, service=s.service)
        for s in working
        if s.service
    ]
    by_place: dict[str, list[int]] = {}
    for status in waiting:
        by_place.setdefault(_place(status), []).append(status.rank)
    who += [
        plural(
            len(ranks),
            "{ranks} waits in {where}",
            "{ranks} wait in {where}",
            ranks=ranks_word(ranks),
            where=where,
        )
        for where, ranks in by_place.items()
    ]
    who += [tr("{ranks_word} did not answer", ranks_word=ranks_word(silent))] if silent else []
    return Finding(
        code="F301",
        seen=joined(". ", [seen, *map(capital, who)]),
        why=CODES["F301"].why,
        cause=_cause(working, silent, len(by_place)),
        fixes=(
            Fix(text=tr("the stacks of every thread are in {directory}", directory=directory)),
            _go_on(directory.parent),
        ),
        step=latest.step,
    )


def _place(status: Status) -> str:
    """The collective that a rank waits in."""
    return tr(
        "{collective} #{num_collectives} of {words}, at {frame}",
        collective=status.collective,
        num_collectives=status.num_collectives,
        words=status.words(),
        frame=status.frame,
    )


def _go_on(output_dir: Path) -> Fix:
    newest = newest_checkpoint(output_dir)
    if newest is None:
        return Fix(
            text=tr(
                "start again from the beginning: a hung process cannot save a checkpoint, and none was "
                "saved before"
            )
        )
    return Fix(
        text=tr("resume from the newest checkpoint; a hung process cannot save a new one"),
        edits={"resume_from_checkpoint": str(newest)},
    )


def _cause(working: Sequence[Status], silent: Sequence[int], num_places: int) -> str:
    if silent:
        return tr(
            "The others wait for {ranks_word}, which may be stopped, on a machine that is down, or "
            "in native code that blocks all other threads.",
            ranks_word=ranks_word(silent),
        )
    if served := sorted({s.service for s in working if s.service}):
        return tr("{served} returned no completion.", served=joined(", ", served))
    if len(working) == 1:
        only = working[0]
        others = "" if only.world == 1 else tr(" of rank {rank}, which the others wait for", rank=only.rank)
        return tr(
            "Most likely the code at the top of the stack{others}: {frame}.", others=others, frame=only.frame
        )
    if working:
        return tr("A service, disk or device that all of them need does not answer.")
    if num_places > 1:
        return tr("The ranks wait at different places, each for the others.")
    return tr("All ranks are in the same collective: the network or the device between them does not answer.")


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The checkpoint of the last step that has a manifest; its files are not read."""
    whole = [p.parent for p in output_dir.glob("checkpoint-*/manifest.json")]
    numbered = {int(p.name[11:]): p for p in whole if p.name[11:].isdigit()}
    return numbered[max(numbered)] if numbered else None
