"""Images on the web."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request

from covey.media.errors import MediaError
from covey.texts import tr

# Seconds that a server may say nothing, and that an image may take.
_TIMEOUT_S, _LONGEST_S = 20.0, 120.0
_MOST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 16


def fetched(url: str, may_fetch: bool) -> bytes:
    """Return what an http or https address answers, 64 MiB at most; redirects to other schemes are not
    followed. Raises MediaError with the reason, or if nothing may be fetched."""
    if not may_fetch:
        raise MediaError(
            tr(
                "{url} is on the web: add --allow_image_urls true, or download the images and give their "
                "paths",
                url=url,
            )
        )
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "covey"})
        with _opener().open(request, timeout=_TIMEOUT_S) as answer:
            content = _content(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            reason = tr("the server answers {status} {reason}", status=error.code, reason=error.reason)
        raise MediaError(tr("{url} cannot be fetched: {reason}", url=url, reason=str(reason))) from error
    if not content:
        raise MediaError(tr("{url} is empty: the answer has 0 bytes", url=url))
    if len(content) > _MOST_BYTES:
        raise MediaError(tr("{url} has more than {most} MiB", url=url, most=_MOST_BYTES >> 20))
    return content


def _content(answer: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer, cut off behind the most bytes that are taken. A server that sends it drop
    by drop is left with TimeoutError."""
    end, content = time.monotonic() + _LONGEST_S, bytearray()
    while len(content) <= _MOST_BYTES and (piece := answer.read1(_PIECE_BYTES)):
        content += piece
        if time.monotonic() > end:
            raise TimeoutError(tr("not complete after {seconds:.0f} seconds", seconds=_LONGEST_S))
    if answer.length and len(content) <= _MOST_BYTES:
        raise http.client.IncompleteRead(bytes(content), answer.length)
    return bytes(content)


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens http and https alone, over the proxies that the environment names."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        # It refuses file: itself, and nothing here opens ftp.
        urllib.request.HTTPRedirectHandler(),
    ):
        opener.add_handler(handler)
    return opener
