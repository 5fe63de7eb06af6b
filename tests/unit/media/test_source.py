"""What people write for an image, and what it means; what is no image is said to be none."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from covey.media.decode import load_image
from covey.media.errors import MediaError
from covey.media.source import ImageSource, sources_of


def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))


def as_bytes(kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image().save(stream, kind)
    return stream.getvalue()


PNG = as_bytes()
TEXT = base64.b64encode(PNG).decode()
BASE = Path("/data/set")
IN_FILE, IN_BYTES = ImageSource(path="/data/set/cats/1.png"), ImageSource(data=PNG)
ON_THE_WEB = ImageSource(url="https://example.org/cats/1.png?size=2")

FORMS = {
    "relative path": ("cats/1.png", IN_FILE),
    "path with dots": ("../set/./cats/1.png", IN_FILE),
    "absolute path": ("/data/set/cats/1.png", IN_FILE),
    "spaces around": (" cats/1.png\n", IN_FILE),
    "path object": (Path("cats/1.png"), IN_FILE),
    "file URL": ("file:///data/set/cats/1.png", IN_FILE),
    "file URL of this machine": ("file://localhost/data/set/cats/1.png", IN_FILE),
    "file URL with an escape": ("file:///data/set/ca%74s/1.png", IN_FILE),
    "relative file URL": ("file://cats/1.png", IN_FILE),
    "URL": ("https://example.org/cats/1.png?size=2", ON_THE_WEB),
    "data URI": (f"data:image/png;base64,{TEXT}", IN_BYTES),
    "data URI with a parameter": (f"data:image/png;name=a.png;base64,{TEXT}", IN_BYTES),
    "base64": (TEXT, IN_BYTES),
    "base64 in lines": (base64.encodebytes(PNG).decode(), IN_BYTES),
    "base64 without padding": (TEXT.rstrip("="), IN_BYTES),
    "base64 for URLs": (base64.urlsafe_b64encode(PNG).decode(), IN_BYTES),
    "bytes": (PNG, IN_BYTES),
    "bytearray": (bytearray(PNG), IN_BYTES),
    "path of datasets": ({"path": "cats/1.png", "bytes": None}, IN_FILE),
    "bytes of datasets": ({"path": "1.png", "bytes": PNG}, IN_BYTES),
    "bytes in JSON": ({"bytes": TEXT}, IN_BYTES),
    "image": ({"image": "cats/1.png"}, IN_FILE),
    "url": ({"url": "https://example.org/cats/1.png?size=2"}, ON_THE_WEB),
    "block of Qwen": ({"type": "image", "image": "file:///data/set/cats/1.png"}, IN_FILE),
    "block of transformers": ({"type": "image", "path": "cats/1.png"}, IN_FILE),
    "block of transformers with base64": ({"type": "image", "base64": TEXT}, IN_BYTES),
    "block of OpenAI": (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}", "detail": "low"}},
        IN_BYTES,
    ),
    "flat block of OpenAI": (
        {"type": "input_image", "image_url": "https://example.org/cats/1.png?size=2"},
        ON_THE_WEB,
    ),
    "block of Anthropic": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
        IN_BYTES,
    ),
    "padded block": ({"type": "image", "text": None, "video": None, "path": "cats/1.png"}, IN_FILE),
}


@pytest.mark.parametrize(("value", "meant"), FORMS.values(), ids=FORMS.keys())
def test_a_form_is_read_as_it_is_meant(value: object, meant: ImageSource) -> None:
    assert sources_of(value, BASE) == [meant]


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_base64_of_every_format_is_known_by_its_beginning(kind: str) -> None:
    data = as_bytes(kind)
    assert sources_of(base64.b64encode(data).decode()) == [ImageSource(data=data)]


def test_a_path_that_looks_like_base64_is_a_path() -> None:
    for text in ("iVBORw0KGgo", "/9j/4AAQ", "a" * 60, "/9j/" + "x" * 60 + ".png"):
        (source,) = sources_of(text, BASE)
        assert source.path is not None and source.path.endswith(text)


def test_an_image_of_pil_and_an_array_keep_their_pixels() -> None:
    for value in (image(), np.asarray(image()), np.asarray(image())[:, ::-1]):
        (source,) = sources_of(value)
        assert source.data is not None and source.data.startswith(b"\x89PNG")
        assert np.array_equal(np.asarray(load_image(source)), np.asarray(value))


def test_an_opened_photo_is_turned_before_it_loses_its_exif(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image().save(tmp_path / "photo.jpg", exif=exif)
    with Image.open(tmp_path / "photo.jpg") as photo:
        (source,) = sources_of(photo)
    assert load_image(source).size == (30, 40)


def test_lists_are_read_in_their_order() -> None:
    value = ["cats/1.png", None, [{"bytes": PNG}], ("cats/1.png",)]
    assert sources_of(value, BASE) == [IN_FILE, IN_BYTES, IN_FILE]
    assert sources_of(np.array(["cats/1.png", None], dtype=object), BASE) == [IN_FILE]


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], [None], {"path": None, "bytes": None}, {"type": "image"}),
        {"type": "text", "text": "a", "image": None},
        {"image": None, "videos": []},
    ],
)
def test_nothing_is_no_image(value: object) -> None:
    assert sources_of(value, BASE) == []


def test_a_relative_path_without_a_base_starts_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert sources_of("1.png") == [ImageSource(path=str(tmp_path / "1.png"))]
    assert sources_of("~/1.png") == [ImageSource(path=str(tmp_path / "home" / "1.png"))]


def test_a_percent_sign_in_a_name_stays(tmp_path: Path) -> None:
    path = tmp_path / "100%25.png"
    assert sources_of(f"file://{path}") == [ImageSource(path=str(tmp_path / "100%.png"))]
    path.write_bytes(PNG)
    assert sources_of(f"file://{path}") == [ImageSource(path=str(path))]


REFUSED = {
    "number": (3, "a value of type int is no image"),
    "numbers": ([1.5], "a value of type float is no image"),
    "empty text": ("  ", "an empty text names no image"),
    "long text": (
        "word " * 1000,
        "4,999 characters is neither a path nor an image in base64; it begins with",
    ),
    "video file": ("clips/1.MP4", "'1.MP4' is video"),
    "audio file": (Path("1.wav"), "'1.wav' is audio"),
    "video block": ({"type": "video", "video": "1.mp4"}, "'video' is video"),
    "video frames": ({"video": ["1.png", "2.png"]}, "'video' is video"),
    "videos": ({"videos": "1.mp4"}, "'videos' is video"),
    "video URL": ({"type": "video_url", "video_url": {"url": "https://e.org/1"}}, "'video_url' is video"),
    "audio block": ({"type": "audio", "audio": "1.wav"}, "'audio' is audio"),
    "audio input": ({"type": "input_audio", "input_audio": {"data": ""}}, "'input_audio' is audio"),
    "video among images": (["1.png", {"type": "video", "url": "a"}], "'video' is video"),
    "text block": (
        {"type": "text", "text": "hello"},
        "with the keys type, text is no image: expected one of",
    ),
    "empty object": ({}, "with the keys (none) is no image"),
    "bucket": ("s3://bucket/1.png", "images are not read from s3:// addresses"),
    "video URI": ("data:video/mp4;base64,AAAA", "a data URI of type video/mp4 is no image"),
    "text URI": ("data:text/plain,hello", "a data URI of type text/plain is no image"),
    "URI without comma": ("data:image/png;base64", "a data URI without a comma"),
    "broken base64": ({"bytes": "not base64!"}, "begins with 'not base64!' is no valid base64"),
    "base64 of other letters": ({"bytes": "é" * 8}, "is no valid base64"),
    "grey array": (np.zeros((4, 4), dtype=np.uint8), "an array of uint8 with the shape (4, 4) is no image"),
    "float array": (np.zeros((4, 4, 3)), "an array of float64 with the shape (4, 4, 3) is no image"),
    "empty array": (np.zeros((0, 4, 3), dtype=np.uint8), "with the shape (0, 4, 3) is no image"),
}


@pytest.mark.parametrize(("value", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_image_is_refused(value: object, words: str) -> None:
    with pytest.raises(MediaError) as caught:
        sources_of(value, BASE)
    assert isinstance(caught.value, ValueError)
    assert words in str(caught.value)


def test_a_damaged_image_of_pil_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(PNG[:300])
    with (
        Image.open(tmp_path / "1.png") as opened,
        pytest.raises(MediaError, match=r"a PIL image of \(40, 30\)"),
    ):
        sources_of(opened)


def test_a_source_says_what_it_is() -> None:
    assert IN_FILE.words == "/data/set/cats/1.png"
    assert ImageSource(data=bytes(1204)).words == "image of 1,204 bytes"
    assert ON_THE_WEB.words == "https://example.org/cats/1.png?size=2"
    assert len(repr(IN_BYTES)) < 60
    assert len({IN_FILE, ImageSource(path="/data/set/cats/1.png"), IN_BYTES}) == 2


def test_a_source_is_one_place() -> None:
    for places in ({}, {"path": "/a", "url": "https://e.org"}):
        with pytest.raises(AssertionError):
            ImageSource(**places)
