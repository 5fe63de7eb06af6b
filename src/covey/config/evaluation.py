"""The configuration of `covey eval`: that of the checkpoint's run, where it has one, under what is typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import isdir, isfile
from pathlib import Path

from covey.config.adapters import base_of
from covey.config.file import read_file
from covey.config.filters import EVAL_FILTERS, FILTERS, greedy_problem, that_filter
from covey.config.layers import merge
from covey.config.objects import is_live
from covey.config.resolve import Resolved, resolve
from covey.config.start import quantization_of_base
from covey.config.take import Typed
from covey.texts import tr
from covey.types import Fix, Problem

_OF_TRAINING = (
    *("pass_rates", "pass_rate_column", "min_pass_rate", "max_pass_rate", "curriculum"),
    *("adapters", "ref_adapters"),
)
# An evaluation is one process with one vLLM in it.
_OF_PROCESSES = ("vllm_tensor_parallel_size", "vllm_data_parallel_size")
_GIVEN = tr("the model that is evaluated")


def eval_options(
    model: str, typed: Mapping[str, Typed], problems: Sequence[Problem] = (), base: str | None = None
) -> Resolved:
    """Return the options under which a model or the directory of a checkpoint is evaluated; `base` is read
    in the place of the model that an adapter names."""
    directory = Path(model)
    all_problems = list(problems)
    typed = _with_sets(typed)
    options = dict(typed)
    if "model" in typed:
        all_problems.append(_two_models(model, "model", typed["model"]))
    if options.pop("adapters", None) is not None:
        all_problems.append(_two_models(model, "adapters", typed["adapters"]))
    beside = directory.parent / "config.yaml"
    if isfile(beside) and is_checkpoint(directory):
        layer = read_file(str(beside))
        all_problems += layer.problems
        # Which rows a run leaves out, and their order, is its own affair.
        left_out = {*_OF_TRAINING, *_OF_PROCESSES}
        options = merge({n: t for n, t in layer.typed.items() if n not in left_out}, options)
    if is_checkpoint(directory) and not isdir(directory):
        model = str(directory.absolute())  # RUN/checkpoint-N looks like the id of a model on a hub
    options["model"] = Typed(base or base_of(directory) or model, _GIVEN)
    quantization = quantization_of_base(directory, options)
    options |= {name: Typed(value, source) for name, (value, source) in quantization.items()}
    needs_data = "dataset" not in options or _are_gone(options["dataset"], typed)
    if needs_data and "val_dataset" in options:
        # The facts of a run are learnt from its data; here that is what is evaluated on.
        options["dataset"] = Typed(options["val_dataset"].value[:1], "val_dataset")
    if "output_dir" not in typed:
        options["output_dir"] = Typed(model, _GIVEN)
    if not _are_held_out(options):
        options["eval_strategy"] = Typed("no", "covey eval")
        resolved = resolve(options, 1, all_problems)
        others = [p for p in resolved.problems if p.option != "dataset"]
        return replace(resolved, problems=(_nothing_to_evaluate_on(), *others))
    if options.get("eval_strategy", Typed("no", "")).value == "no":
        options["eval_strategy"] = Typed("steps", "covey eval")
    resolved = resolve(options, 1, all_problems)
    if resolved.config.eval_temperature <= 0:
        # The filters of the checkpoint's run are its own affair.
        on = that_filter({name: typed[name].value for name in (*FILTERS, *EVAL_FILTERS) if name in typed})
        more = [greedy_problem("eval_temperature", on)] if on else []
        resolved = replace(resolved, problems=(*resolved.problems, *more))
    if "output_dir" in typed:
        return resolved
    # Where nobody typed it, it stands for the model, of which more is said.
    kept = [p for p in resolved.problems if p.option != "output_dir" or p in problems]
    return replace(resolved, problems=tuple(kept))


def _with_sets(typed: Mapping[str, Typed]) -> Mapping[str, Typed]:
    """The typed options, with `dataset` as the set to evaluate on if no other is named, because nothing is
    trained here. It replaces the sets of the checkpoint's run."""
    if "dataset" not in typed or _are_held_out(typed):
        return typed
    dataset = typed["dataset"]
    first = replace(dataset, value=dataset.value[:1])
    return {
        **typed,
        "dataset": first,
        "val_dataset": dataset,
        "split_dataset_ratio": Typed(0.0, "covey eval"),
    }


def _are_held_out(options: Mapping[str, Typed]) -> bool:
    """Whether sets to evaluate on are named, or a share of the data is held out."""
    return any(options[n].value for n in ("val_dataset", "split_dataset_ratio") if n in options)


def _are_gone(dataset: Typed, typed: Mapping[str, Typed]) -> bool:
    """Whether a run was given its rows as objects, which its configuration has the names of."""
    return "dataset" not in typed and any(is_live(text) for text in dataset.value)


def _two_models(model: str, option: str, other: Typed) -> Problem:
    return Problem(
        code="E106",
        option=option,
        seen=tr(
            "{option} is {value} ({source}), but the model to evaluate is {model}.",
            option=option,
            value=other.value,
            source=other.source,
            model=model,
        ),
        why=tr("Only one model can be evaluated at a time."),
        fixes=(
            Fix(
                text=tr(
                    "leave out --{option}; `covey eval {value} ...` evaluates the other model",
                    option=option,
                    value=other.value,
                )
            ),
        ),
    )


def _nothing_to_evaluate_on() -> Problem:
    return Problem(
        code="E105",
        option="val_dataset",
        seen=tr("val_dataset is not given, and neither is dataset."),
        why=tr("An evaluation needs prompts, and gold answers where a reward compares with them."),
        fixes=(
            Fix(text=tr("files, directories or ids on a hub: --dataset FILE, or --val_dataset FILE")),
            Fix(text=tr("for a checkpoint, a share of its run's data: --split_dataset_ratio 0.05")),
        ),
    )


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has the name of a run's checkpoint."""
    return directory.name.startswith("checkpoint-")


def has_own_output(resolved: Resolved) -> bool:
    """Whether somebody typed where the results go."""
    return resolved.sources["output_dir"] != _GIVEN
