"""Images of requests on their way to a rollout server: what it lacks is sent before the requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from covey.media.errors import MediaError
from covey.media.store import content_of
from covey.rollout.server.call import Answer, Caller, Refused
from covey.rollout.server.media_wire import IMAGE_BYTES, IMAGES, missing_of, query_of
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import ServerStatus
from covey.texts import tr
from covey.types import GenerationRequest, Medium

# How often files are sent again that a server has dropped for others before it was given the requests.
_TRIES = 8


class _SaysStatus(Protocol):
    """A server, and what it has said of itself, if it has been asked."""

    status: ServerStatus | None

    @property
    def address(self) -> str: ...


def check_images(request: GenerationRequest, servers: Iterable[_SaysStatus]) -> None:
    """Raise WireError for a request with images where one of the servers takes none, as far as it has said
    so, and for one with too many."""
    if not request.media:
        return
    if len(request.media) > IMAGES:
        words = tr(
            "a prompt has {num} images; a rollout server takes {most}", num=len(request.media), most=IMAGES
        )
        raise WireError(words)
    for server in servers:
        if server.status is not None and not server.status.images:
            words = tr("{address} takes no images, and a prompt has some", address=server.address)
            raise WireError(words)


class ImageSender:
    """Sends a server the files of images. Several threads may ask for it; one after the other sends."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._lock = threading.Lock()
        self.sent_at = 0.0

    def open(self, requests: Mapping[str, GenerationRequest], call: Callable[[], Answer]) -> Answer:
        """Return the answer to a call with requests, before which the server is sent what it lacks of their
        images. Raises MediaError where a file cannot be read."""
        media = {one.key: one for request in requests.values() for one in request.media}
        for _ in range(_TRIES if media else 0):
            self._send(media)
            try:
                return call()
            except Refused as error:
                if "images" not in error.body:
                    raise
        return call()

    def _send(self, media: Mapping[str, Medium]) -> None:
        with self._lock:
            body = self._caller.post("/v1/images/missing", {"keys": list(media)})
            for key in missing_of(body, media):
                medium = media[key]
                self._caller.post(f"/v1/images?{query_of(medium)}", _content(medium))
                self.sent_at = time.monotonic()


def _content(medium: Medium) -> bytes:
    """Return the bytes of the file of an image, which are those that its prompt was made with."""
    source = medium.source.place.image()
    # What is on the web was allowed when its prompt was made.
    content = content_of(source, medium.key, medium.source.limits, may_fetch=True)
    if len(content) > IMAGE_BYTES:
        raise MediaError(
            tr(
                "{source} has {num_bytes:,} bytes; a rollout server takes {most:,}",
                source=source.words,
                num_bytes=len(content),
                most=IMAGE_BYTES,
            )
        )
    return content
