"""`covey rollout`: a model, the built-in engine on it, and HTTP in front of both."""

from __future__ import annotations

import math
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from covey.data.model_files import model_context, read_json
from covey.data.text import read_tokenizer
from covey.kernels.choose import KernelsName
from covey.media.families import VLLM_FAMILIES, image_token_id
from covey.media.sizes import limits_of, preparation_of
from covey.models.adapter_shapes import read_shapes
from covey.models.load import largest_bytes, load_still
from covey.models.vision.pixels import PixelReader
from covey.rollout.server.front import Front, new_instance
from covey.rollout.server.group import device_name, group_devices
from covey.rollout.server.held import HeldEngine
from covey.rollout.server.http import Access, HttpServer
from covey.rollout.server.images import HeldImages
from covey.rollout.server.sampling_wire import ANY_BANS, bans_of
from covey.rollout.server.schedulers import ServedScheduler
from covey.rollout.server.token import ENDS_WITH_INPUT
from covey.rollout.server.wire import BUCKET_BYTES, MARKER, NO_VERSION, ServerStatus
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.settings import VllmSettings
from covey.texts import tr
from covey.training.process import own_device

# Of vLLM's cache on a CPU; on a GPU it takes its share.
_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server is started with; `socket` listens already, and `scheme` is http or https. `vllm` is how
    vLLM is started, where it samples: dtype and device follow from the others. `scheduler` runs already."""

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
    vllm: VllmSettings | None = None
    scheduler: ServedScheduler | None = None

    @property
    def address(self) -> str:
        """Where it listens, as a run is told."""
        host, port = self.socket.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def serve(serving: Serving, say: Callable[[str], None]) -> None:
    """Load the model and answer until the process is told to end."""
    device = own_device()
    dtype = _dtype_of(serving, device)
    tokenizer = _tokenizer_of(serving.model)
    engine, sizes = _engine(serving, device, dtype, tokenizer)
    workers = engine.workers if isinstance(engine, VllmEngine) else None
    devices = [device_name(device)] if workers is None else workers.devices()
    # The matrices of an adapter are of use in this process alone, and they are small.
    takes_group = workers is None or not engine.capabilities.adapter_rank
    about = _status(serving, engine, sizes, dtype, devices if takes_group else [])
    images = _held_images(serving, sizes.image_token_id) if about.images else None
    front = Front(engine, about, ends_with_run=serving.ends_with_run, workers=workers, images=images)
    access = Access(
        token=serving.token,
        bucket_bytes=max(BUCKET_BYTES, sizes.largest_bytes),
        publish_directory=serving.publish_directory,
        device=device if takes_group else None,
        num_workers=0 if workers is None else len(devices),
        scheduler=serving.scheduler,
    )
    marker = None
    if serving.publish_directory is not None:
        marker = serving.publish_directory / f"{MARKER}{about.instance}"
        marker.touch(mode=0o600)
    server = HttpServer(serving.socket, front, access, serving.tls)
    server.start()
    if isinstance(engine, VllmEngine):
        say(tr("engine    {in_words}", in_words=engine.in_words()))
    what = {"name": serving.name, "dtype": about.dtype, "device": device}
    say(tr("rollout   {name}, {dtype}, on {device}; no weights are published yet", **what))
    if serving.scheduler is not None:
        say(tr("scheduler {name}", name=serving.scheduler.settings.name))
    say(tr("token     {token_file}", token_file=serving.token_file))
    say(tr("ready     {name}", name=about.name))
    if ENDS_WITH_INPUT in os.environ:
        threading.Thread(target=_end_with_input, args=(front,), daemon=True).start()
    try:
        front.serve()
    finally:
        server.shutdown()
        server.server_close()
        engine.close()
        if serving.scheduler is not None:
            serving.scheduler.close()
        if marker is not None:
            marker.unlink(missing_ok=True)


def _end_with_input(front: Front) -> None:
    """Wait for the end of the standard input, which is that of the run."""
    sys.stdin.buffer.read()
    front.close()


def _held_images(serving: Serving, token_id: int) -> HeldImages:
    """Return what holds the images of requests. vLLM has made room for those of the sizes of the model."""
    limits = limits_of(serving.model)
    largest = None if serving.vllm is None else limits.max_pixels // limits.token_side**2
    return HeldImages(token_id, limits, max_tokens=largest)


class _Sizes(NamedTuple):
    """What a server says of its model: rows of the vocabulary, the longest prompt with its completion (0: no
    bound), the bytes of its largest tensor, whether it finds stop strings, the tokens that it bans, and the
    token that stands for an image (0: it takes none)."""

    vocab: int
    max_len: int
    largest_bytes: int
    has_tokenizer: bool
    bans: str = ANY_BANS
    image_token_id: int = 0


def _status(
    serving: Serving,
    engine: HeldEngine | VllmEngine,
    sizes: _Sizes,
    dtype: torch.dtype,
    devices: Sequence[str],
) -> ServerStatus:
    """Return what the server says of itself; without `devices` it takes no process group."""
    return ServerStatus(
        name=serving.address,
        instance=new_instance(),
        engine=engine.name,
        model=serving.name,
        model_type=str(read_json(serving.model / "config.json").get("model_type", "")),
        num_parameters=sum(math.prod(shape) for shape in read_shapes(serving.model).tensors.values()),
        vocab=sizes.vocab,
        max_len=sizes.max_len,
        dtype=str(dtype).removeprefix("torch."),
        version=NO_VERSION,
        rows=serving.max_rows,
        noise_keys=engine.capabilities.noise_keys,
        run="",
        is_receiving=False,
        publish_directory=str(serving.publish_directory or ""),
        adapter_rank=engine.capabilities.adapter_rank,
        base="",
        group_device=group_devices(devices) if devices else "",
        swaps=engine.capabilities.swaps,
        has_tokenizer=sizes.has_tokenizer,
        bans=sizes.bans,
        images=preparation_of(serving.model) if sizes.image_token_id else "",
        scheduler="" if serving.scheduler is None else serving.scheduler.words,
    )


def _dtype_of(serving: Serving, device: torch.device) -> torch.dtype:
    """What the copy of the weights is held in; with `auto` bfloat16 on a GPU that computes in it."""
    low = device.type == "cuda" and torch.cuda.is_bf16_supported()
    own = {"auto": torch.bfloat16 if low else torch.float32, "float32": torch.float32}
    return own.get(serving.dtype, torch.bfloat16)


def _tokenizer_of(model: Path) -> Tokenizer | None:
    """Return the tokenizer that finds stop strings; None where the directory has none."""
    try:
        return read_tokenizer(model)
    except FileNotFoundError:
        return None


def _engine(
    serving: Serving, device: torch.device, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> tuple[HeldEngine | VllmEngine, _Sizes]:
    context = model_context(serving.model) or 0
    if serving.vllm is None:
        policy = load_still(serving.model, device=device, dtype=dtype, kernels=serving.kernels)
        bans = bans_of(policy.head.banned)
        token_id = 0 if policy.vision is None else policy.vision.token_id
        sizes = _Sizes(policy.vocab, context, largest_bytes(policy), tokenizer is not None, bans, token_id)
        return HeldEngine(policy, max_rows=serving.max_rows, tokenizer=tokenizer), sizes
    described = read_json(serving.model / "config.json")
    text = described.get("text_config", described)
    held = min(serving.vllm.max_model_len, context) if context else serving.vllm.max_model_len
    settings = replace(
        serving.vllm,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=held,
        on_gpu=device.type == "cuda",
        cache_bytes=_CACHE_BYTES,
    )
    token_id, read = 0, None
    if (
        described.get("model_type") in VLLM_FAMILIES
        and preparation_of(serving.model)
        and tokenizer is not None
    ):
        token_id, read = image_token_id(described), PixelReader(serving.model)
        limits = limits_of(serving.model)
        room = {"image": 1, "video": 0}
        settings = replace(settings, media_limits=room, image_pixels=(limits.min_pixels, limits.max_pixels))
    largest = max(math.prod(shape) for shape in read_shapes(serving.model).tensors.values())
    engine = VllmEngine(settings, tokenizer=tokenizer, read=read)
    num_bytes = largest * dtype.itemsize
    has_tokenizer = tokenizer is not None
    sizes = _Sizes(int(text["vocab_size"]), held, num_bytes, has_tokenizer, image_token_id=token_id)
    return engine, sizes
