"""Reads the tokenizer, rows, tools and environment of a run again, for `covey replay`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from covey.checks.data.look import with_data
from covey.checks.model.look import with_model
from covey.checks.run.look import run_facts, with_layout
from covey.checks.tools.look import agents_of, with_tools
from covey.data.image_records import ImageRows
from covey.data.pass_rates import checksum
from covey.data.prompts import fields_of
from covey.data.text import TextCodec
from covey.environments.agents import Agents
from covey.environments.template_calls import NoFormat, format_or_reason
from covey.errors import CoveyError
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.texts import joined, tr
from covey.types import Prompt

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Holds what makes episodes again. `agents` run tools and environment, `writers` say how a template
    writes what they answer; None where there are none. `prompts` are those of the rows by id. `can_render`
    says that prompts are rendered as the run did, `can_draw` that all is there that episodes are sampled
    with, and `notes` what cannot be replayed, and why."""

    facts: Facts
    codec: TextCodec
    agents: Agents | None
    writers: Agents | None
    prompts: Mapping[int, Prompt]
    images: ImageRows
    can_render: bool
    can_draw: bool
    notes: tuple[str, ...]

    def close(self) -> None:
        """End the processes of tools and environments."""
        if self.agents is not None:
            self.agents.close()


def read_parts(config: Config, records: Sequence[Record], checkpoints: Collection[Path]) -> Parts:
    """Read the parts that these records need. CoveyError where no tokenizer of the run is left: neither that
    of its model nor that of one of its `checkpoints`."""
    facts = with_layout(run_facts(config, 1), config, None)
    facts, codec = _codec(facts, config, checkpoints)
    if maker := _other_maker(config, records):
        words = tr(
            "{maker} made the episodes, so that rendering and environment are not replayed", maker=maker
        )
        _, data = with_data(facts, config, codec, offline=False)
        return Parts(
            facts=facts,
            codec=codec,
            agents=None,
            writers=None,
            prompts={},
            images=data.images,
            can_render=False,
            can_draw=False,
            notes=(words,),
        )
    facts, agents = with_tools(facts, config, codec, {})
    notes = [
        tr("{entry} is not replayed: {words}", entry=fault.entry, words=fault.words)
        for fault in facts.tools.faults
    ]
    writers = agents or _writers(config, facts, codec, records)
    schemas = () if agents is None else agents.schemas
    facts, data = with_data(facts, config, codec, offline=False, tools=schemas)
    prompts: dict[int, Prompt] = {}
    if data.prompts is None:
        why = tr("they are streamed") if config.streaming else _why(facts)
        notes.append(tr("the rows are not read again, and nothing is rendered: {why}", why=why))
    else:
        prompts, changed = _chosen(data.prompts.entries, records)
        if changed:
            rows = joined(", ", map(str, changed))
            notes.append(tr("rows of the data are not what they were: {rows}", rows=rows))
    return Parts(
        facts=facts,
        codec=codec,
        agents=agents,
        writers=writers,
        prompts=prompts,
        images=data.images,
        can_render=writers is not None or not config.has_turns,
        can_draw=agents is not None or not config.has_turns,
        notes=tuple(notes),
    )


def _other_maker(config: Config, records: Sequence[Record]) -> str:
    """Return what made the episodes, where it was not one of the loops over an engine; "" where it was."""
    if config.rollout_func is not None:
        return "rollout_func"
    if config.replay_rollouts is not None:
        return tr("another run")
    has_turns = any(record.get("turns") for record in records)
    return tr("another loop") if has_turns and not config.has_turns else ""


def _why(facts: Facts) -> str:
    return tr("they are not there") if facts.data.problem is None else facts.data.problem.words


def _codec(facts: Facts, config: Config, checkpoints: Collection[Path]) -> tuple[Facts, TextCodec]:
    """Return the tokenizer of the model, or of a checkpoint where the model is gone."""
    found = facts
    for model in (config.model, *map(str, checkpoints)):
        found, codec = with_model(facts, config.model_copy(update={"model": model}), offline=True)
        if codec is not None:
            return found, codec
    raise CoveyError(
        found.model.problem or tr("{model}, the model of the run, is not here", model=config.model)
    )


def _writers(config: Config, facts: Facts, codec: TextCodec, records: Sequence[Record]) -> Agents | None:
    """Return how answers are written where an environment is gone; None where prompts describe tools that
    are gone with it."""
    has_results = any(turn["results"] for record in records for turn in record.get("turns", ()))
    if not config.has_turns or config.tools or has_results or config.multi_turn_scheduler is not None:
        return None
    read = format_or_reason(codec)
    form = None if isinstance(read, NoFormat) else read
    gone: Any = SimpleNamespace(has_step=True)
    return agents_of(config, codec, form, facts.model.context, None, gone)


def _chosen(entries: Sequence[Prompt], records: Sequence[Record]) -> tuple[dict[int, Prompt], list[int]]:
    """Return the prompts of these records by id, and the ids whose row has changed."""
    then = {record["prompt_id"]: record["checksum"] for record in records}
    chosen, changed = {}, []
    for number, prompt_id in enumerate(fields_of(entries, "id")):
        if prompt_id in then:
            prompt = entries[number]
            chosen[prompt_id] = prompt
            if checksum(prompt) != then[prompt_id]:
                del chosen[prompt_id]
                changed.append(prompt_id)
    changed += sorted(then.keys() - chosen.keys() - {*changed})
    return chosen, changed
