"""Images on the web are fetched where that is allowed, and no further than the web."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from covey.media import fetch
from covey.media.decode import image_size, load_image
from covey.media.errors import MediaError
from covey.media.sizes import ImageLimits
from covey.media.source import ImageSource
from covey.media.store import key_of
from support.web import Handler, listening

LIMITS = ImageLimits(14, 2, 2, 3136, 12845056)
NOISE = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)


def as_png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(NOISE).save(stream, "PNG")
    return stream.getvalue()


class Site(Handler):
    """Serves an image, and what else a server may answer."""

    def do_GET(self) -> None:
        match self.path:
            case "/1.png":
                self.answer(200, as_png())
            case "/moved":
                self.answer(302, b"", {"Location": "/1.png"})
            case "/to_a_file":
                self.answer(302, b"", {"Location": "file:///etc/hostname"})
            case "/to_ftp":
                self.answer(302, b"", {"Location": "ftp://127.0.0.1/1.png"})
            case "/round":
                self.answer(302, b"", {"Location": "/round"})
            case "/empty":
                self.answer(200, b"")
            case "/page":
                self.answer(200, b"<html>Log in</html>")
            case "/large":
                self.answer(200, bytes(3000))
            case "/short":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"x" * 10)
            case _:
                self.answer(404, b"none")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with listening(Site) as address:
        yield address


def test_nothing_is_fetched_unasked(site: str) -> None:
    source = ImageSource(url=f"{site}/1.png")
    for read in (image_size, load_image):
        with pytest.raises(MediaError) as caught:
            read(source)
        assert str(caught.value).startswith(f"{site}/1.png is on the web: add --allow_image_urls true")
    with pytest.raises(MediaError, match="--allow_image_urls true"):
        key_of(source, LIMITS)


@pytest.mark.parametrize("page", ["/1.png", "/moved"])
def test_an_image_is_fetched(site: str, page: str) -> None:
    source = ImageSource(url=site + page)
    assert image_size(source, may_fetch=True) == (9, 8)
    assert np.array_equal(np.asarray(load_image(source, may_fetch=True)), NOISE)
    assert key_of(source, LIMITS, may_fetch=True) == key_of(ImageSource(data=as_png()), LIMITS)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("/none", "cannot be fetched: the server answers 404"),
        ("/to_a_file", "Redirection to url 'file:///etc/hostname' is not allowed"),
        ("/to_ftp", "cannot be fetched: unknown url type: ftp"),
        ("/round", "cannot be fetched: the server answers 302"),
        ("/empty", "is empty: the answer has 0 bytes"),
        ("/page", "is no image but an HTML page; it begins with '<html>Log in</html>'"),
        ("/short", "cannot be fetched: IncompleteRead(10 bytes read, 990 more expected)"),
    ],
)
def test_an_answer_that_is_no_image_is_said(site: str, page: str, words: str) -> None:
    with pytest.raises(MediaError) as caught:
        load_image(ImageSource(url=site + page), may_fetch=True)
    assert str(caught.value).startswith(site + page) and words in str(caught.value)


def test_a_large_answer_is_cut_off(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_MOST_BYTES", 2000)
    with pytest.raises(MediaError, match="/large has more than 0 MiB"):
        load_image(ImageSource(url=f"{site}/large"), may_fetch=True)


def test_a_slow_answer_ends(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_LONGEST_S", -1.0)
    with pytest.raises(MediaError, match="/large cannot be fetched: not complete after"):
        load_image(ImageSource(url=f"{site}/large"), may_fetch=True)


def test_a_server_that_is_not_there_is_said() -> None:
    with listening(Site) as address:
        pass
    with pytest.raises(MediaError, match=r"cannot be fetched: .*refused"):
        load_image(ImageSource(url=f"{address}/1.png"), may_fetch=True)


def test_an_address_that_is_none_is_said() -> None:
    with pytest.raises(MediaError, match="cannot be fetched"):
        load_image(ImageSource(url="http://[::1"), may_fetch=True)
