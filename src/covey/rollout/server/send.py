"""Sending the weights of a publish to several servers at once, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

from covey.models.adapter_shapes import is_of_adapter
from covey.rollout.engine import NamedWeights
from covey.rollout.server.bucket import Bucket, buckets_of
from covey.rollout.server.remote import RolloutServer, tell
from covey.rollout.server.wire import ADAPTER, WHOLE
from covey.types import Receipt

Told = TypeVar("Told")


def send_weights(
    servers: Sequence[RolloutServer],
    named_weights: NamedWeights,
    version: int,
    wait_for: Callable[[str], None],
) -> dict[str, Receipt]:
    """Send every tensor to every server that takes it; the receipts of those that took all, by address.
    Where the first one is an adapter's, so are the others.

    `wait_for` hears which servers are waited for. A server that fails is left out, and says why in `said`.
    """
    buckets = buckets_of(named_weights, on_device=any(server.group is not None for server in servers))
    first = next(buckets, Bucket({}))
    form = ADAPTER if is_of_adapter(next(iter(first.tensors), "")) else WHOLE
    with ThreadPoolExecutor(len(servers)) as threads:

        def each(asked: Sequence[RolloutServer], call: Callable[[RolloutServer], Told]) -> dict[str, Told]:
            wait_for(", ".join(server.address for server in asked))
            told = zip(asked, threads.map(lambda server: tell(server, call), asked), strict=True)
            return {server.address: answer for server, answer in told if answer is not None}

        transfers = each(servers, lambda server: server.begin(version, form))
        left = [server for server in servers if server.address in transfers]
        num_tensors = 0
        for bucket in chain([first], buckets):
            given = each(left, _giving(transfers, bucket))
            left = [server for server in left if server.address in given]
            num_tensors += len(bucket.tensors)
            if not left:
                return {}
        return each(left, lambda server: server.end(transfers[server.address], num_tensors, version))


def _giving(transfers: Mapping[str, str], bucket: Bucket) -> Callable[[RolloutServer], bool]:
    def give(server: RolloutServer) -> bool:
        server.give(transfers[server.address], bucket)
        return True

    return give
