"""Patches are made once while they fit, the same for every thread, and what fails is said to whoever asks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from covey.media.decode import load_image
from covey.media.errors import MediaError
from covey.media.sizes import Grid, ImageLimits, grid_of
from covey.media.source import ImageSource
from covey.media.store import MediaStore, key_of, verify
from unit.media.conftest import noise

LIMITS = ImageLimits(14, 2, 2, 3136, 12845056)
# 4 patches of 1176 numbers for the images of these tests.
ONE = 4 * 4 * 1176 * 4


class Plain:
    """In place of transformers' processor: patches that hold the first pixel, and a count of calls."""

    def __init__(self) -> None:
        self.limits, self.calls = LIMITS, Counter[int]()
        self.gate: threading.Event | None = None

    def patches(self, image: Image.Image) -> tuple[np.ndarray, Grid]:
        pixel = int(np.asarray(image)[0, 0, 0])
        self.calls[pixel] += 1
        if self.gate is not None:
            assert self.gate.wait(20)
        grid = grid_of(*image.size, self.limits)
        return np.full((int(np.prod(grid)), 1176), pixel, dtype=np.float32), grid


@pytest.fixture
def processor() -> Plain:
    return Plain()


@pytest.fixture
def store_of(processor: Plain) -> Iterator[Callable[..., MediaStore]]:
    stores: list[MediaStore] = []

    def build(max_bytes: int = 10 * ONE, **options: int) -> MediaStore:
        stores.append(MediaStore(processor, max_bytes, **options))
        return stores[-1]

    yield build
    for store in stores:
        store.close()


def of_colour(directory: Path, red: int) -> ImageSource:
    path = directory / f"{red}.png"
    Image.new("RGB", (56, 56), (red, 0, 0)).save(path)
    return ImageSource(path=str(path))


def until(is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_patches_are_made_once(tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]) -> None:
    store, source = store_of(), of_colour(tmp_path, 5)
    values, grid = store.patches(source)
    assert np.all(values == 5) and grid == (1, 4, 4)
    assert store.patches(source)[0] is values
    # The same content at another place.
    assert store.patches(ImageSource(data=Path(str(source.path)).read_bytes()))[0] is values
    assert processor.calls == {5: 1} and store.held_bytes == values.nbytes == ONE


