"""Sampling filters: values at which sampling is greedy, and engines that do not record what they keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from covey.config.filters import (
    eval_filters_of,
    filters_of,
    filters_of_their_own,
    greedy_problem,
    in_words,
    off,
)
from covey.options.schema import Config
from covey.plan.facts import Facts, ModelFacts
from covey.plan.problem import problem
from covey.plan.server_line import start_line
from covey.texts import tr
from covey.types import Fix, Problem

# vLLM lists the most probable tokens with each one that it samples: at most so many here.
MOST_LISTED = 4096
# Of top_p 0.9 rarely more than so many tokens are kept.
_TOP_K = 100


def vllm_lists(top_k: int) -> bool:
    """Return whether vLLM, started by covey, lists all tokens that filters with this top_k keep."""
    return 0 < top_k <= MOST_LISTED


def filter_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what is wrong with filters beyond their ranges, and with their engine."""
    return [
        *_single(config),
        *_greedy(config),
        *_beyond(config, facts.model),
        *engine_problems(config, facts),
    ]


def _single(config: Config) -> list[Problem]:
    """Return E110 for a filter that keeps the most probable token alone."""
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
    """Return E111 for filters at a temperature of 0."""
    own = {"temperature": filters_of(config), "eval_temperature": filters_of_their_own(config)}
    return [greedy_problem(name, on) for name, on in own.items() if on and getattr(config, name) <= 0]


def _beyond(config: Config, model: ModelFacts) -> list[Problem]:
    """Return E109 for a top_k above the size of the vocabulary."""
    rows = model.embedding_rows
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
    """Return E120 where filters are set and the engine does not record what they keep. Whatever is refused
    because of an engine is refused here."""
    # A replay samples in evaluations alone, and these filter nothing at temperature 0.
    on = {} if config.replay_rollouts is not None else filters_of(config)
    own = eval_filters_of(config) if config.eval_temperature > 0 else {}
    shown = on | (filters_of_their_own(config) if on and own else own)
    found = list(_without_sets(config, facts, on, own)) if shown else []
    if not found:
        return []
    engine, fixes = found[0]
    seen = tr(
        "Sampling with {in_words} needs an engine that reports which tokens it kept; {engine} does not.",
        in_words=in_words(shown),
        engine=engine,
    )
    whole = Fix(text=tr("sample from all tokens"), edits=off(shown))
    return [problem("E120", next(iter(shown)), seen, "", *fixes, whole)]


def _without_sets(
    config: Config, facts: Facts, on: Mapping[str, Any], own: Mapping[str, Any]
) -> Iterator[tuple[str, list[Fix]]]:
    """Give what samples without recording the sets of the filters of training and of evaluations, each with
    what to do."""
    name, fixes = _beyond_lists(facts.model, on, own)
    if config.rollout_servers:
        for server in facts.servers.asked or ():
            if not server.fault and (server.vllm is not None or (server.engine == "vllm" and fixes)):
                line = start_line(config.model_copy(update={"use_vllm": False}), server.address, facts)
                other = Fix(text=tr("start a server with covey's own engine: `{line}`", line=line))
                if server.vllm is not None:
                    yield tr("`vllm serve` on {address}", address=server.address), [other]
                else:
                    yield tr("{engine} on {address}", engine=name, address=server.address), [*fixes, other]
    elif config.use_vllm and fixes:
        yield name, [*fixes, Fix(text=tr("use covey's own engine"), edits={"use_vllm": False})]


def _beyond_lists(model: ModelFacts, on: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, list[Fix]]:
    """Return vLLM in words with a top_k for which it does not list all tokens that were kept, and what to
    type instead; no fix where it lists them all."""
    filtered = {name: f.get(name, 0) for name, f in {"top_k": on, "eval_top_k": own}.items() if f}
    lacking = {name: top_k for name, top_k in filtered.items() if not vllm_lists(top_k)}
    if not lacking:
        return "", []
    name, top_k = next(iter(lacking.items()))
    most = min(_TOP_K, model.embedding_rows or _TOP_K)
    fix = Fix(
        text=tr("vLLM reports what it kept of up to {most:,} most probable tokens", most=MOST_LISTED),
        edits=dict.fromkeys(lacking, most),
    )
    return tr("vLLM with {name} {top_k}", name=name, top_k=top_k), [fix]
