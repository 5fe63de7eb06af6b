"""The directory of a run when nobody types one."""

from __future__ import annotations

import os
import re
from itertools import count

from covey.config.objects import live_kind
from covey.texts import tr

_ROOT = "runs"
_DIGITS = 3


def default_output_dir(model: str, dataset: list[str], resume: str | None) -> tuple[str, str]:
    """Return the directory and the words for where it came from; reads the names under runs/, writes nothing.

    A new run takes the first free number. A run that is resumed is the one a checkpoint directory lies in,
    or the newest one of this model and data set.
    """
    stem = os.path.join(_ROOT, _stem(model, dataset))
    free = first_free(stem)
    if resume is None:
        return free, tr("derived from model and dataset")
    if resume not in ("latest", "auto"):
        return os.path.dirname(os.path.normpath(resume)) or ".", tr("derived from resume_from_checkpoint")
    newest = f"{stem}-{int(free.rpartition('-')[2]) - 1:0{_DIGITS}}"
    is_there = os.path.isdir(newest)
    return (newest if is_there else free), tr("derived from resume_from_checkpoint, model and dataset")


def first_free(stem: str) -> str:
    """Return the stem with the first number that no path has yet: `runs/gsm8k-001`."""
    return next(path for number in count(1) if not os.path.lexists(path := f"{stem}-{number:0{_DIGITS}}"))


def _stem(model: str, dataset: list[str]) -> str:
    first = os.path.splitext(_clean(live_kind(dataset[0])))[0] if dataset else "dataset"
    name = _clean(live_kind(model)) or "model"
    return name if name == first else f"{name}-{first}"


def _clean(path: str) -> str:
    last = os.path.basename(os.path.normpath(path)) if path else ""
    return re.sub(r"[^\w.+-]+", "_", last).strip("._")
