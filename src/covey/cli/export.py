"""`covey export CHECKPOINT [--merge] [--torch_dtype float32] [--output_dir DIR] [--base DIR]`."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import exists
from pathlib import Path

from covey.checkpoint.manifest import export_target
from covey.checks.output.judge import unwritable_problem
from covey.checks.output.look import unwritable
from covey.cli.targets import refused
from covey.cli.verbs import nameless
from covey.config.adapters import is_adapter
from covey.config.argv import read_words
from covey.errors import ConfigError, CoveyError, DamagedModelError
from covey.options.verbs import ExportOptions
from covey.paths import cannot_be_read
from covey.plan.problem import problem
from covey.quickstart.built_in import BUILT_IN
from covey.texts import has_value, tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.types import Fix, Problem


def export(argv: Sequence[str]) -> int:
    """Export a checkpoint and print where it is; ConfigError carries what is wrong with the words."""
    options, words = read_words("export", argv, ExportOptions)
    word, base = _named(options, words)
    checkpoint = Path(word)
    given = options.output_dir
    target = export_target(checkpoint, merge=options.merge) if given is None else Path(given)
    _refuse(argv, word, target, options)
    from covey.training.export import export as run

    try:
        result = run(checkpoint, target, merge=options.merge, base=base, torch_dtype=options.torch_dtype)
    except ConfigError:
        raise
    except (CoveyError, OSError) as error:
        raise ConfigError([_failed(checkpoint, error)]) from error
    if result.merged:
        say(
            spoken(
                tr(
                    "merged: on {num_prompts} prompts the logits of the exported {dtype} model differ "
                    "from those with the adapter by at most {max_logit_difference:.3g}",
                    num_prompts=result.num_prompts,
                    dtype=result.dtype,
                    max_logit_difference=result.max_logit_difference,
                )
            )
        )
        if result.dtype != "float32":
            say(
                spoken(
                    tr(
                        "note: {dtype} rounds small parts of the adapter's update away; `--torch_dtype "
                        "float32` keeps all of it",
                        dtype=result.dtype,
                    )
                )
            )
    if result.packed:
        say(
            spoken(
                tr(
                    "note: the adapter was trained on a base quantized to {packed}, but is merged into "
                    "the model that is not quantized, so the logits differ a little from those of the "
                    "run; `covey eval` scores the merged model",
                    packed=result.packed,
                )
            )
        )
    if options.merge and not result.merged:
        said = tr("note: {checkpoint} is not an adapter, so nothing was merged", checkpoint=checkpoint)
        say(spoken(said))
    say(spoken(tr("written to {target}", target=result.target)))
    return 0


def _named(options: ExportOptions, words: list[str]) -> tuple[str, Path | None]:
    """Return the checkpoint and the directory of its base model, under our names or those of ms-swift."""
    named = [*words, *([options.checkpoint] if options.checkpoint is not None else [])]
    if len(set(named)) > 1:
        raise ConfigError([_two_checkpoints(*named)])
    built_in = BUILT_IN.get(options.base or "")
    base = options.base if built_in is None else str(built_in.model_dir)
    if named:
        return named[0], None if base is None else Path(base)
    if options.base is None:
        usage = tr("`covey export CHECKPOINT --merge --output_dir DIR`")
        raise ConfigError([nameless("export", tr("No checkpoint is given."), usage)])
    return options.base, None


def _two_checkpoints(word: str, other: str) -> Problem:
    return problem(
        "E106",
        "checkpoint",
        tr("Two checkpoints are given: {word} and {other}.", word=word, other=other),
        "",
        Fix(text=tr("`covey export {word}`", word=word)),
    )


def _refuse(argv: Sequence[str], word: str, target: Path, options: ExportOptions) -> None:
    problems = []
    if (no_checkpoint := refused("export", argv, word)) is not None:
        problems.append(no_checkpoint)
    elif options.torch_dtype != "auto" and not (options.merge and is_adapter(word)):
        problems.append(_no_merge(word, options))
    # One that nobody typed lies beside what is no checkpoint.
    is_asked = options.output_dir is not None or no_checkpoint is None
    if is_asked and exists(target):
        problems.append(
            Problem(
                code="E402",
                option="output_dir",
                seen=tr("{target} already exists.", target=target),
                why=tr("An export is only written to a new directory, so nothing is overwritten."),
                fixes=(Fix(text=tr("choose another directory: --output_dir DIR")),),
            )
        )
    elif is_asked and (words := unwritable(target)):
        problems.append(unwritable_problem(str(target), words))
    if problems:
        raise ConfigError(problems)


def _no_merge(word: str, options: ExportOptions) -> Problem:
    """A dtype where files are copied as they are."""
    leave = Fix(text=tr("leave out --torch_dtype"))
    merge = Fix(text=tr("merge the adapter: --merge"))
    why = tr("{path} is not an adapter", path=word) if options.merge else tr("nothing is merged")
    return problem(
        "E115",
        "torch_dtype",
        tr(
            "torch_dtype is {dtype}, but {why}: the files are copied as they are.",
            dtype=options.torch_dtype,
            why=why,
        ),
        "",
        *([merge] if is_adapter(word) else []),
        leave,
    )


def _failed(checkpoint: Path, error: CoveyError | OSError) -> Problem:
    words = cannot_be_read(error) if isinstance(error, OSError) else error.args[0]
    seen = (
        words
        if has_value(words, str(checkpoint))
        else tr("{checkpoint}: {error}", checkpoint=checkpoint, error=words)
    )
    if isinstance(error, DamagedModelError):
        again = tr("copy or download it again, or use another checkpoint of the run")
        return problem("E415", "export", tr("{seen}.", seen=seen), "", Fix(text=again))
    return problem(
        "E415",
        "export",
        seen,
        tr("The checkpoint is damaged, or its base model was moved or changed."),
        Fix(text=tr("give the directory in which the base model is now: --base DIR")),
        Fix(text=tr("use another checkpoint of the run")),
    )
