"""Patches of images, made when they are needed and kept within a number of bytes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from covey.media.decode import load_image, read_bytes
from covey.media.errors import MediaError
from covey.media.processor import ImageProcessor
from covey.media.sizes import Grid, ImageLimits, grid_of
from covey.media.source import ImageSource
from covey.texts import tr

Patches = tuple[np.ndarray, Grid]

_WORKERS = 4


def key_of(source: ImageSource, limits: ImageLimits, *, may_fetch: bool = False) -> str:
    """Return 16 hexadecimal digits of BLAKE2b over the bytes of an image's file and the limits.

    Equal keys are equal pixels at equal sizes. Raises MediaError if the bytes cannot be read.
    """
    return key_of_bytes(read_bytes(source, may_fetch=may_fetch), limits)


def key_of_bytes(content: bytes, limits: ImageLimits) -> str:
    """Return the same of the bytes of an image's file."""
    digest = blake2b(limits.words.encode() + b"\n", digest_size=8)
    digest.update(content)
    return digest.hexdigest()


def content_of(source: ImageSource, key: str, limits: ImageLimits, *, may_fetch: bool = False) -> bytes:
    """Return the bytes of an image's file. Raises MediaError if they cannot be read, or are others than those
    of which `key_of` gave this key."""
    content = read_bytes(source, may_fetch=may_fetch)
    if key_of_bytes(content, limits) != key:
        raise MediaError(tr("{source} has changed since it was first read", source=source.words))
    return content


@dataclass(slots=True)
class _Held:
    """Patches that are kept, and whether they were asked for since they were prefetched."""

    made: Patches
    is_taken: bool


class MediaStore:
    """Holds patches of images, those used last first, in `max_bytes` at most; larger ones are made anew each
    time. Several threads may use it; those that ask for the same image wait for one decoding.

    With `may_fetch` images at URLs are fetched. `workers` threads decode what is prefetched; `close` ends
    them.
    """

    def __init__(
        self, processor: ImageProcessor, max_bytes: int, *, workers: int = _WORKERS, may_fetch: bool = False
    ) -> None:
        self._processor, self._max_bytes, self._may_fetch = processor, max_bytes, may_fetch
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._held_bytes = 0
        self._in_progress: dict[str, Future[Patches]] = {}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="media")

    @property
    def held_bytes(self) -> int:
        """Bytes of the patches that are kept."""
        return self._held_bytes

    def patches(self, source: ImageSource, key: str | None = None) -> Patches:
        """Return the patches of an image and their grid, as `ImageProcessor.patches` does.

        With `key`, which `key_of` gave for this source, patches that are kept are returned without reading
        the file again. The array is shared with later calls: it must not be changed. Raises MediaError for an
        image that cannot be used, with the words of its source, or that is another one than `key` is of.
        """
        return self._patches(source, key, is_taken=True)

    def prefetch(self, sources: Iterable[ImageSource], keys: Iterable[str] | None = None) -> None:
        """Have the patches of images made by other threads, in this order, and return at once.

        Patches that were prefetched and not asked for are made up to `max_bytes`; the others are left for
        `patches`, as are errors. `keys` are those of the sources, where they are known.
        """
        pairs = ((source, None) for source in sources) if keys is None else zip(sources, keys, strict=True)
        for source, key in pairs:
            self._pool.submit(self._prefetch, source, key)

    def close(self) -> None:
        """End the threads, after the images that they are decoding."""
        self._pool.shutdown(cancel_futures=True)

    def _prefetch(self, source: ImageSource, key: str | None) -> None:
        with self._lock:
            waiting = sum(held.made[0].nbytes for held in self._held.values() if not held.is_taken)
        if waiting < self._max_bytes:
            try:
                self._patches(source, key, is_taken=False)
            except MediaError:
                # Whoever asks for the patches is told.
                return

    def _patches(self, source: ImageSource, key: str | None, *, is_taken: bool) -> Patches:
        content = None
        if key is None:
            content = read_bytes(source, may_fetch=self._may_fetch)
            key = key_of_bytes(content, self._processor.limits)
        own: Future[Patches] = Future()
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                held.is_taken |= is_taken
                return held.made
            first = self._in_progress.setdefault(key, own)
        if first is not own:
            return self._made_by_other(key, first, is_taken)
        try:
            made = self._made(source, key, content)
        except BaseException as error:
            with self._lock:
                del self._in_progress[key]
            own.set_exception(error)
            raise
        with self._lock:
            del self._in_progress[key]
            self._keep(key, _Held(made, is_taken))
        own.set_result(made)
        return made

    def _made_by_other(self, key: str, other: Future[Patches], is_taken: bool) -> Patches:
        """Return what another thread makes."""
        made = other.result()
        with self._lock:
            if key in self._held:
                self._held[key].is_taken |= is_taken
        return made

    def _made(self, source: ImageSource, key: str, content: bytes | None) -> Patches:
        if content is None:
            content = content_of(source, key, self._processor.limits, may_fetch=self._may_fetch)
        image = load_image(source, content=content)
        try:
            return self._processor.patches(image)
        except MediaError as error:
            raise _of_source(source, error) from error

    def _keep(self, key: str, held: _Held) -> None:
        """Keep patches and drop those that were used longest ago, for which the lock is held."""
        if held.made[0].nbytes <= self._max_bytes:
            self._held[key] = held
            self._held_bytes += held.made[0].nbytes
            while self._held_bytes > self._max_bytes:
                _, dropped = self._held.popitem(last=False)
                self._held_bytes -= dropped.made[0].nbytes


def verify(
    sources: Iterable[ImageSource],
    budget_s: float,
    *,
    limits: ImageLimits | None = None,
    may_fetch: bool = False,
    workers: int = _WORKERS,
) -> list[tuple[int, str]]:
    """Decode images, in this order, for `budget_s` seconds at most, and return what cannot be used: the index
    of its source, and why. An image that is begun in time is finished. With `limits`, a size that they refuse
    counts, too.

    `verify(sources, 10.0)` is `[(3, "/data/cats/4.png is empty: the file has 0 bytes")]`.
    """
    end, lock = time.monotonic() + budget_s, threading.Lock()
    remaining = enumerate(sources)
    failures: list[tuple[int, str]] = []

    def work() -> None:
        while time.monotonic() < end:
            with lock:
                index, source = next(remaining, (-1, None))
            if source is None:
                return
            try:
                _check(source, limits, may_fetch)
            except MediaError as error:
                failures.append((index, str(error)))

    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        for done in [pool.submit(work) for _ in range(workers)]:
            done.result()
    return sorted(failures)


def _check(source: ImageSource, limits: ImageLimits | None, may_fetch: bool) -> None:
    size = load_image(source, may_fetch=may_fetch).size
    if limits is not None:
        try:
            grid_of(*size, limits)
        except MediaError as error:
            raise _of_source(source, error) from error


def _of_source(source: ImageSource, error: MediaError) -> MediaError:
    """Return an error about a size with the words of the image before it."""
    return MediaError(tr("{source}: {words}", source=source.words, words=str(error)))
