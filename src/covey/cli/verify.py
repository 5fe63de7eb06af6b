"""`covey verify CHECKPOINT ... [--json]`: what is wrong with checkpoints and models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.checkpoint.examine import Examined, examine
from covey.cli.targets import refused
from covey.cli.verbs import nameless
from covey.config.argv import read_words
from covey.errors import ConfigError
from covey.options.verbs import VerifyOptions
from covey.plan.disk import size
from covey.plan.words import coded
from covey.texts import counted, tr
from covey.texts.terminal import say, say_json

WHOLE, DAMAGED = 0, 1


def verify(argv: Sequence[str]) -> int:
    """Print what is wrong with each directory and return 0, or 1 where one is damaged; ConfigError where one
    is neither a checkpoint nor a model, once the others are printed."""
    options, words = read_words("verify", argv, VerifyOptions, most=None)
    if not words:
        usage = tr("`covey verify runs/NAME/checkpoint-N`; several directories may be given")
        raise ConfigError([nameless("verify", tr("No checkpoint is given."), usage)])
    found = [examine(Path(word)) for word in words]
    known = [each for each in found if each.kind != "none"]
    problems = [said for word in words if (said := refused("verify", argv, word)) is not None]
    if options.json_ and not problems:
        say_json([_as_json(each) for each in found])
    elif known and not options.json_:
        say("\n".join(line for each in known for line in _as_lines(each)))
    if problems:
        raise ConfigError(problems, beside={"directories": [_as_json(each) for each in found]})
    return DAMAGED if any(each.faults for each in found) else WHOLE


def _as_lines(found: Examined) -> list[str]:
    lines = coded(
        tr("damaged") if found.faults else tr("whole"),
        tr("{path}: {facts}", path=found.path, facts=_facts(found)),
    )
    for fault in found.faults:
        lines += coded(tr("fault"), fault)
    for note in found.notes:
        lines += coded(tr("note"), note)
    return lines


def _facts(found: Examined) -> str:
    if not found.num_files:
        return (
            tr("a checkpoint") if found.step is None else tr("the checkpoint of step {step}", step=found.step)
        )
    files = tr("{files}, {size}", files=counted(found.num_files, "file"), size=size(found.num_bytes))
    if found.kind == "model":
        return tr("a model: {files}", files=files)
    use = tr("; a run can resume from it") if found.goes_on else ""
    return tr("the checkpoint of step {step}: {files}{use}", step=found.step, files=files, use=use)


def _as_json(found: Examined) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "kind": found.kind,
        "verdict": "damaged" if found.faults else "whole",
        "step": found.step,
        "files": found.num_files,
        "bytes": found.num_bytes,
        "goes_on": found.goes_on,
        "faults": list(found.faults),
        "notes": list(found.notes),
    } | ({"verdict": "none"} if found.kind == "none" else {})
