"""From a model's directory, or one that is loaded, to a policy split over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from covey.learner.sharding.hollow import add_hollow_adapter, hollow_model
from covey.learner.sharding.rows import FileRows, HeldRows, Rows, file_keys
from covey.learner.sharding.units import Sharded, Sharding
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import read_policy
from covey.models.lora import plain_name
from covey.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Hollow:
    """A policy without weights, and those that its adapter starts with."""

    policy: Policy
    values: Mapping[str, Tensor]


def hollow_policy(
    source: Path | nn.Module,
    lora: LoraSettings | None,
    *,
    adapter: Path | None,
    seed: int,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> Hollow:
    """The policy of a directory, or of a model that is loaded; what an adapter leaves frozen computes in
    `dtype`, everything else is float32."""
    policy = Policy(hollow_model(source, trust_remote_code), stream="padded")
    if lora is None:
        return Hollow(policy, {})
    return Hollow(policy, add_hollow_adapter(policy, lora, adapter=adapter, seed=seed, dtype=dtype))


def sharded_policy(
    hollow: Hollow,
    source: Path | nn.Module,
    sharding: Sharding,
    compute_dtype: torch.dtype,
    *,
    trust_remote_code: bool,
) -> Sharded:
    """Split a policy without weights, and let each rank read its rows: an adapter's values, the rest of
    `source`.

    A rank holds no more than its rows at any time, unless the files hold tensors that transformers puts
    together as it loads them: then it holds the whole model for that long.
    """
    names = [n for n, _ in hollow.policy.named_parameters(remove_duplicate=False)]
    plain = {n: plain_name(n.removeprefix("model.")) for n in names}
    sharded = Sharded(hollow.policy, sharding, compute_dtype)
    held, base = HeldRows(hollow.values), _base_rows(source, trust_remote_code)

    def rows_of(name: str) -> Rows | None:
        if name in hollow.values:
            return held
        return None if ".lora_" in name else _Renamed(base, plain)

    sharded.fill(rows_of)
    if isinstance(base, FileRows):
        base.close()
    return sharded


class _Renamed:
    """Rows under the policy's names."""

    def __init__(self, rows: Rows, names: Mapping[str, str]) -> None:
        self._rows, self._names = rows, names

    def read(self, name: str, first: int, last: int) -> Tensor:
        """As `Rows` says."""
        return self._rows.read(self._names[name], first, last)


def _base_rows(source: Path | nn.Module, trust_remote_code: bool) -> FileRows | HeldRows:
    """The weights of the plain model."""
    if isinstance(source, nn.Module):
        return HeldRows(dict(source.named_parameters(remove_duplicate=False)))
    keys = file_keys(hollow_model(source, trust_remote_code), source)
    if keys is not None:
        return FileRows(source, keys)
    return HeldRows(
        dict(read_policy(source, trust_remote_code).model.named_parameters(remove_duplicate=False))
    )
