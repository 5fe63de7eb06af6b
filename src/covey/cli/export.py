"""`covey export CHECKPOINT [--merge] [--output_dir DIR] [--base DIR]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from covey.checkpoint.manifest import export_target
from covey.cli.verbs import nameless
from covey.config.argv import read_words
from covey.errors import ConfigError, CoveyError
from covey.options.verbs import ExportOptions
from covey.texts import tr
from covey.texts.language import spoken
from covey.types import Fix, Problem


def export(argv: Sequence[str]) -> int:
    """Export a checkpoint and print where it is; ConfigError carries what is wrong with the words."""
    options, words = read_words("export", argv, ExportOptions)
    if not words:
        usage = tr("`covey export CHECKPOINT --merge --output_dir DIR`")
        raise ConfigError([nameless("export", tr("No checkpoint is given."), usage)])
    checkpoint = Path(words[0])
    given = options.output_dir
    target = export_target(checkpoint, merge=options.merge) if given is None else Path(given)
    _refuse(checkpoint, target)
    from covey.training.export import export as run

    base = None if options.base is None else Path(options.base)
    try:
        result = run(checkpoint, target, merge=options.merge, base=base)
    except CoveyError as error:
        raise ConfigError([_failed(checkpoint, error)]) from error
    if result.merged:
        sys.stdout.write(
            spoken(
                tr(
                    "merged: on {num_prompts} prompts the logits of the exported {dtype} model differ "
                    "from those with the adapter by at most {max_logit_difference:.3g}\n",
                    num_prompts=result.num_prompts,
                    dtype=result.dtype,
                    max_logit_difference=result.max_logit_difference,
                )
            )
        )
    if result.packed:
        sys.stdout.write(
            spoken(
                tr(
                    "note: the adapter was trained on a base quantized to {packed} and is merged into "
                    "the model before quantization, so the logits differ a little from those of the run; "
                    "`covey eval` scores the merged model\n",
                    packed=result.packed,
                )
            )
        )
    sys.stdout.write(spoken(tr("written to {target}\n", target=result.target)))
    return 0


def _refuse(checkpoint: Path, target: Path) -> None:
    problems = []
    if not checkpoint.is_dir():
        problems.append(
            _unexportable(
                tr("{checkpoint} is not a directory.", checkpoint=checkpoint),
                tr("The path may be misspelled; the checkpoints of a run are called checkpoint-N."),
                Fix(text=tr("give the directory of a checkpoint: runs/NAME/checkpoint-N")),
            )
        )
    if target.exists():
        problems.append(
            Problem(
                code="E402",
                option="output_dir",
                seen=tr("{target} already exists.", target=target),
                why=tr("An export is only written to a new directory, so nothing is overwritten."),
                fixes=(Fix(text=tr("choose another directory: --output_dir DIR")),),
            )
        )
    if problems:
        raise ConfigError(problems)


def _unexportable(seen: str, cause: str, *fixes: Fix) -> Problem:
    why = tr("Only a complete checkpoint of a run can be written as a model.")
    return Problem(code="E404", option="export", seen=seen, why=why, cause=cause, fixes=fixes)


def _failed(checkpoint: Path, error: CoveyError) -> Problem:
    return _unexportable(
        tr("{checkpoint}: {error}", checkpoint=checkpoint, error=error),
        tr("The checkpoint is damaged, or its base model was moved or changed."),
        Fix(text=tr("give the directory in which the base model is now: --base DIR")),
        Fix(text=tr("use another checkpoint of the run")),
    )
