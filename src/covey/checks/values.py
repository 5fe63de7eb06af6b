"""Values out of range, and values that make each other pointless."""

from __future__ import annotations

import json
from typing import Any

from covey.checks.check import Check
from covey.codes import Code
from covey.config.derive import RULES
from covey.options.declare import Bounds
from covey.options.schema import FACTS, Config, default_of
from covey.plan.problem import problem, warning
from covey.texts import tr
from covey.types import Fix, Problem


def value_problems(config: Config) -> list[Problem]:
    """Return what is wrong with single values and with pairs of them, whatever the machine and the data
    are."""
    values = config.model_dump()
    problems = [
        _out_of_range(name, values[name], facts.bounds)
        for name, facts in FACTS.items()
        if facts.bounds is not None
        and values[name] is not None
        and not facts.bounds.accept(values[name])
        # What follows from a wrong value is no fault of its own.
        and all(values[other] != values[name] for other in _followed(name))
    ]
    return [
        *_temperature(config),
        *problems,
        *_warmup(config),
        *_lowest_rate(config),
        *_warnings(config),
        *_sources(config),
    ]


def _followed(name: str) -> frozenset[str]:
    """The options that this one follows from when it is not typed."""
    return RULES[name].inputs if name in RULES else frozenset()


def _out_of_range(name: str, value: Any, allowed: Bounds) -> Problem:
    usual = FACTS[name].usual
    if usual is None:
        fix = Fix(text=tr("leave out --{name}", name=name), edits={name: None})
    else:
        is_default = usual == default_of(name)
        text = tr("use the default") if is_default else tr("use the usual value")
        fix = Fix(text=text, edits={name: usual})
    return Problem(
        code="E109",
        option=name,
        seen=tr(
            "{name} is {plain}; it must be {words}.", name=name, plain=_plain(value), words=allowed.words
        ),
        why=allowed.why,
        cause=tr("The value may mean `not set` in another tool.") if value <= 0 else "",
        fixes=(fix,),
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _temperature(config: Config) -> list[Problem]:
    if config.temperature > 0:
        return []
    return [
        Problem(
            code="E110",
            option="temperature",
            seen=tr(
                "temperature is {temperature:g}: sampling is greedy, and all completions of a "
                "prompt are equal.",
                temperature=config.temperature,
            ),
            why=tr("Equal completions get equal rewards, every advantage is 0, and no weight moves."),
            cause=tr("Temperature 0 is meant for evaluation; training needs completions that differ."),
            fixes=(
                Fix(
                    text=tr("sample from the model's own distribution, the default"),
                    edits={"temperature": 1.0},
                ),
                Fix(text=tr("sample a little sharper, the default of ms-swift"), edits={"temperature": 0.9}),
            ),
        )
    ]


def _warmup(config: Config) -> list[Problem]:
    steps, ratio = config.warmup_steps > 0, config.warmup_ratio > 0
    problems = []
    if steps and ratio:
        problems.append(
            _contradiction(
                "warmup_ratio",
                tr(
                    "warmup_steps is {warmup_steps} and warmup_ratio is {warmup_ratio:g}, but only "
                    "one of them can be set.",
                    warmup_steps=config.warmup_steps,
                    warmup_ratio=config.warmup_ratio,
                ),
                tr("Both options set the length of the warm-up."),
                "",
                (
                    Fix(text=tr("keep the steps"), edits={"warmup_ratio": 0.0}),
                    Fix(text=tr("keep the share of all steps"), edits={"warmup_steps": 0}),
                ),
            )
        )
    if (steps or ratio) and config.lr_scheduler_type == "constant":
        name = "warmup_steps" if steps else "warmup_ratio"
        problems.append(
            _contradiction(
                name,
                tr(
                    "{name} is {value:g}, but lr_scheduler_type constant has no warm-up.",
                    name=name,
                    value=getattr(config, name),
                ),
                tr("The warm-up would be ignored."),
                tr("The default schedule here is constant; in TRL it is linear, in ms-swift cosine."),
                (
                    Fix(
                        text=tr("warm up, then stay constant"),
                        edits={"lr_scheduler_type": "constant_with_warmup"},
                    ),
                    Fix(text=tr("use no warm-up"), edits={"warmup_steps": 0, "warmup_ratio": 0.0}),
                ),
            )
        )
    return problems


def _lowest_rate(config: Config) -> list[Problem]:
    """Return what is wrong with the end of a schedule that does not end at 0."""
    if config.lr_scheduler_type != "cosine_with_min_lr":
        return []
    given = config.lr_scheduler_kwargs or {}
    limits = {"min_lr": config.learning_rate, "min_lr_rate": 1.0}
    is_one = len(given) == 1 and given.keys() <= limits.keys()
    if is_one and all(isinstance(v, int | float) and 0 <= v <= limits[name] for name, v in given.items()):
        return []
    seen = tr(
        "lr_scheduler_type cosine_with_min_lr ends at min_lr, at most learning_rate, or at min_lr_rate, a "
        "share of it from 0 to 1; lr_scheduler_kwargs is {given}.",
        given=json.dumps(given, default=str),
    )
    usual = Fix(text=tr("end at a tenth of it"), edits={"lr_scheduler_kwargs": {"min_lr_rate": 0.1}})
    return [problem("E109", "lr_scheduler_kwargs", seen, "", usual)]


def _contradiction(option: str, seen: str, why: str, cause: str, fixes: tuple[Fix, ...]) -> Problem:
    return Problem(code="E111", option=option, seen=seen, why=why, cause=cause, fixes=fixes)


def _warnings(config: Config) -> list[Problem]:
    problems = []
    if config.learning_rate == 0:
        problems.append(
            warning(
                "W103",
                "learning_rate",
                tr("learning_rate is 0."),
                "",
                Fix(text=tr("use the default"), edits={"learning_rate": 1e-6}),
            )
        )
    if config.delta is not None and 0 < config.delta < 1 + config.epsilon_high:
        bound = 1 + config.epsilon_high
        problems.append(
            warning(
                "W104",
                "delta",
                tr(
                    "delta is {delta:g}, below 1 + epsilon_high = {bound:g}.", delta=config.delta, bound=bound
                ),
                tr("delta bounds the ratio itself, not its distance from 1."),
                Fix(
                    text=tr("use a value well above the clipping range"), edits={"delta": max(2.0, 2 * bound)}
                ),
            )
        )
    passes = config.num_iterations * config.steps_per_generation // max(1, config.gradient_accumulation_steps)
    if passes > _MANY_STEPS:
        problems.append(
            warning(
                "W106",
                "num_iterations",
                tr("{passes} optimizer steps train on the same rollout.", passes=passes),
                tr(
                    "num_iterations is high, or steps_per_generation is far above "
                    "gradient_accumulation_steps."
                ),
                Fix(
                    text=tr("take one step per rollout (on-policy)"),
                    edits={"num_iterations": 1, "gradient_accumulation_steps": config.steps_per_generation},
                ),
            )
        )
    return problems


_MANY_STEPS = 8


def _sources(config: Config) -> list[Problem]:
    """Return the problems of mixing, splitting and streaming beside each other."""
    problems = []
    probabilities, num = config.interleave_prob, len(config.dataset)
    even = [round(1 / num, 6)] * (num - 1) if num else []
    if probabilities and (
        len(probabilities) != num or min(probabilities) < 0 or abs(sum(probabilities) - 1) > _SUM_TOLERANCE
    ):
        problems.append(
            problem(
                "E109",
                "interleave_prob",
                tr(
                    "interleave_prob is {probabilities} for {num} sources; it needs one "
                    "probability for each source, with the sum 1.",
                    probabilities=" ".join(f"{p:g}" for p in probabilities),
                    num=num,
                ),
                "",
                Fix(
                    text=tr("give each source the same probability"),
                    edits={"interleave_prob": [*even, round(1 - sum(even), 6)]},
                ),
            )
        )
    if config.streaming:
        if config.max_steps < 1:
            problems.append(
                problem(
                    "E115",
                    "streaming",
                    tr(
                        "streaming is on, but max_steps is not set, and the number of rows in a stream "
                        "is not known."
                    ),
                    tr("The length of an epoch is known only when the stream ends."),
                    Fix(text=tr("set the number of optimizer steps"), edits={"max_steps": 1000}),
                    Fix(text=tr("read all rows before the run starts"), edits={"streaming": False}),
                )
            )
        for name in ("interleave_prob", "split_dataset_ratio"):
            if getattr(config, name):
                problems.append(
                    problem(
                        "E111",
                        name,
                        tr("{name} is set, but streaming is on.", name=name),
                        tr("Mixing and splitting need all rows, but a stream gives only the next ones."),
                        Fix(text=tr("read all rows before the run starts"), edits={"streaming": False}),
                    )
                )
    return problems


_SUM_TOLERANCE = 1e-6


_CODES = (
    Code(
        code="W104",
        title="Bound of the ratio within the clipping range",
        why="If delta is below 1 + epsilon_high, it also limits ratios inside the clipping range, "
        "which two-sided clipping is not meant to do.",
    ),
    Code(
        code="W106",
        title="Many optimizer steps per rollout",
        why="The later steps train on samples from a policy that is many updates old; clipping then "
        "discards many of them.",
    ),
)

CHECK = Check(place=200, judge=lambda config, _, __: value_problems(config), codes=_CODES)
