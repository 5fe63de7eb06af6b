"""Tensors of a publish that go together, in the forms that servers take."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import save
from torch import Tensor

from covey.rollout.engine import NamedWeights
from covey.rollout.server.wire import BUCKET_BYTES


class Bucket:
    """Copies of tensors. Those in main memory and the bytes of safetensors are made for the first server that
    takes them, and once for all."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._lock = threading.RLock()
        self._on_cpu: Mapping[str, Tensor] | None = None
        self._data: bytes | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    @property
    def on_cpu(self) -> Mapping[str, Tensor]:
        """The tensors in main memory."""
        with self._lock:
            if self._on_cpu is None:
                self._on_cpu = {name: tensor.cpu() for name, tensor in self.tensors.items()}
            return self._on_cpu

    @property
    def data(self) -> bytes:
        """The tensors as safetensors."""
        with self._lock:
            if self._data is None:
                self._data = save(dict(self.on_cpu))
            return self._data


def buckets_of(named_weights: NamedWeights, *, on_device: bool) -> Iterator[Bucket]:
    """Copies of tensors, together up to BUCKET_BYTES; one that is larger comes alone. `on_device`: they lie
    where the tensors do, else in main memory."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, weight in named_weights:
        own = weight.numel() * weight.element_size()
        if bucket and size + own > BUCKET_BYTES:
            yield _whole(bucket)
            bucket, size = {}, 0
        where = weight.device if on_device else torch.device("cpu")
        bucket[name] = weight.detach().to(where, copy=True).contiguous()
        size += own
    if bucket:
        yield _whole(bucket)


def _whole(tensors: Mapping[str, Tensor]) -> Bucket:
    bucket = Bucket(tensors)
    if bucket.device.type == "cuda":
        # Other threads read them, on streams of their own.
        torch.cuda.current_stream(bucket.device).synchronize()
    return bucket
