"""Fixes that name a checkpoint: it exists, and was saved before the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path

from covey.checkpoint.manifest import MANIFEST, TRAINER
from covey.config.checkpoints import checkpoint_step, list_checkpoints
from covey.texts import tr
from covey.types import Fix

BACK = Fix(text=tr("resume from a checkpoint before this step: --resume_from_checkpoint DIR"))
"""The general advice; `possible` replaces it by advice that names an existing checkpoint."""

MENDED = Fix(text=tr("correct the reward, then resume with --resume_from_checkpoint latest"))
NEWEST = Fix(text=tr("resume from the newest checkpoint with a smaller learning rate"))
_NO_NEWEST = {
    MENDED.text: Fix(text=tr("correct the reward, then start the run again: no checkpoint can be resumed")),
    NEWEST.text: Fix(
        text=tr("start the run again with a smaller learning rate: no checkpoint can be resumed")
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint. `resumes`: it also has the trainer's state. `is_ours`: covey wrote it."""

    step: int
    path: Path
    resumes: bool
    is_ours: bool = True


Checkpoints = Callable[[], Sequence[Saved]]


def none_saved() -> Sequence[Saved]:
    """Return no checkpoints."""
    return ()


def checkpoints_of(output_dir: Path) -> list[Saved]:
    """The checkpoints of a run that have a manifest, oldest first; the files that it lists are not read."""
    return [
        Saved(step=step, path=path, resumes=isdir(path / TRAINER))
        for path in list_checkpoints(output_dir)
        if (step := checkpoint_step(path.name)) is not None and isfile(path / MANIFEST)
    ]


def possible(fixes: Sequence[Fix], saved: Sequence[Saved], before: int, slower: Fix) -> tuple[Fix, ...]:
    """The fixes with BACK replaced: resume from the newest checkpoint of a step below `before`, with the
    learning rate of `slower`, because a run that is resumed unchanged repeats the fault."""
    resumes = any(s.resumes for s in saved)
    found = []
    for fix in fixes:
        if fix.text == BACK.text and not fix.edits:
            fix = _back(saved, before, slower)
        elif not resumes:
            fix = _NO_NEWEST.get(fix.text, fix)
        found.append(fix)
    return tuple(found)


def _back(saved: Sequence[Saved], before: int, slower: Fix) -> Fix:
    earlier = [s for s in saved if s.step < before]
    if not earlier:
        return Fix(
            text=tr(
                "start the run again with a smaller learning rate: there is no checkpoint from before "
                "step {before}",
                before=before,
            )
        )
    last = max(earlier, key=lambda s: s.step)
    name, edits = last.path.name, dict(slower.edits)
    if not last.resumes:
        option = "adapters" if isfile(last.path / "adapter_config.json") else "model"
        return Fix(
            text=tr("start a new run from {name}, which was saved before that", name=name),
            edits={option: str(last.path), **edits},
        )
    if edits and last.is_ours:
        edits["allow_changes"] = True
    return Fix(
        text=tr("resume from {name}, which was saved before that, with a smaller learning rate", name=name),
        edits={"resume_from_checkpoint": str(last.path), **edits},
    )
