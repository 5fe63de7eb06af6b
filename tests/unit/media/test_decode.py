"""Odd images become the pixels that a person sees, and bad ones one sentence that says what is wrong."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from covey.media.decode import image_size, load_image, read_bytes
from covey.media.errors import MediaError
from covey.media.source import ImageSource


def in_file(path: Path) -> ImageSource:
    return ImageSource(path=str(path))


def pixels(path: Path) -> np.ndarray:
    """The pixels of an image whose size its header tells."""
    source = in_file(path)
    image = load_image(source)
    assert image.mode == "RGB" and image.size == image_size(source)
    same = load_image(ImageSource(data=path.read_bytes()))
    assert np.array_equal(np.asarray(image), np.asarray(same))
    return np.asarray(image)


def quarters() -> Image.Image:
    """40 wide and 20 high: red, green over blue, black."""
    values = np.zeros((20, 40, 3), dtype=np.uint8)
    values[:10, :20, 0] = values[:10, 20:, 1] = values[10:, :20, 2] = 255
    return Image.fromarray(values)


# Where the quarters of a file must be seen: EXIF says where its first row and column are.
SEEN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", SEEN)
@pytest.mark.parametrize("kind", ["png", "webp", "tiff"])
def test_an_image_is_turned_as_its_exif_says(tmp_path: Path, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{kind}"
    quarters().save(path, exif=exif, **({"lossless": True} if kind == "webp" else {}))
    assert np.array_equal(pixels(path), SEEN[orientation](np.asarray(quarters())))


def test_a_photo_held_upright_is_high(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    quarters().save(tmp_path / "photo.jpg", exif=exif, quality=95, subsampling=0)
    seen = pixels(tmp_path / "photo.jpg")
    assert seen.shape == (40, 20, 3)
    # Blue was lower left, which is now upper left.
    assert seen[5, 4].argmax() == 2 and seen[5, 15].argmax() == 0


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0rubbish", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_exif_that_cannot_be_read_says_nothing(tmp_path: Path, exif: bytes) -> None:
    quarters().save(tmp_path / "1.jpg", exif=exif)
    assert pixels(tmp_path / "1.jpg").shape == (20, 40, 3)


def test_an_orientation_that_does_not_exist_says_nothing(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    quarters().save(tmp_path / "1.png", exif=exif)
    assert np.array_equal(pixels(tmp_path / "1.png"), np.asarray(quarters()))


def test_transparent_pixels_are_on_white(tmp_path: Path) -> None:
    values = np.zeros((2, 3, 4), dtype=np.uint8)
    values[:, :, 0] = 200
    values[:, :, 3] = [[0, 128, 255]] * 2
    Image.fromarray(values).save(tmp_path / "1.png")
    seen = pixels(tmp_path / "1.png")
    # 200 of 128/255 and 255 of the rest; 0 of 128/255 and 255 of the rest.
    assert seen[0].tolist() == [[255, 255, 255], [227, 127, 127], [200, 0, 0]]


def test_grey_with_alpha_is_on_white(tmp_path: Path) -> None:
    image = Image.merge("LA", [Image.new("L", (2, 2), 10), Image.new("L", (2, 2), 0)])
    image.save(tmp_path / "1.png")
    assert np.all(pixels(tmp_path / "1.png") == 255)


@pytest.mark.parametrize("kind", ["png", "gif"])
def test_a_transparent_colour_of_a_palette_is_white(tmp_path: Path, kind: str) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.save(tmp_path / f"1.{kind}", transparency=0)
    assert pixels(tmp_path / f"1.{kind}").tolist() == [[[255, 255, 255], [0, 0, 255]]]


def test_transparency_of_each_colour_of_a_palette(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.save(tmp_path / "1.png", transparency=bytes([255, 0]))
    assert pixels(tmp_path / "1.png").tolist() == [[[0, 0, 0], [255, 255, 255]]]


def test_a_colour_that_is_transparent_by_itself_is_white(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    image.save(tmp_path / "1.png", transparency=(1, 2, 3))
    assert pixels(tmp_path / "1.png").tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_grey_of_16_bits_is_scaled(tmp_path: Path) -> None:
    values = np.array([[0, 257, 1000], [32768, 65278, 65535]], dtype=np.uint16)
    for name in ("1.png", "1.tiff"):
        Image.fromarray(values).save(tmp_path / name)
        seen = pixels(tmp_path / name)
        assert seen[:, :, 0].tolist() == [[0, 1, 4], [128, 254, 255]]
        assert np.all(seen == seen[:, :, :1])


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        (np.array([[0, 128, 255]], dtype=np.int32), [0, 128, 255]),
        (np.array([[0, 25700, 65535]], dtype=np.int32), [0, 100, 255]),
        (np.array([[-1000, 0, 1000000]], dtype=np.int32), [0, 0, 255]),
        (np.array([[0.0, 0.5, 1.0]], dtype=np.float32), [0, 128, 255]),
        (np.array([[0.0, 7.0, 255.0]], dtype=np.float32), [0, 7, 255]),
        (np.array([[-1.0, 0.0, 1.0]], dtype=np.float32), [0, 128, 255]),
        (np.array([[np.nan, 1.0, np.inf]], dtype=np.float32), [0, 255, 255]),
        (np.array([[-5.0, -5.0, -5.0]], dtype=np.float32), [0, 0, 0]),
        (np.array([[np.nan] * 3], dtype=np.float32), [0, 0, 0]),
    ],
)
def test_wider_grey_is_scaled_to_the_range_that_it_stands_for(
    tmp_path: Path, values: np.ndarray, seen: list[int]
) -> None:
    Image.fromarray(values).save(tmp_path / "1.tiff")
    assert pixels(tmp_path / "1.tiff")[0, :, 0].tolist() == seen


def test_inks_become_light(tmp_path: Path) -> None:
    """No ink is white, all cyan lets no red through."""
    for ink, light in (((0, 0, 0, 0), (255, 255, 255)), ((255, 0, 0, 0), (0, 255, 255))):
        Image.new("CMYK", (16, 16), ink).save(tmp_path / "1.jpg", quality=100)
        assert np.abs(pixels(tmp_path / "1.jpg").astype(int) - light).max() <= 2


def test_one_bit_is_black_or_white(tmp_path: Path) -> None:
    image = Image.new("1", (9, 1))
    image.putpixel((8, 0), 1)
    image.save(tmp_path / "1.png")
    assert pixels(tmp_path / "1.png")[0, :, 1].tolist() == [0] * 8 + [255]


@pytest.mark.parametrize("size", [(1, 1), (20000, 1), (1, 300)])
def test_an_image_of_one_row_is_an_image(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size, (1, 2, 3)).save(tmp_path / "1.png")
    assert pixels(tmp_path / "1.png").shape == (size[1], size[0], 3)


def test_an_animation_is_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    frames[0].save(tmp_path / "1.gif", save_all=True, append_images=frames[1:], duration=50)
    assert np.all(pixels(tmp_path / "1.gif") == [255, 0, 0])


def test_a_suffix_says_nothing(tmp_path: Path) -> None:
    quarters().save(tmp_path / "1.png")
    (tmp_path / "1.png").rename(tmp_path / "1.jpg")
    assert np.array_equal(pixels(tmp_path / "1.jpg"), np.asarray(quarters()))


def test_the_bytes_of_a_source_are_those_of_its_file(picture: Path) -> None:
    content = picture.read_bytes()
    assert read_bytes(in_file(picture)) == read_bytes(ImageSource(data=content)) == content


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it is this large, and has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


BEGINNINGS = {
    "html": (
        b"\n<!DOCTYPE html><html>",
        "no image but an HTML page; it begins with '\\n<!DOCTYPE html><html>'",
    ),
    "json": (b'{"error": "not found"}', 'no image but JSON; it begins with \'{"error": "not found"}\''),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "no image but SVG"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "no image but HEIC: convert it to JPEG or PNG"),
    "video": (b"\0\0\0\x18ftypmp42\0\0\0\0", "no image but video"),
    "pdf": (b"%PDF-1.7\n", "no image but PDF"),
    "zip": (b"PK\x03\x04\x14\0", "no image but a ZIP archive"),
    "text": (b"hello there", "no image of a format that covey reads (PNG, JPEG, "),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "it begins with '%!PS-Adobe-3.0 EPSF-3.0\\n'"),
    "cut header": (b"\x89PNG\r\n\x1a\n\0\0", "is PNG of 10 bytes that cannot be decoded: its header is"),
    "zeros": (bytes(100), "no image of a format that covey reads"),
}


@pytest.mark.parametrize(("content", "words"), BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_a_file_that_is_no_image_is_named_with_its_beginning(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "1.png"
    path.write_bytes(content)
    for source in (in_file(path), ImageSource(data=content)):
        for read in (image_size, load_image):
            with pytest.raises(MediaError) as caught:
                read(source)
            assert str(caught.value).startswith(f"{source.words} is ")
            assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_has_a_size_and_no_pixels(tmp_path: Path, kind: str) -> None:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, kind)
    path = tmp_path / "1.png"
    path.write_bytes(stream.getvalue()[: -len(stream.getvalue()) // 3])
    with pytest.raises(MediaError) as caught:
        load_image(in_file(path))
    assert f"{path} is " in str(caught.value) and "bytes that cannot be decoded" in str(caught.value)
    # A TIFF file has its header at its end, and the decoder of WebP wants all of a file.
    if kind not in ("TIFF", "WEBP"):
        assert image_size(in_file(path)) == (64, 64)


def test_a_bomb_is_not_decoded(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png_header(60000, 60000))
    for read in (image_size, load_image):
        with pytest.raises(MediaError, match=r"1\.png has too many pixels to be decoded: .*3600000000"):
            read(in_file(tmp_path / "1.png"))


def test_a_header_without_pixels_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png_header(60, 60))
    assert image_size(in_file(tmp_path / "1.png")) == (60, 60)
    with pytest.raises(MediaError, match="cannot be decoded"):
        load_image(in_file(tmp_path / "1.png"))


def test_files_that_cannot_be_read(tmp_path: Path, picture: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "link.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.png")
    cases = {
        tmp_path / "missing.png": "does not exist",
        tmp_path: "is a directory, not an image",
        tmp_path / "empty.png": "is empty: the file has 0 bytes",
        tmp_path / "link.png": "nowhere",
        tmp_path / "pipe.png": "is a device or a pipe, not an image",
        picture / "1.png": "is a file, not a directory",
        tmp_path / ("n" * 300): "300",
        tmp_path / "nul\0.png": "nul",
    }
    for path, words in cases.items():
        for read in (image_size, load_image, read_bytes):
            with pytest.raises(MediaError) as caught:
                read(in_file(path))
            assert words in str(caught.value)


def test_no_bytes_are_no_image() -> None:
    for read in (image_size, load_image, read_bytes):
        with pytest.raises(MediaError, match="an image in the data has 0 bytes"):
            read(ImageSource(data=b""))