def test_what_was_used_longest_ago_is_dropped(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store = store_of(2 * ONE)
    first, second, third = (of_colour(tmp_path, red) for red in (1, 2, 3))
    for source in (first, second, first, third):
        store.patches(source)
    assert store.held_bytes == 2 * ONE
    store.patches(first)
    assert processor.calls == {1: 1, 2: 1, 3: 1}
    store.patches(second)
    assert processor.calls == {1: 1, 2: 2, 3: 1} and store.held_bytes == 2 * ONE


def test_an_image_larger_than_the_store_is_made_each_time(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store, source = store_of(ONE - 1), of_colour(tmp_path, 1)
    for _ in range(2):
        assert np.all(store.patches(source)[0] == 1)
    assert processor.calls == {1: 2} and store.held_bytes == 0


def test_threads_that_ask_for_one_image_wait_for_one_decoding(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store, source = store_of(), of_colour(tmp_path, 1)
    processor.gate = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(store.patches, source) for _ in range(8)]
        until(lambda: processor.calls[1] == 1)
        processor.gate.set()
        arrays = {id(one.result(20)[0]) for one in asked}
    assert len(arrays) == 1 and processor.calls == {1: 1}


def test_many_threads_get_what_they_ask_for(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store = store_of(3 * ONE)
    sources = [of_colour(tmp_path, red) for red in range(8)]

    def ask(number: int) -> bool:
        red = number * 5 % 8
        return bool(np.all(store.patches(sources[red])[0] == red))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(200)))
    assert store.held_bytes <= 3 * ONE


def test_images_are_prefetched_as_far_as_they_fit(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store = store_of(3 * ONE, workers=1)
    sources = [of_colour(tmp_path, red) for red in range(6)]
    store.prefetch(sources)
    until(lambda: store.held_bytes == 3 * ONE)
    store.prefetch([])
    for red, source in enumerate(sources):
        assert np.all(store.patches(source)[0] == red)
    # The first three were there, and the others were made when they were asked for.
    assert processor.calls == dict.fromkeys(range(6), 1)


def test_prefetched_images_make_room_when_they_were_taken(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store = store_of(2 * ONE, workers=1)
    sources = [of_colour(tmp_path, red) for red in range(4)]
    store.prefetch(sources[:2])
    until(lambda: store.held_bytes == 2 * ONE)
    for source in sources[:2]:
        store.patches(source)
    store.prefetch(sources[2:])
    until(lambda: processor.calls[3] == 1)
    assert processor.calls == dict.fromkeys(range(4), 1)


def test_what_fails_while_it_is_prefetched_is_said_when_it_is_asked_for(
    tmp_path: Path, store_of: Callable[..., MediaStore]
) -> None:
    store = store_of()
    missing, there = ImageSource(path=str(tmp_path / "missing.png")), of_colour(tmp_path, 1)
    store.prefetch([missing, there])
    until(lambda: store.held_bytes == ONE)
    for _ in range(2):
        with pytest.raises(MediaError, match=r"missing\.png does not exist"):
            store.patches(missing)


def test_an_error_names_the_source(tmp_path: Path, store_of: Callable[..., MediaStore]) -> None:
    Image.new("RGB", (500, 1)).save(tmp_path / "long.png")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    for name, words in (
        ("long.png", ": an image of 500 x 1 pixels is too long"),
        ("cut.png", " is PNG of"),
    ):
        with pytest.raises(MediaError) as caught:
            store_of().patches(ImageSource(path=str(tmp_path / name)))
        assert str(caught.value).startswith(f"{tmp_path / name}{words}")


def test_with_its_key_an_image_is_not_read_again(
    tmp_path: Path, processor: Plain, store_of: Callable[..., MediaStore]
) -> None:
    store, source = store_of(ONE), of_colour(tmp_path, 1)
    key = key_of(source, LIMITS)
    store.patches(source, key)
    Path(str(source.path)).unlink()
    assert np.all(store.patches(source, key)[0] == 1)
    assert processor.calls == {1: 1}


def test_an_image_that_has_changed_is_said(tmp_path: Path, store_of: Callable[..., MediaStore]) -> None:
    source = of_colour(tmp_path, 1)
    key = key_of(source, LIMITS)
    Image.new("RGB", (56, 56), (2, 0, 0)).save(tmp_path / "1.png")
    with pytest.raises(MediaError, match=r"1\.png has changed since it was first read"):
        store_of().patches(source, key)
    assert key_of(source, LIMITS) != key


def test_keys_are_of_content_and_limits(tmp_path: Path) -> None:
    source = of_colour(tmp_path, 1)
    content = Path(str(source.path)).read_bytes()
    key = key_of(source, LIMITS)
    assert len(key) == 16 and int(key, 16) >= 0
    assert key_of(ImageSource(data=content), LIMITS) == key
    others = [
        key_of(ImageSource(data=content + b"\0"), LIMITS),
        key_of(source, ImageLimits(14, 2, 2, 3136, 1003520)),
        key_of(source, ImageLimits(14, 2, 2, 6272, 12845056)),
        key_of(of_colour(tmp_path, 2), LIMITS),
    ]
    assert len({key, *others}) == 5


def test_a_key_stays_the_same_between_versions() -> None:
    """blake2b of b"14 2 2 3136 12845056\\n" and b"abc", 8 bytes, as Python's hashlib gives it."""
    assert key_of(ImageSource(data=b"abc"), LIMITS) == "6c1ff9949d358e29"


def test_verifying_names_each_image_that_cannot_be_used(tmp_path: Path) -> None:
    good = [of_colour(tmp_path, red) for red in range(3)]
    noise(60, 60).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    Image.new("RGB", (500, 1)).save(tmp_path / "long.png")
    names = ("cut.jpg", "long.png", "missing.png")
    cut, long, missing = (ImageSource(path=str(tmp_path / name)) for name in names)
    sources = [good[0], cut, good[1], long, missing, good[2]]
    found = verify(sources, 20.0, limits=LIMITS)
    assert [index for index, _ in found] == [1, 3, 4]
    assert "truncated" in found[0][1] and "too long" in found[1][1] and "does not exist" in found[2][1]
    assert all(name in words for name, (_, words) in zip(names, found, strict=True))
    assert [index for index, _ in verify(sources, 20.0)] == [1, 4]
    assert verify(good, 20.0) == []


def test_verifying_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ImageSource] = []

    def slow(source: ImageSource, **options: bool) -> Image.Image:
        seen.append(source)
        time.sleep(0.05)
        return load_image(source, **options)

    monkeypatch.setattr("covey.media.store.load_image", slow)
    sources = [of_colour(tmp_path, 1)] * 1000
    began = time.monotonic()
    assert verify(sources, 0.3, workers=2) == []
    assert 1 <= len(seen) < 100 and time.monotonic() - began < 10
    assert verify(sources, 0.0) == []
