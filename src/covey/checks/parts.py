"""Finds faults in which parts of a vision language model are trained, and at what learning rates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from covey.checks.check import Check
from covey.config.derive import is_usual
from covey.media.parts import IN_WORDS, has_parts
from covey.models.adapter_shapes import ALL_LINEAR
from covey.options.schema import Config
from covey.plan.facts import Facts, ModelFacts, PromptFacts
from covey.plan.problem import problem, warning
from covey.plan.words import flags
from covey.texts import joined, plural, tr
from covey.types import Fix, Problem
from covey.types.media import PARTS, Part

_FREEZE: dict[Part, str] = {"vit": "freeze_vit", "aligner": "freeze_aligner", "llm": "freeze_llm"}
_LIMITS = ("max_pixels", "image_max_token_num")
_RATES: dict[Part, str] = {"vit": "vit_lr", "aligner": "aligner_lr"}


def part_problems(config: Config, facts: Facts, typed: Collection[str]) -> list[Problem]:
    """Return what is said about the options of parts; nothing while the model is not known."""
    model = facts.model
    if model.type is None:
        return []
    if not has_parts(model.type):
        return _of_text(config, model, typed)
    return [
        *_all_frozen(config),
        *_named(config, typed),
        *_rates(config, model, typed),
        *_scale(config),
        *_without_images(config, model, facts.prompts),
    ]


def _of_text(config: Config, model: ModelFacts, typed: Collection[str]) -> list[Problem]:
    names = _changed(config, [*_FREEZE.values(), *_RATES.values(), *_LIMITS], typed)
    if not names:
        return []
    seen = tr(
        "{set}, but {model} has no vision tower that covey knows (its model_type is {type}).",
        set=_set(config, names),
        model=config.model,
        type=model.type,
    )
    return [warning("W108", names[0], seen, "", _leave_out(names))]


def _all_frozen(config: Config) -> list[Problem]:
    if config.frozen_parts != set(PARTS) or _names_modules(config):
        return []
    seen = tr("freeze_vit, freeze_aligner and freeze_llm are all on, so nothing would be trained.")
    text, tower = tr("train the language model"), tr("train the vision tower")
    fixes = (
        Fix(text=text, edits={"freeze_llm": False}),
        Fix(text=tower, edits={"freeze_vit": False}),
    )
    return [problem("E115", "freeze_llm", seen, "", *fixes)]


def _named(config: Config, typed: Collection[str]) -> list[Problem]:
    """W108: what `all-linear` leaves out, where modules are named instead."""
    names = _changed(config, list(_FREEZE.values()), typed) if _names_modules(config) else []
    if not names:
        return []
    seen = tr(
        "{set}, but the adapter lies on the modules that target_modules names, whatever part they belong to.",
        set=_set(config, names),
    )
    if config.adapters is not None:
        seen = tr(
            "{set}, but the adapter {adapters} keeps the modules that it was trained on.",
            set=_set(config, names),
            adapters=config.adapters,
        )
        return [warning("W108", names[0], seen, "", _leave_out(names))]
    every = Fix(
        text=tr("adapt every linear layer of the other parts"), edits={"target_modules": [ALL_LINEAR]}
    )
    return [warning("W108", names[0], seen, "", _leave_out(names), every)]


def _rates(config: Config, model: ModelFacts, typed: Collection[str]) -> list[Problem]:
    """A learning rate of a part that is not trained. Where it is frozen by default alone, the rate was most
    likely meant."""
    still = {part.part for part in model.parts if not part.is_trained}
    problems = []
    for part, option in _RATES.items():
        if option not in typed or getattr(config, option) is None or part not in still:
            continue
        freeze, leave = _FREEZE[part], _leave_out([option])
        seen = tr(
            "{set}, but no weight of the {part} is trained.", set=_set(config, [option]), part=IN_WORDS[part]
        )
        train = Fix(text=tr("train the {part}", part=IN_WORDS[part]), edits={freeze: False})
        if _names_modules(config):
            problems.append(warning("W108", option, seen, "", leave))
        elif freeze in typed:
            problems.append(warning("W108", option, seen, tr("{option} is on.", option=freeze), leave, train))
        else:
            why = tr("{option} is on by default here.", option=freeze)
            problems.append(problem("E115", option, seen, why, train, leave))
    return problems


def _scale(config: Config) -> list[Problem]:
    """E115: rates of parts beside a learning rate of 0, of which they are multiples during a run."""
    names = [option for option in _RATES.values() if getattr(config, option) is not None]
    if not names or config.learning_rate:
        return []
    rate = getattr(config, names[0])
    seen = tr(
        "{set}, but learning_rate is 0, and the rate of a part is a fixed multiple of it.",
        set=_set(config, names),
    )
    other = Fix(
        text=tr("freeze the language model instead"),
        edits={"learning_rate": rate, "freeze_llm": True},
    )
    return [problem("E115", names[0], seen, "", other, _leave_out(names))]


def _without_images(config: Config, model: ModelFacts, prompts: PromptFacts) -> list[Problem]:
    """Parts that are trained, and have a gradient through images alone, of which the data has none."""
    trained = [part.part for part in model.parts if part.is_trained]
    seeing = [part for part in trained if part != "llm"]
    if not seeing or prompts.has_images is not False:
        return []
    parts = joined(tr(" and "), [IN_WORDS[part] for part in seeing])
    seen = tr("No row of the data has an image, so nothing would change the {parts}.", parts=parts)
    if "llm" not in trained:
        data = Fix(text=tr("use data with images"))
        fixes = (data, Fix(text=tr("train the language model"), edits={"freeze_llm": False}))
        return [problem("E115", "freeze_llm", seen, tr("No other part is trained."), *fixes)]
    freeze = Fix(
        text=tr("freeze what sees: it then takes no memory for gradients and the optimizer"),
        edits={_FREEZE[part]: True for part in seeing},
    )
    return [warning("W108", _FREEZE[seeing[0]], seen, "", *([] if _names_modules(config) else [freeze]))]


def _names_modules(config: Config) -> bool:
    """Return whether an adapter's modules are named, so that no part is left out."""
    return config.tuner_type == "lora" and ALL_LINEAR not in config.target_modules


def _changed(config: Config, names: Sequence[str], typed: Collection[str]) -> list[str]:
    values = config.model_dump()
    return [name for name in names if name in typed and not is_usual(name, values)]


def _set(config: Config, names: Sequence[str]) -> str:
    typed = flags({name: getattr(config, name) for name in names})
    return plural(len(names), "{typed} is set", "{typed} are set", typed=typed)


def _leave_out(names: Sequence[str]) -> Fix:
    return Fix(text=tr("leave out {names}", names=" ".join(f"--{name}" for name in names)))


CHECK = Check(place=45, judge=lambda config, facts, typed: part_problems(config, facts, typed or ()))
