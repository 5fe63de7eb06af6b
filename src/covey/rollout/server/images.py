"""The images of requests on a rollout server: files that were sent, and the requests that name them.

What a request says of an image is held to its file, so that an engine is given nothing that it would fail on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from covey.data.images import PlacedImage
from covey.data.vision import ImageAt
from covey.media.decode import load_image
from covey.media.errors import MediaError
from covey.media.sizes import Grid, ImageLimits, grid_of
from covey.media.source import ImageSource
from covey.media.store import key_of_bytes
from covey.rollout.server.media_wire import HELD_BYTES
from covey.rollout.server.values import WireError
from covey.types import GenerationRequest, Medium


class ImagesMissing(Exception):
    """Raised for requests whose images, by their `keys`, are not here."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        super().__init__("images of these requests are not here: send them again")


@dataclass(frozen=True, slots=True)
class _Held:
    """The file of an image, the limits of its key, and its grid within them."""

    source: ImageSource
    num_bytes: int
    limits: ImageLimits
    grid: Grid


class HeldImages:
    """Holds files of images by their keys, those used last, in `max_bytes` at most; requests that have not
    ended hold theirs beside that. Any thread may call it.

    `token_id` stands for images in prompts of the model, and `limits` are those that its files write: a run
    may have other sizes of images, but no other patches. `max_tokens` is the most that an image may have.
    """

    def __init__(
        self,
        token_id: int,
        limits: ImageLimits,
        max_bytes: int = HELD_BYTES,
        *,
        max_tokens: int | None = None,
    ) -> None:
        self._token_id, self._limits = token_id, limits
        self._max_bytes, self._max_tokens = max_bytes, max_tokens
        self._lock, self._decoding = threading.Lock(), threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the files that are held."""
        return self._held_bytes

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return which images are not here; the others are those used last from now on."""
        with self._lock:
            return [key for key in keys if self._use(key) is None]

    def keep(self, key: str, limits: ImageLimits, content: bytes) -> None:
        """Keep the file of an image. WireError where it has another key, cannot be decoded, or has a size or
        patches that the model does not take."""
        if key_of_bytes(content, limits) != key:
            raise WireError(f"the {len(content)} bytes that were sent are not those of the image {key}")
        own = self._limits
        if replace(limits, min_pixels=own.min_pixels, max_pixels=own.max_pixels) != own:
            raise WireError(f"an image has the limits {limits.words}; this server's model has {own.words}")
        if len(content) > self._max_bytes:
            raise WireError(f"an image of {len(content)} bytes; this server holds {self._max_bytes} of all")
        source = ImageSource(data=content)
        try:
            # Of several that arrive together one at a time is in memory as pixels.
            with self._decoding:
                size = load_image(source).size
            held = _Held(source, len(content), limits, grid_of(*size, limits))
        except MediaError as error:
            raise WireError(f"the image {key} cannot be used: {error}") from error
        found = limits.num_tokens(held.grid)
        if self._max_tokens is not None and found > self._max_tokens:
            raise WireError(
                f"an image has {found} tokens; the engine of this server takes {self._max_tokens}"
            )
        with self._lock:
            if self._use(key) is None:
                self._add(key, held)

    def _add(self, key: str, held: _Held) -> None:
        self._held[key] = held
        self._held_bytes += held.num_bytes
        while self._held_bytes > self._max_bytes:
            _, dropped = self._held.popitem(last=False)
            self._held_bytes -= dropped.num_bytes

    def _use(self, key: str) -> _Held | None:
        """Return a file, which is the one used last from now on; None where it is not here."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def clear(self) -> None:
        """Hold nothing: another run has other images."""
        with self._lock:
            self._held.clear()
            self._held_bytes = 0

    def with_files(self, requests: Mapping[str, GenerationRequest]) -> dict[str, GenerationRequest]:
        """Return requests with the files of the images that they name. Raises ImagesMissing, and WireError
        where an image is another one than its request says, or has not its placeholders in the prompt."""
        named = {medium.key for request in requests.values() for medium in request.media}
        with self._lock:
            held = {key: self._use(key) for key in named}
        if missing := [key for key, one in held.items() if one is None]:
            raise ImagesMissing(missing)
        here = {key: one for key, one in held.items() if one is not None}
        return {rid: self._with_files(request, here) for rid, request in requests.items()}

    def _with_files(self, request: GenerationRequest, held: Mapping[str, _Held]) -> GenerationRequest:
        media = tuple(self._with_file(medium, held[medium.key]) for medium in request.media)
        found, begin = request.prompt_token_ids.count(self._token_id), 0
        if found != (planned := sum(medium.num_tokens for medium in media)):
            raise WireError(f"a prompt has {found} placeholders for images of {planned} tokens")
        for medium in media:
            for run in medium.source.limits.runs(medium.grid):
                begin = request.prompt_token_ids.index(self._token_id, begin)
                end = begin + run
                if set(request.prompt_token_ids[begin:end]) != {self._token_id}:
                    raise WireError(f"the placeholders of the image {medium.key} are not side by side")
                begin = end
        return replace(request, media=media) if media else request

    def _with_file(self, medium: Medium, held: _Held) -> Medium:
        own = Medium(
            key=medium.key,
            token_id=self._token_id,
            num_tokens=held.limits.num_tokens(held.grid),
            grid=held.grid,
            extent=held.limits.extent(held.grid),
            source=ImageAt(PlacedImage(held.source), held.limits),
        )
        if medium != own or medium.source.limits != held.limits:
            said = _words(medium)
            raise WireError(f"the image {medium.key} is {_words(own)} here, but {said} in its request")
        return own


def _words(medium: Medium) -> str:
    words = f"{medium.num_tokens} tokens {medium.token_id} in a grid of {medium.grid} and {medium.extent}"
    return f"{words} within {medium.source.limits.words}"
