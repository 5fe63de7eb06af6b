"""Facts about the recorded rollouts that a run trains on in place of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from covey.checks.data.look import image_rows
from covey.checks.data.sources import Live
from covey.data.image_records import NO_ROWS, ImageRows, media_of
from covey.data.text import TextCodec
from covey.errors import CoveyError
from covey.media.errors import MediaError
from covey.media.store import key_of
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.telemetry.rollouts import list_rollouts, read_rollouts
from covey.texts import joined, tr
from covey.types import Medium


@dataclass(slots=True)
class _Images:
    """What recorded rollouts say of images: how many episodes have some, a path where none is, with its
    rollout, and the record of the first one that lies in the data."""

    num_episodes: int = 0
    missing: tuple[int, str] | None = None
    of_data: Mapping[str, Any] | None = None

    def see(self, rollout: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Look through the records of a rollout."""
        for record in records:
            found = list(_media_of(record))
            self.num_episodes += any(one["num_tokens"] for one in found)
            for one in found:
                path = one.get("path")
                if path is not None and self.missing is None and not exists(path):
                    self.missing = rollout, path
                if "row" in one and self.of_data is None:
                    self.of_data = one


def with_replay(
    facts: Facts,
    config: Config,
    num_processes: int,
    codec: TextCodec | None,
    live: Live | None,
    *,
    offline: bool,
) -> tuple[Facts, ImageRows]:
    """The facts with why the recorded rollouts cannot be replayed, and the rows in which their images lie."""
    images, rows = _Images(), NO_ROWS
    problem = _problem(config, num_processes, images)
    if problem is None and images.num_episodes and codec is not None and codec.vision is None:
        problem = tr(
            "{named}: {num} episodes have images, but the model sees none",
            named=str(config.replay_rollouts),
            num=images.num_episodes,
        )
    if problem is None and images.missing is not None:
        rollout, path = images.missing
        problem = tr("rollout {number} has the image {path}, which does not exist", number=rollout, path=path)
    if problem is None and images.of_data is not None:
        facts, rows = image_rows(facts, config, offline=offline, live=live)
        problem = None if rows is NO_ROWS else _changed(images.of_data, rows)
    return replace(facts, output=replace(facts.output, replay_problem=problem)), rows


def _problem(config: Config, num_processes: int, images: _Images) -> str | None:
    """Return why the recorded rollouts cannot be replayed under a configuration, or None; `images` sees them
    all."""
    named = str(config.replay_rollouts)
    directory = Path(named)
    if not isdir(directory):
        return tr("{directory} is not a directory", directory=named)
    if not list_rollouts(directory):
        return tr("{named} holds no rollout-*.jsonl or rollout-*.jsonl.gz file", named=named)
    wanted = num_processes * config.per_device_train_batch_size * config.steps_per_generation
    sizes = {}
    try:
        for number, records in read_rollouts(directory, with_sets=True):
            sizes[number] = len(records)
            images.see(number, records)
    except CoveyError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return tr("{path} cannot be read: {error}", path=named, error=error)
    wrong = [
        tr("rollout {number} has {size}", number=number, size=size)
        for number, size in sizes.items()
        if size != wanted
    ]
    if wrong:
        return tr(
            "{named}: a rollout of this configuration has {wanted} completions, but {wrong}",
            named=named,
            wanted=wanted,
            wrong=joined(", ", wrong[:3]),
        )
    return None


def _media_of(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of all images of an episode."""
    for own in (record, *record.get("sequences", ())):
        yield from own.get("media", ())


def _changed(record: Mapping[str, Any], rows: ImageRows) -> str | None:
    """Return why an image of the data is not the one of a record, or None."""
    medium: Medium
    (medium,) = media_of([record], rows)
    words = tr("row {number} of the data", number=record["row"][0] + 1)
    try:
        is_same = key_of(medium.source.place.image(), medium.source.limits) == medium.key
    except MediaError as error:
        return tr("the images of its rollouts lie in the data: {error}", error=str(error))
    if is_same:
        return None
    return tr("its rollouts have another image than {row}: name the data that they are from", row=words)
