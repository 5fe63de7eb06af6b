"""Sampling filters: values at which sampling is greedy, and engines that do not record what filters keep."""

from __future__ import annotations

from collections.abc import Iterator

from covey.config.filters import (
    eval_filters_of,
    filters_of,
    filters_of_their_own,
    greedy_problem,
    in_words,
    off,
)
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.plan.server_line import start_line
from covey.texts import tr
from covey.types import Fix, Problem

VLLM = "vllm"


def records_sets(engine: str) -> bool:
    """Return whether an engine, by the name that a rollout server has for it, records the tokens that filters
    keep. Whatever refuses filters on an engine asks here."""
    return engine == "native"


def filter_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what is wrong with filters beyond their ranges, and with their engine."""
    return [*_single(config), *_greedy(config), *_beyond(config, facts), *engine_problems(config, facts)]


def unrecorded(config: Config, facts: Facts) -> str:
    """Return the name of the engine that samples where it does not record what filters keep; else nothing."""
    return next((name for name, _ in _without_sets(config, facts)), "")


def _single(config: Config) -> list[Problem]:
    """E110: a filter that keeps the most probable token alone."""
    return [
        problem(
            "E110",
            name,
            tr(
                "{name} is {value:g}: only the most probable token is kept, and all completions of a prompt "
                "are equal.",
                name=name,
                value=value,
            ),
            "",
            Fix(text=tr("sample from all tokens"), edits=off({name: value})),
        )
        for name, value in filters_of(config).items()
        if name in ("top_k", "min_p") and value == 1
    ]


def _greedy(config: Config) -> list[Problem]:
    """E111: filters at a temperature of 0."""
    own = {"temperature": filters_of(config), "eval_temperature": filters_of_their_own(config)}
    return [greedy_problem(name, on) for name, on in own.items() if on and getattr(config, name) <= 0]


def _beyond(config: Config, facts: Facts) -> list[Problem]:
    """E109: more tokens than the model has."""
    rows = facts.embedding_rows
    if rows is None:
        return []
    named = filters_of(config) | filters_of_their_own(config)
    return [
        problem(
            "E109",
            name,
            tr(
                "{name} is {value:,}, but the vocabulary of the model has {rows:,} tokens.",
                name=name,
                value=value,
                rows=rows,
            ),
            "",
            Fix(text=tr("sample from all tokens"), edits=off({name: value})),
        )
        for name, value in named.items()
        if name.endswith("top_k") and value > rows
    ]


def engine_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return E120 where filters are set and the engine does not record what they keep."""
    # A replay samples in evaluations alone, and these filter nothing at temperature 0.
    on = {} if config.replay_rollouts is not None else filters_of(config)
    if config.eval_temperature > 0:
        on |= filters_of_their_own(config) if on else eval_filters_of(config)
    found = list(_without_sets(config, facts)) if on else []
    if not found:
        return []
    engine, fix = found[0]
    seen = tr(
        "Draws are filtered by {in_words}, but {engine} samples, and covey does not record which tokens it "
        "keeps.",
        in_words=in_words(on),
        engine=engine,
    )
    whole = Fix(text=tr("sample from all tokens"), edits=off(on))
    return [problem("E120", next(iter(on)), seen, "", fix, whole)]


def _without_sets(config: Config, facts: Facts) -> Iterator[tuple[str, Fix]]:
    """Give the engines of a run that record no sets, each with what to use in its place."""
    if config.rollout_servers:
        for server in facts.servers or ():
            engine = VLLM if server.vllm is not None else server.engine
            if not server.fault and not records_sets(engine):
                line = start_line(config.model_copy(update={"use_vllm": False}), server.address, facts)
                name = tr("{engine} on {address}", engine=engine, address=server.address)
                yield name, Fix(text=tr("start a server with covey's own engine: `{line}`", line=line))
    elif config.use_vllm:
        if not records_sets(VLLM):
            yield "vLLM", Fix(text=tr("use covey's own engine"), edits={"use_vllm": False})
    elif not records_sets(config.engine):
        own = Fix(text=tr("use covey's own engine"), edits={"engine": "native"})
        yield tr("{engine} of transformers", engine=config.engine), own
