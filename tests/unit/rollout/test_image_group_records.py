"""Groups with images through JSON and back: records of a rollout, and rows that a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.batching.samples import to_samples
from covey.data.image_records import ImageRows
from covey.data.images import PlacedImage, RowImage
from covey.data.vision import ImageAt
from covey.media.sizes import ImageLimits
from covey.media.source import ImageSource
from covey.rollout.records import groups_of, records_of
from covey.types import (
    Episode,
    EpisodeId,
    Group,
    Medium,
    Origin,
    Outcome,
    Prompt,
    SamplingParams,
    Score,
    ScoredGroup,
    Source,
)
from support.groups import sequence
from support.vision import IMAGE, medium, picture

LIMITS = ImageLimits(4, 2, 2, 64, 4096)
CONTENT = picture((9, 99, 200))
ROWS: list[Mapping[str, Any]] = [{"prompt": "<image>What?", "images": [CONTENT]}]
CAT = replace(medium("cat", 1, 2), source=ImageAt(RowImage(ROWS, 0, 0, ("",)), LIMITS))
DRAWN = replace(medium("drawn", 1, 2), source=ImageAt(PlacedImage(ImageSource(data=CONTENT)), LIMITS))
PROMPT = Prompt(
    id=0,
    messages=None,
    text="<image>What?",
    token_ids=(7, IMAGE, IMAGE, 8),
    columns={},
    origin=Origin(epoch=0, rollout=3),
    media=(CAT,),
)


def episode(sibling: int, *later: Medium, **fields: Any) -> Episode:
    """An episode of one turn, or of two with images between them."""
    turns = [(Source.MODEL, (5, 6), 4)]
    if later:
        placeholders = (IMAGE,) * sum(one.num_tokens for one in later)
        turns += [(Source.TOOL, placeholders, 0), (Source.MODEL, (9,), 4)]
    whole = replace(sequence(PROMPT.token_ids, *turns), media=(CAT, *later))
    given = {
        "id": EpisodeId(seed=3, split="train", rollout=3, attempt=0, prompt_id=0, sibling=sibling),
        "sequences": (whole,),
        "outcome": Outcome.SCORED,
        "text": "",
        "sampling": SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=(1,)),
    }
    return Episode(**{**given, **fields})


def test_groups_are_as_they_were() -> None:
    """Also where an episode has no sequence, but its prompt has images, and where one has several."""
    late = sequence((7, IMAGE, IMAGE), (Source.MODEL, (4,), 4))
    several = episode(1, DRAWN)
    several = replace(several, sequences=(*several.sequences, replace(late, media=(DRAWN,))))
    lost = episode(0, sequences=(), outcome=Outcome.INFRASTRUCTURE, failure="a server ended")
    episodes = (lost, several, episode(2))
    given = [
        ScoredGroup(
            group=Group(prompt=PROMPT, episodes=episodes, planned=3), scores=(Score(total=1.0, parts=()),) * 3
        )
    ]
    found = groups_of(json.loads(json.dumps(records_of(given))), ImageRows(ROWS))
    assert [group.group.prompt for group in found] == [PROMPT]
    assert found == given and to_samples(found) == to_samples(given)
    first, own, later, _ = to_samples(found)
    assert first.media == (CAT,) and first.tokens.prompt_digest == PROMPT.digest
    assert own.media == (CAT, DRAWN) and later.media == (DRAWN,)
    assert {one.source.place.image().data for one in own.media} == {CONTENT}
