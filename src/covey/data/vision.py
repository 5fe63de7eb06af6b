"""How a model's prompts hold images: the token that stands for one, and how many of them each has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from covey.data.errors import ModelError, TemplateError
from covey.data.messages import Message
from covey.data.model_files import read_json
from covey.data.template_trial import TemplateTrial
from covey.media.decode import image_size, load_image
from covey.media.errors import LimitError, MediaError
from covey.media.families import FAMILIES, image_token_id
from covey.media.sizes import ImageLimits, grid_of, kind_of, limits_of
from covey.media.source import ImageSource
from covey.media.store import key_of
from covey.media.tiles import written_tiles
from covey.text_files import placeholder_ids
from covey.texts import tr
from covey.types import Medium

_WORKERS = 4
# For so long images are decoded at the start; later ones show that they cannot be as they are sampled.
_DECODED_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """The options of a run for images: `max_pixels` and `max_tokens` limit one image (None: the limits of the
    model), and a flag allows images to be fetched from the web."""

    max_pixels: int | None = None
    max_tokens: int | None = None
    may_fetch: bool = False


AS_THEY_ARE = ImageOptions()
"""Images as the files of the model say."""


class HasImage(Protocol):
    """Where an image is, in the data or on the disk."""

    def image(self) -> ImageSource:
        """Return it, read again where it lies in the data."""


@dataclass(frozen=True, slots=True)
class ImageAt:
    """An image and the sizes that its model takes images in."""

    place: HasImage
    limits: ImageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The images of a model's prompts: rendered texts hold `token`, of id `token_id`, for one. No text may
    hold a token of `refused`.

    The template writes `opening` for an image, where that is not empty, which `framed` replaces by `frame`.
    `encode` is there where tokens between the squares of an image say which one follows. `takes_blocks`: the
    template loses a text that is no list of blocks.
    """

    token: str
    token_id: int
    refused: tuple[str, ...]
    limits: ImageLimits
    may_fetch: bool = False
    opening: str = ""
    frame: str = ""
    encode: Callable[[str], tuple[int, ...]] | None = field(default=None, compare=False, repr=False)
    takes_blocks: bool = False

    def tried(self, trial: TemplateTrial, render: Callable[[list[Message]], str]) -> VisionSpec:
        """Return the same for the template that `render` renders, once that has passed its trial."""
        trial.try_forms()
        found = self._fitted(render)
        trial.start(found.given)
        return found

    def _fitted(self, render: Callable[[list[Message]], str]) -> VisionSpec:
        said = "covey asks"
        try:
            if said in render([{"role": "user", "content": said}]):
                return self
            blocks = [{"type": "text", "text": said}]
            return replace(self, takes_blocks=said in render([{"role": "user", "content": blocks}]))
        except TemplateError:
            return self

    def given(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template takes them."""
        if not self.takes_blocks:
            return [*messages]
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]}
            if isinstance(m.get("content"), str)
            else m
            for m in messages
        ]

    def framed(self, text: str) -> str:
        """Return a rendered text with `token` for each image."""
        return text.replace(self.opening, self.frame) if self.opening else text

    def medium(self, place: HasImage, *, is_decoded: bool = False) -> Medium:
        """Return an image as prompts hold it. Raises MediaError for one that cannot be used; of its pixels
        that is known only where they are decoded."""
        source = place.image()
        if is_decoded:
            load_image(source, may_fetch=self.may_fetch)
        size = image_size(source, may_fetch=self.may_fetch)
        try:
            grid = grid_of(*size, self.limits)
        except MediaError as error:
            raise MediaError(tr("{source}: {error}", source=source.words, error=str(error))) from error
        return Medium(
            key=key_of(source, self.limits, may_fetch=self.may_fetch),
            token_id=self.token_id,
            num_tokens=self.limits.num_tokens(grid),
            grid=grid,
            extent=self.limits.extent(grid),
            source=ImageAt(place, self.limits),
        )

    def expanded(self, token_ids: Sequence[int], media: Sequence[Medium]) -> tuple[int, ...]:
        """Return the tokens of a text with those of each image in the place of its one. AssertionError where
        there are not as many as images."""
        waiting = iter(media)
        found: list[int] = []
        for token_id in token_ids:
            found += self._tokens(next(waiting)) if token_id == self.token_id else [token_id]
        assert next(waiting, None) is None, "each image has a place in the text"
        return tuple(found)

    def _tokens(self, medium: Medium) -> Sequence[int]:
        if self.encode is None:
            return [self.token_id] * medium.num_tokens
        patches = self.limits.tile // self.limits.patch
        _, down, across = medium.grid
        tokens = self.limits.runs(medium.grid)[0]
        return self.encode(written_tiles(down // patches, across // patches, tokens))


class RowMedia:
    """Makes the images of rows, by threads; those of the first seconds are decoded, to see that they can
    be."""

    def __init__(self, spec: VisionSpec) -> None:
        self._spec = spec
        self._decodes_until = time.monotonic() + _DECODED_S

    def media(self, places: Sequence[Sequence[HasImage]]) -> Iterator[tuple[Medium, ...] | MediaError]:
        """Return the images of each row, or why one of them cannot be used."""
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="images") as pool:
            yield from pool.map(self._of_row, places)

    def _of_row(self, places: Sequence[HasImage]) -> tuple[Medium, ...] | MediaError:
        is_decoded = time.monotonic() < self._decodes_until
        try:
            return tuple(self._spec.medium(place, is_decoded=is_decoded) for place in places)
        except MediaError as error:
            return error


def vision_spec(
    model_dir: Path,
    tokenizer: Tokenizer,
    options: ImageOptions = AS_THEY_ARE,
) -> VisionSpec | None:
    """Return how prompts of the model of a directory hold images; None where it sees none. Raises ModelError
    where its files say too little."""
    try:
        return _vision_spec(model_dir, tokenizer, options)
    except MediaError as error:
        kind = "image_limits" if isinstance(error, LimitError) else ""
        raise ModelError(str(error), kind=kind) from error


def _vision_spec(model_dir: Path, tokenizer: Tokenizer, options: ImageOptions) -> VisionSpec | None:
    config: dict[str, Any] = read_json(model_dir / "config.json")
    if config.get("model_type") not in FAMILIES:
        return None
    token_id = image_token_id(config)
    words = [tokenizer.id_to_token(number) for number in placeholder_ids(config)]
    token = tokenizer.id_to_token(token_id)
    if token is None:
        raise MediaError(
            tr(
                "{directory}: config.json says that token {token_id} stands for an image, but the tokenizer "
                "has no such token",
                directory=model_dir,
                token_id=token_id,
            )
        )
    kind, opening, frame = kind_of(model_dir), "", ""
    if kind == "gemma":
        opening, closing = (
            tokenizer.id_to_token(config[f"{end}_token_index"]) or "" for end in ("boi", "eoi")
        )
        frame = f"\n\n{opening}{token}{closing}\n\n"

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return VisionSpec(
        opening=opening,
        frame=frame,
        encode=encode if kind == "smolvlm" else None,
        token=token,
        token_id=token_id,
        refused=tuple(word for word in words if word),
        limits=limits_of(model_dir, max_pixels=options.max_pixels, max_tokens=options.max_tokens),
        may_fetch=options.may_fetch,
    )
