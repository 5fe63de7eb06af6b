"""The plan lists which parts of a vision model are trained, and at which learning rates."""

from __future__ import annotations

from covey.media.parts import IN_WORDS
from covey.options.schema import Config
from covey.plan.facts import Facts, PartFacts
from covey.plan.report_data import millions
from covey.texts import joined, tr


def part_lines(config: Config, facts: Facts) -> list[str]:
    """Return which parts are trained, where some are not, and which have learning rates of their own."""
    trained = [part for part in facts.model.parts if part.is_trained]
    frozen = [part for part in facts.model.parts if not part.is_trained]
    lines = [_in_words(config, facts, _names(trained), _names(frozen))] if frozen else []
    rates = {"vit": config.vit_lr, "aligner": config.aligner_lr}
    for part in trained:
        rate = rates.get(part.part)
        if rate is not None:
            lines.append(
                tr("peak learning rate of the {part}: {rate:g}", part=IN_WORDS[part.part], rate=rate)
            )
    return lines


def _in_words(config: Config, facts: Facts, trained: str, frozen: str) -> str:
    if config.tuner_type == "lora":
        return tr("adapters are on: {trained}; not on: {frozen}", trained=trained, frozen=frozen)
    num, of = facts.model.num_trained or 0, max(1, facts.model.num_parameters or 0)
    return tr(
        "trained: {trained}; frozen: {frozen}; {millions} parameters trained ({share:.2%})",
        trained=trained,
        frozen=frozen,
        millions=millions(num),
        share=num / of,
    )


def _names(parts: list[PartFacts]) -> str:
    return joined(", ", [IN_WORDS[part.part] for part in parts]) or tr("nothing")
