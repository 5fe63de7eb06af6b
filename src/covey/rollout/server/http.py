"""The routes of a rollout server: HTTP/1.1 of the standard library in front of a `Front`.

Every route but `/health` asks for the token before it looks at anything else, and a body is read only where
its length is said and within its bound. Connections that have not shown the token are few and short.
"""

from __future__ import annotations

import hmac
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from covey.rollout.server.front import Call, Front, Refusal
from covey.rollout.server.group import GLOO, NCCL, GroupHost
from covey.rollout.server.handler import JsonHandler
from covey.rollout.server.images import HeldImages, ImagesMissing
from covey.rollout.server.media_wire import IMAGE_BYTES, key_and_limits, keys_of
from covey.rollout.server.metrics import CONTENT_TYPE
from covey.rollout.server.schedulers import ServedScheduler
from covey.rollout.server.unproven import Unproven, is_full
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import (
    ADAPTER,
    HEADER_BYTES,
    RUN_HEADER,
    WHOLE,
    completion_body,
    requests_of,
    specs_of,
)

_ALIVE_S = 1.0
# How soon it is seen that the server closes.
_LOOK_S = 0.1
# Between two tries to accept a connection where no files are left for it.
_FULL_S = 0.05
_NAME_LENGTH = 500
# Where a process group may wait, and for how long.
_PORTS, _LONGEST_S = (1024, 65535), 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may call a server and what it takes: `bucket_bytes` is the largest body of tensors, and
    `publish_directory` the one below which files of weights may lie (None: nowhere). `device` is where a
    process group may bring tensors (None: it may not), and `num_workers` how many processes of the engine
    take them in place of this one. `scheduler` makes the trajectories of runs that ask for it."""

    token: str
    bucket_bytes: int
    publish_directory: Path | None = None
    device: torch.device | None = None
    num_workers: int = 0
    scheduler: ServedScheduler | None = None


class HttpServer(ThreadingMixIn, TCPServer):
    """Answers each connection of a socket that listens in a thread of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listening: socket.socket, front: Front, access: Access, tls: ssl.SSLContext | None = None
    ) -> None:
        self.front, self.access = front, access
        self.group = GroupHost(access.device, access.num_workers)
        self.unproven = Unproven()
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        if tls is not None:
            # The handshake is made by the connection's own thread, which a client may keep waiting.
            self.socket = tls.wrap_socket(listening, server_side=True, do_handshake_on_connect=False)

    def start(self) -> None:
        """Answer from a thread of its own."""
        threading.Thread(target=self.serve_forever, args=(_LOOK_S,), name="http", daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection. Where no files are left for it, older ones without the token make room."""
        try:
            connection, address = self.socket.accept()
        except OSError as error:
            if is_full(error):
                self.unproven.end_older_half()
                # The connection goes on waiting, so the next try would come at once.
                time.sleep(_FULL_S)
            raise
        self.unproven.add(connection)
        return connection, address

    def service_actions(self) -> None:
        """Called by the loop that accepts, again and again."""
        self.unproven.end_late()

    def shutdown_request(self, request: Any) -> None:
        """End a connection, whose number may be another file's from then on."""
        self.unproven.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is no news; every other error is printed as it is."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(JsonHandler):
    server: HttpServer

    def do_GET(self) -> None:  # noqa: N802 - the name that the library calls
        self._answer("GET")

    def do_POST(self) -> None:  # noqa: N802 - the name that the library calls
        self._answer("POST")

    def _answer(self, method: str) -> None:
        path = urlsplit(self.path).path
        try:
            if (method, path) == HEALTH:
                self.health()
                return
            self._check_token()
            route = _ROUTES.get((method, path))
            if route is None:
                raise Refusal(404, f"there is no {method} {path[:80]}")
            route(self)
        except Refusal as refusal:
            self._say(refusal.status, refusal.body)
        except ImagesMissing as missing:
            self._say(409, {"error": str(missing), "images": missing.keys})
        except WireError as error:
            self._say(400, {"error": str(error)})

    def _check_token(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.access.token}".encode()):
            raise Refusal(401, "a token is asked for: Authorization: Bearer TOKEN")
        self.server.unproven.remove(self.connection)

    @property
    def _run(self) -> str:
        return self.headers.get(RUN_HEADER, "")

    # -- routes

    def health(self) -> None:
        """Alive, and not a word more: whoever reaches the port may ask."""
        self.close_connection = True
        self._say(200, {"status": "ok"})

    def metrics(self) -> None:
        self._send(200, CONTENT_TYPE, self.server.front.metrics().encode())

    def status(self) -> None:
        self._say(200, self.server.front.status().body())

    def attend(self) -> None:
        """Hold the connection for as long as the process of the run does: its end, however it comes, is that
        of the process."""
        body = self._json("run", "name")
        run, name = str(body["run"]), str(body["name"])[:_NAME_LENGTH]
        if not run:
            raise WireError("a run has an id")
        front = self.server.front
        front.attend(run, name)
        try:
            self._say(200, {"run": run})
            self._wait_for_end()
        finally:
            front.leave(run)
            if not front.uses(run):
                self.server.group.close_of(run)

    def generate(self) -> None:
        front = self.server.front
        about = front.status()
        body = self._json("version", "requests")
        if type(body["version"]) is not int:
            raise WireError("version is a whole number")
        requests = requests_of(body["requests"], about)
        if front.images is not None:
            requests = front.images.with_files(requests)
        call = front.generate(self._run, body["version"], requests)
        try:
            self._stream(call)
        finally:
            front.drop(call)

    def _stream(self, call: Call) -> None:
        self._begin_lines()
        left = len(call.requests)
        while left:
            found = call.next(_ALIVE_S)
            if found is not None:
                left -= 1
                self._chunk(completion_body(*found))
            elif (num_computed := self.server.front.progress(call)) is not None:
                self._chunk({"computed": num_computed})
        self._chunk({"done": True})
        self._end_lines()

    def _images(self) -> HeldImages:
        """The images of the run that calls."""
        self.server.front.check_user(self._run)
        if self.server.front.images is None:
            raise Refusal(400, "this server takes no images")
        return self.server.front.images

    def missing_images(self) -> None:
        keys = keys_of(self._json("keys")["keys"])
        self._say(200, {"missing": self._images().missing(keys)})

    def image(self) -> None:
        data = self._body(IMAGE_BYTES)
        key, limits = key_and_limits(urlsplit(self.path).query)
        self._images().keep(key, limits, data)
        self._say(200, {"bytes": len(data)})

    def attend_scheduler(self) -> None:
        """Hold the connection for as long as the client has trajectories."""
        client = str(self._json("client")["client"])
        scheduler = self._scheduler()
        scheduler.attend(client)
        try:
            self._say(200, {"client": client})
            self._wait_for_end()
        finally:
            scheduler.leave(client)

    def scheduler(self) -> None:
        body = self._json("client", "request")
        answer = self._scheduler().ask(str(body["client"]), dict(body["request"]))
        self._begin_lines()
        while not wait([answer], _ALIVE_S).done:
            self._chunk({})
        self._chunk({"answer": answer.result()})
        self._end_lines()

    def _scheduler(self) -> ServedScheduler:
        if self.server.access.scheduler is None:
            raise Refusal(400, "this server was started without --multi_turn_scheduler")
        return self.server.access.scheduler

    def abort(self) -> None:
        ids = self._json("ids")["ids"]
        if ids is not None and not (isinstance(ids, list) and all(isinstance(one, str) for one in ids)):
            raise WireError("ids is a list of texts, or null for all")
        self._say(200, {"aborted": self.server.front.abort(self._run, ids)})

    def begin(self) -> None:
        body = self._json("version", "form")
        if type(body["version"]) is not int or body["version"] < 0:
            raise WireError("version is a whole number of 0 or more")
        if body["form"] not in (WHOLE, ADAPTER):
            raise WireError(f"form is {WHOLE} or {ADAPTER}")
        transfer = self.server.front.begin(self._run, body["version"], body["form"])
        self._say(200, {"transfer": transfer.id})

    def tensors(self) -> None:
        names = parse_qs(urlsplit(self.path).query).get("transfer", [""])
        data = self._body(self.server.access.bucket_bytes + HEADER_BYTES)
        try:
            bucket = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise WireError(f"the body is not safetensors: {error}") from error
        self.server.front.give(self._run, names[0], bucket)
        self._say(200, {"tensors": len(bucket)})

    def files(self) -> None:
        body = self._json("transfer", "file")
        path = self._below(str(body["file"]))
        try:
            bucket = load_file(str(path))
        except (OSError, SafetensorError, ValueError) as error:
            raise Refusal(400, f"{path.name} cannot be read: {error}") from error
        self.server.front.give(self._run, str(body["transfer"]), bucket)
        self._say(200, {"tensors": len(bucket)})

    def _below(self, name: str) -> Path:
        root = self.server.access.publish_directory
        if root is None:
            raise Refusal(403, "this server was started without --publish_directory")
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise Refusal(403, "the file lies outside the directory that this server was started with")
        return path

    def open_group(self) -> None:
        """Wait for the run on the address at which it has reached this server."""
        body = self._json("transfer", "port", "backend", "timeout_s")
        port, backend, timeout_s = body["port"], body["backend"], body["timeout_s"]
        if type(port) is not int or not _PORTS[0] <= port <= _PORTS[1]:
            raise WireError(f"port is a number from {_PORTS[0]} to {_PORTS[1]}")
        if backend not in (GLOO, NCCL):
            raise WireError(f"backend is {GLOO} or {NCCL}")
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= _LONGEST_S:
            raise WireError(f"timeout_s is a number above 0 and at most {_LONGEST_S:g}")
        front, group, transfer = self.server.front, self.server.group, str(body["transfer"])
        front.check_open(self._run, transfer)
        host = self.connection.getsockname()[0]
        place = group.open(self._run, host, port, backend, timeout_s)
        front.join_group(self._run, transfer, place)
        self._say(200, {"group": place.name, "world": group.world})

    def group_tensors(self) -> None:
        body = self._json("transfer", "group", "tensors")
        specs = specs_of(body["tensors"], self.server.access.bucket_bytes)
        transfer = str(body["transfer"])
        self.server.front.check_open(self._run, transfer)
        bucket = self.server.group.receive(self._run, str(body["group"]), specs)
        self.server.front.give(self._run, transfer, bucket)
        self._say(200, {"tensors": len(bucket)})

    def end(self) -> None:
        body = self._json("transfer", "tensors")
        if type(body["tensors"]) is not int:
            raise WireError("tensors is the number that was sent")
        receipt = self.server.front.end(self._run, str(body["transfer"]), body["tensors"])
        held = {"fingerprints": dict(receipt.fingerprints), "unread": list(receipt.unread)}
        self._say(200, {"version": receipt.version, **held})


_ROUTES: Mapping[tuple[str, str], Callable[[_Handler], None]] = {
    ("GET", "/metrics"): _Handler.metrics,
    ("GET", "/v1/status"): _Handler.status,
    ("POST", "/v1/attend"): _Handler.attend,
    ("POST", "/v1/generate"): _Handler.generate,
    ("POST", "/v1/images"): _Handler.image,
    ("POST", "/v1/images/missing"): _Handler.missing_images,
    ("POST", "/v1/scheduler"): _Handler.scheduler,
    ("POST", "/v1/scheduler/attend"): _Handler.attend_scheduler,
    ("POST", "/v1/abort"): _Handler.abort,
    ("POST", "/v1/publish/begin"): _Handler.begin,
    ("POST", "/v1/publish/tensors"): _Handler.tensors,
    ("POST", "/v1/publish/files"): _Handler.files,
    ("POST", "/v1/publish/group"): _Handler.open_group,
    ("POST", "/v1/publish/group_tensors"): _Handler.group_tensors,
    ("POST", "/v1/publish/end"): _Handler.end,
}

ROUTES: tuple[tuple[str, str], ...] = tuple(_ROUTES)
"""Every route that asks for the token, as method and path."""
HEALTH = ("GET", "/health")
"""The one route that does not."""
