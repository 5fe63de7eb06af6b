"""Live objects among the options of a Python program: rewards, a model with its tokenizer, rows.

Each gets a name that takes its place in the configuration, and is handed to the survey under it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.checks.objects.configs import with_options_of_configs
from covey.checks.objects.tokenizer import differences
from covey.checks.rewards.look import Functions
from covey.config.names import look_up, normalise
from covey.config.objects import UNUSABLE, object_name
from covey.data.errors import DataError, ModelError
from covey.data.hub import locate_model
from covey.data.live import LiveRows, live_rows
from covey.media.parts import is_frozen
from covey.options.schema import Config
from covey.plan.problem import problem
from covey.quickstart.built_in import BUILT_IN
from covey.texts import joined, tr
from covey.types import Fix, Problem

if TYPE_CHECKING:
    from covey.models.live import LiveModel

# Names of TRL's trainer that its command does not have.
_OF_TRAINERS = {"eval_dataset": "val_dataset", "processing_class": "tokenizer"}
_ROWS = tr("a list of dicts, a Dataset of the library datasets, or a file, directory or id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """The objects that a program gave, by the names that the configuration has for them.

    `names` are those of all, `problems` say what stands against some of them.
    """

    functions: Functions = field(default_factory=dict)
    model: LiveModel | None = None
    rows: Mapping[str, LiveRows] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


NO_OBJECTS = Objects()
"""Of a command, which has words alone."""


@contextmanager
def named_objects(options: Mapping[str, Any], *, offline: bool) -> Iterator[tuple[dict[str, Any], Objects]]:
    """The options with names in the place of objects, and the objects, whose files last as long as this."""
    taking = _Taking()
    values: dict[str, Any] = {}
    for name, value in options.items():
        known = _OF_TRAINERS.get(normalise(name), name)
        if known != name and known in options and options[known] is not None:
            taking.both_given(known, name, value)
        else:
            values[known] = value
    values, faults = with_options_of_configs(values)
    taking.add(faults)
    tokenizer = values.pop("tokenizer", None)
    for name, value in values.items():
        match look_up(name).option:
            case "reward_funcs":
                values[name] = taking.rewards(value)
            case "tools":
                values[name] = taking.tools(value)
            case "environment_factory" | "rollout_func":
                values[name] = taking.environment(value)
            case "dataset" | "val_dataset" as option:
                values[name] = taking.sources(option, value)
    key = next((name for name in values if look_up(name).option == "model"), "model")
    is_live = _is_module(values.get(key))
    with tempfile.TemporaryDirectory(prefix="covey-") if is_live else nullcontext("") as directory:
        if is_live:
            values[key] = taking.model(values[key], tokenizer, Path(directory), offline=offline)
        elif tokenizer is not None:
            taking.compare_tokenizer(tokenizer, values.get(key), offline=offline)
        yield values, taking.objects()


def frozen_problems(config: Config, live: LiveModel | None) -> list[Problem]:
    """What stands against training all weights of a model of which some need no gradient."""
    if live is None or config.tuner_type != "full":
        return []
    family, parts = live.shapes.family, config.frozen_parts
    frozen = [name for name in live.frozen if not is_frozen(name, family, parts)]
    if not frozen:
        return []
    more = tr(" and {num_frozen} more", num_frozen=len(frozen) - 3) if len(frozen) > 3 else ""
    return [
        problem(
            "E377",
            "model",
            tr(
                "Tensors of the model have requires_grad False: {frozen}{more}.",
                frozen=joined(", ", frozen[:3]),
                more=more,
            ),
            "",
            Fix(text=tr("make every weight trainable: `model.requires_grad_(True)`")),
            Fix(text=tr("leave the weights frozen and train a LoRA adapter"), edits={"tuner_type": "lora"}),
        )
    ]


class _Taking:
    """Objects, as they are found among the options."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        self._model: LiveModel | None = None
        self._rows: dict[str, LiveRows] = {}
        self._names: list[str] = []
        self._problems: list[Problem] = []

    def objects(self) -> Objects:
        return Objects(
            functions=self._functions,
            model=self._model,
            rows=self._rows,
            names=tuple(self._names),
            problems=tuple(self._problems),
        )

    def rewards(self, given: Any) -> Any:
        """The rewards with a name for each function. One that is a built-in reward has its name, and one that
        a file holds is named by file, so that config.yaml can be used again; others that share a name are
        numbered."""
        from covey.rewards.targets import built_in_meant

        if given is None:
            return None
        entries = list(given) if isinstance(given, list | tuple) else [given]
        entries = [built_in_meant(entry) or entry for entry in entries]
        typed = {entry for entry in entries if isinstance(entry, str)}
        for index, entry in enumerate(entries):
            if _is_model(entry):
                entries[index] = self._refused_model(entry)
            elif not isinstance(entry, str):
                entries[index] = self._named(entry, typed)
        return entries

    def tools(self, given: Any) -> Any:
        """The tools with a name for each function."""
        entries = list(given) if isinstance(given, list | tuple) else [given]
        typed = {entry for entry in entries if isinstance(entry, str)}
        return [entry if isinstance(entry, str) else self._named(entry, typed) for entry in entries if entry]

    def environment(self, given: Any) -> Any:
        """A name for a class or a function that makes environments, or for several by the names that rows
        have for them."""
        if given is None or isinstance(given, str):
            return given
        if not isinstance(given, Mapping):
            return self._named(given, ())
        name = ", ".join(str(key) for key in given)
        self._functions[name] = given
        return name

    def _named(self, function: Any, typed: Collection[str]) -> str:
        from covey.rewards.targets import Target, callable_name, target_of_callable

        where = target_of_callable(function)
        if isinstance(where, Target) and where.file is not None:
            name = f"{where.file}:{where.name}"
        else:
            plain = callable_name(function)
            numbered = (plain if number == 1 else f"{plain}_{number}" for number in count(1))
            free = (n for n in numbered if n not in typed and self._functions.get(n, function) is function)
            name = next(free)
        self._functions[name] = function
        return name

    def _refused_model(self, model: Any) -> str:
        """A reward model comes from files: ranks and its own process read it from there."""
        kind, source = type(model).__name__, str(getattr(model, "name_or_path", ""))
        seen = tr(
            "reward_funcs has the model {kind} as an object; reward models are loaded from a directory or a "
            "hub.",
            kind=kind,
        )
        saved = Fix(
            text=tr(
                "save it with `model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`, then use "
                "reward_funcs=DIR"
            )
        )
        named = Fix(text=tr("give its name, from which it was loaded: {source!r}", source=source))
        self._problems.append(problem("E377", "reward_funcs", seen, "", *((named,) if source else ()), saved))
        return object_name(kind, UNUSABLE)

    def add(self, problems: Sequence[Problem]) -> None:
        self._problems += problems

    def both_given(self, known: str, name: str, value: Any) -> None:
        """Say that an object has a second name of the same meaning; a None beside it says nothing."""
        if value is None:
            return
        seen = tr("{known} and {name} are both given.", known=known, name=name)
        why = tr("Both names mean the same option, and an option has only one value.")
        fixes = tuple(Fix(text=tr("leave out {name}", name=one)) for one in (name, known))
        self._problems.append(Problem(code="E106", option=known, seen=seen, why=why, fixes=fixes))

    def sources(self, option: str, given: Any) -> Any:
        """The sources with a name for each object. A list of dicts is one source, a list of others several;
        of a dict the keys name the sources."""
        if isinstance(given, str | Path | None) or _is_words(given):
            return given
        if type(given) is dict:
            return [f"{name}={self._source(option, value)}" for name, value in given.items()]
        is_several = isinstance(given, list | tuple) and not any(isinstance(row, Mapping) for row in given)
        return [self._source(option, value) for value in (given if is_several else [given])]

    def _source(self, option: str, value: Any) -> str:
        if isinstance(value, str | Path):
            return str(value)
        try:
            rows = live_rows(value)
        except DataError as error:
            self._problems.append(
                problem(
                    "E377", option, tr("{option} {error}.", option=option, error=error), "", Fix(text=_ROWS)
                )
            )
            self._names.append(object_name(type(value).__name__, UNUSABLE))
            return self._names[-1]
        name = rows.name
        if rows.rows is None and name in self._rows:
            # Streams have no checksum to tell them apart by.
            name = object_name(f"{type(value).__name__} {len(self._rows) + 1}", "stream")
        self._rows[name] = rows
        self._names.append(name)
        return name

    def model(self, model: Any, tokenizer: Any, directory: Path, *, offline: bool) -> str:
        from covey.models.live import live_model

        if isinstance(tokenizer, str | Path | None):
            tokenizer = self._files_of_tokenizer(model, tokenizer, offline=offline)
        name, live, faults = live_model(model, tokenizer, directory)
        self._model = None if tokenizer is None else live
        self._names.append(name)
        self._problems += [problem("E377", f.option, f.seen, "", Fix(text=f.advice)) for f in faults]
        return name

    def _files_of_tokenizer(self, model: Any, named: str | Path | None, *, offline: bool) -> Path | None:
        """Where the tokenizer lies that is named, or with which the model was loaded; None where there is
        none."""
        source = str(named or getattr(model, "name_or_path", ""))
        whose = tr("tokenizer is {source}", source=source) if named else tr("tokenizer is not given")
        try:
            found = locate_model(source, offline=offline).directory if source else None
        except ModelError as error:
            seen = tr(
                "{whose}, and the tokenizer of the model cannot be read: {error}.", whose=whose, error=error
            )
        else:
            if found is not None and isfile(found / "tokenizer.json"):
                return found
            seen = tr("{whose}, and the model does not say where it was loaded from.", whose=whose)
            seen = (
                tr("{whose}, and {source} has no tokenizer.json.", whose=whose, source=source)
                if source
                else seen
            )
        advice = "tokenizer=AutoTokenizer.from_pretrained(DIR_OR_ID)"
        self._problems.append(problem("E377", "tokenizer", seen, "", Fix(text=advice)))
        return None

    def compare_tokenizer(self, tokenizer: Any, model: Any, *, offline: bool) -> None:
        """Say that the tokenizer of a model that is named comes from its directory, where another one is
        given."""
        if isinstance(tokenizer, str | Path):
            differs: tuple[str, ...] = () if str(tokenizer) == str(model) else ("tokens",)
        else:
            try:
                differs = differences(tokenizer, named_directory(str(model), offline=offline))
            except (ModelError, OSError, ValueError):
                # What is wrong with the model is said of the model.
                return
        if not differs:
            return
        seen = tr(
            "tokenizer differs from that of the model {model} ({differs}), and the tokenizer is read from "
            "the model's directory.",
            model=model,
            differs=joined(", ", differs),
        )
        self._problems.append(
            problem(
                "E377",
                "tokenizer",
                seen,
                "",
                Fix(text=tr("leave tokenizer out")),
                Fix(text=tr("give the model as an object too: AutoModelForCausalLM.from_pretrained(MODEL)")),
            )
        )


def named_directory(model: str, *, offline: bool) -> Path:
    """Return where the small files of a named model lie; ModelError where they cannot be had."""
    if model in BUILT_IN:
        return BUILT_IN[model].model_dir
    return locate_model(model, offline=offline).directory


def _is_module(value: Any) -> bool:
    """Whether a value is a module of torch; who has one has imported torch."""
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    return module is not None and isinstance(value, module)


def _is_model(value: Any) -> bool:
    """Whether a value is a model of transformers, or one of peft around it."""
    kinds = (("transformers", "PreTrainedModel"), ("peft", "PeftModel"))
    classes = [getattr(sys.modules.get(module), name, None) for module, name in kinds]
    return _is_module(value) and isinstance(value, tuple(kind for kind in classes if kind is not None))


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str | Path) for entry in value)
