"""Rows with images go to another rank: the images of their prompts are known there, others are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from covey.data.images import PlacedImage, RowImage
from covey.data.vision import ImageAt
from covey.errors import GuardStop
from covey.media.sizes import ImageLimits
from covey.media.source import ImageSource
from covey.rollout.moving import move
from covey.rollout.moving_media import packed_media
from covey.types import Medium, TokenSequence
from covey.types.episode import summary_of
from support.rollout_shares import CountingComm, on_counting_ranks
from support.vision import IMAGE, medium, picture

LIMITS = ImageLimits(4, 2, 2, 64, 4096)
CONTENT = picture((9, 99, 200))
ROW = {"prompt": "<image>What is it?", "images": [CONTENT]}


def placed(key: str, source: ImageSource, columns: int = 2) -> Medium:
    return replace(medium(key, 1, columns), source=ImageAt(PlacedImage(source), LIMITS))


CAT = replace(medium("cat", 2, 2), source=ImageAt(RowImage([ROW], 0, 0, ("",)), LIMITS))
DOG = placed("dog", ImageSource(path="/pictures/dog.png"), 3)
DRAWN = placed("drawn", ImageSource(data=CONTENT))
LINKED = placed("linked", ImageSource(url="https://example.org/a.png"))


def sequence(prompt: Sequence[Medium], later: Sequence[Medium] = ()) -> TokenSequence:
    """Return a row whose prompt has images, and a turn behind it too, with a trained token at its end."""
    before = [7, *(IMAGE for one in prompt for _ in range(one.num_tokens)), 8]
    behind = [9, *(IMAGE for one in later for _ in range(one.num_tokens)), 5]
    ids = before + behind
    return TokenSequence.behind(
        len(before),
        token_ids=ids,
        is_trained=[False] * (len(ids) - 1) + [True],
        logprobs=[-0.5],
        versions=((3, 1),),
        media=(*prompt, *later),
    )


ROWS = (
    sequence([CAT, DOG]),
    sequence([CAT, DOG], [DRAWN, LINKED, DOG]),
    sequence([]),
    sequence([DOG], [DRAWN]),
    sequence([], [DRAWN]),
)
PROMPTS = ((CAT, DOG), (CAT, DOG), (), (CAT, DOG), ())
OWNER, RANK_OF = np.array([0, 0, 0, 1, 1]), np.array([1, 1, 1, 0, 1])


def moved(rows: Sequence[TokenSequence] = ROWS) -> list[dict[int, TokenSequence] | GuardStop]:
    """Return what each of two ranks has behind the move, of which these rows are held by their owners."""

    def work(comm: CountingComm) -> dict[int, TokenSequence]:
        held = {n: rows[n] for n in np.flatnonzero(comm.rank == OWNER).tolist()}
        return move(held, [summary_of(row) for row in ROWS], OWNER, RANK_OF, comm, PROMPTS)

    return on_counting_ranks(2, work)[0]


def test_a_row_has_its_images_where_it_goes() -> None:
    first, second = moved()
    assert first == {3: ROWS[3]} and second == {number: ROWS[number] for number in (0, 1, 2, 4)}
    assert isinstance(first, dict) and isinstance(second, dict)
    # The prompt's own are those that the rank knows, wherever they lie; the bytes of others came along.
    assert second[0].media == (CAT, DOG) and second[0].media[0].source is CAT.source
    sources = [one.source.place.image() for one in second[1].media]
    assert sources[2:] == [
        ImageSource(data=CONTENT),
        ImageSource(url="https://example.org/a.png"),
        ImageSource(path="/pictures/dog.png"),
    ]
    assert {one.source.limits for one in (*second[1].media, *first[3].media)} == {LIMITS}
    assert sources[0].data == CONTENT and first[3].media[1].source.place.image().data == CONTENT


def test_only_what_is_not_known_is_sent() -> None:
    media = {number: row.media for number, row in enumerate(ROWS)}
    assert packed_media({0: media[0], 2: media[2]}, PROMPTS) == (b"", b"")
    words, files = packed_media({1: media[1], 3: media[3]}, PROMPTS)
    assert files == CONTENT * 2 and b"cat" not in words


def test_a_row_of_images_that_no_rank_can_read_again_is_as_it_was() -> None:
    """Images of tests have no source."""
    bare = sequence([medium("cat", 2, 2)], [medium("late", 1, 2)])
    words, files = packed_media({0: bare.media}, [()])
    assert files == b"" and b"late" in words


OTHERS = {
    "in its prompt": sequence([CAT, replace(DOG, key="wolf")]),
    "behind it": sequence([CAT, DOG], [replace(DRAWN, key="painted"), LINKED, DOG]),
}


@pytest.mark.parametrize(("where", "number"), [("in its prompt", 0), ("behind it", 1)])
def test_other_images_are_named(where: str, number: int) -> None:
    stops = moved([OTHERS[where] if n == number else row for n, row in enumerate(ROWS)])
    assert [stop.finding.code for stop in stops if isinstance(stop, GuardStop)] == ["F110"] * 2
    assert isinstance(stops[0], GuardStop)
    words = f"rank 0 reported row {number} of the rollout and sent something else for it"
    assert words in str(stops[0].finding.seen)


def test_images_that_the_tokens_have_no_place_for_are_named() -> None:
    stops = moved([replace(ROWS[0], media=(CAT, DOG, LINKED)), *ROWS[1:]])
    assert [stop.finding.code for stop in stops if isinstance(stop, GuardStop)] == ["F110"] * 2


def test_equal_tokens_of_other_images_are_another_completion() -> None:
    one, other = sequence([CAT], [DRAWN]), sequence([CAT], [replace(DRAWN, key="painted")])
    assert one.digest != other.digest and one.prompt_digest == other.prompt_digest
    assert sequence([CAT]).digest == sequence([DOG]).digest
    assert sequence([CAT]).prompt_digest != sequence([replace(CAT, key="lion")]).prompt_digest
