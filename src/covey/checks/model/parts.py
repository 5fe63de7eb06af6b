"""Facts about the parts of a model that sees images, and what an adapter or full training does to each."""

from __future__ import annotations

import math

from covey.media.parts import has_parts, part_of
from covey.models.adapter_shapes import LoraFacts, ModelShapes
from covey.options.schema import Config
from covey.plan.facts import PartFacts
from covey.types.media import PARTS


def part_facts(config: Config, shapes: ModelShapes, lora: LoraFacts | None) -> tuple[PartFacts, ...]:
    """The parts of a model; none of one that sees nothing. `lora` is the adapter that is trained, if one
    is."""
    if not has_parts(shapes.family):
        return ()
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.tensors.items():
        counts[part_of(name, shapes.family)] += math.prod(shape)
    trained = set(PARTS) - config.frozen_parts
    if lora is not None:
        trained = {part_of(module, shapes.family) for module in (*lora.targets, *lora.saved)}
    return tuple(
        PartFacts(part=part, num_parameters=count, is_trained=part in trained)
        for part, count in counts.items()
    )
