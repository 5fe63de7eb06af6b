"""`covey rollout`: a model, the built-in engine on it, and HTTP in front of both."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from covey.data.model_files import model_context, read_json
from covey.kernels.choose import KernelsName
from covey.models.adapter_shapes import read_shapes
from covey.models.load import largest_bytes, load_still
from covey.rollout.server.front import Front, new_instance
from covey.rollout.server.held import HeldEngine
from covey.rollout.server.http import Access, HttpServer
from covey.rollout.server.remote import MARKER
from covey.rollout.server.wire import BUCKET_BYTES, NO_VERSION, ServerStatus
from covey.training.process import own_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server is started with; `socket` listens already, and `scheme` is http or https."""

    model: Path
    name: str
    socket: socket.socket
    token: str
    token_file: Path
    tls: ssl.SSLContext | None
    dtype: str
    kernels: KernelsName
    max_rows: int
    publish_directory: Path | None
    ends_with_run: bool

    @property
    def address(self) -> str:
        """Where it listens, as a run is told."""
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def serve(serving: Serving, say: Callable[[str], None]) -> None:
    """Load the model and answer until the process is told to end."""
    device = own_device()
    low = device.type == "cuda" and torch.cuda.is_bf16_supported()
    dtype = {"auto": torch.bfloat16 if low else torch.float32, "float32": torch.float32}.get(
        serving.dtype, torch.bfloat16
    )
    policy = load_still(serving.model, device=device, dtype=dtype, kernels=serving.kernels)
    engine = HeldEngine(policy, max_rows=serving.max_rows)
    about = ServerStatus(
        name=serving.address,
        instance=new_instance(),
        engine=engine.name,
        model=serving.name,
        model_type=str(read_json(serving.model / "config.json").get("model_type", "")),
        num_parameters=sum(math.prod(shape) for shape in read_shapes(serving.model).tensors.values()),
        vocab=policy.vocab,
        max_len=model_context(serving.model) or 0,
        dtype=str(dtype).removeprefix("torch."),
        version=NO_VERSION,
        rows=serving.max_rows,
        noise_keys=engine.capabilities.noise_keys,
        run="",
        is_receiving=False,
        publish_directory=str(serving.publish_directory or ""),
    )
    front = Front(engine, about, ends_with_run=serving.ends_with_run)
    access = Access(
        token=serving.token,
        bucket_bytes=max(BUCKET_BYTES, largest_bytes(policy)),
        publish_directory=serving.publish_directory,
    )
    marker = None
    if serving.publish_directory is not None:
        marker = serving.publish_directory / f"{MARKER}{about.instance}"
        marker.touch(mode=0o600)
    server = HttpServer(serving.socket, front, access, serving.tls)
    server.start()
    say(f"rollout   {serving.name}, {about.dtype}, on {device}; no weights are published yet")
    say(f"token     {serving.token_file}")
    say(f"ready     {about.name}")
    try:
        front.serve()
    finally:
        server.shutdown()
        server.server_close()
        if marker is not None:
            marker.unlink(missing_ok=True)
