"""Builds a policy that is split over ranks from a model's directory, or from a loaded model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from covey.learner.sharding.meta import add_meta_adapter, freeze_meta, meta_model
from covey.learner.sharding.rows import FileRows, ReadRows, file_keys, rows_of
from covey.learner.sharding.units import Sharded, Sharding
from covey.models.adapter_shapes import LoraSettings, plain_name
from covey.models.load import read_policy
from covey.models.policy import Policy
from covey.types.media import Part


@dataclass(frozen=True, slots=True)
class MetaPolicy:
    """Holds a policy without weights, those that its adapter starts with, and the keys of the others in the
    model's files; None where the files hold them in another form."""

    policy: Policy
    values: Mapping[str, Tensor]
    keys: Mapping[str, str] | None


def meta_policy(
    source: Path | nn.Module,
    lora: LoraSettings | None,
    *,
    adapter: Path | None,
    seed: int,
    dtype: torch.dtype,
    trust_remote_code: bool,
    frozen: Collection[Part] = (),
) -> MetaPolicy:
    """Return the policy of a directory, or of a model that is loaded; what an adapter leaves frozen computes
    in `dtype`, and without an adapter the `frozen` parts do; everything else is float32."""
    model = meta_model(source, trust_remote_code)
    keys = file_keys(model, source) if isinstance(source, Path) else None
    policy, values = Policy(model, stream="padded"), {}
    if lora is not None:
        values = add_meta_adapter(policy, lora, adapter=adapter, seed=seed, dtype=dtype)
    else:
        freeze_meta(policy, frozen, dtype)
    return MetaPolicy(policy, values, keys)


def sharded_policy(
    meta: MetaPolicy,
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
    with rows_of_source(meta, source, trust_remote_code=trust_remote_code) as read:
        sharded = Sharded(meta.policy, sharding, compute_dtype)
        sharded.fill(read)
    return sharded


@contextmanager
def rows_of_source(
    meta: MetaPolicy, source: Path | nn.Module, *, trust_remote_code: bool
) -> Iterator[ReadRows]:
    """Within it, the function that it gives reads rows of weights by name: an adapter's values, the rest from
    `source`. It returns None for tensors that an adapter computes."""
    files: FileRows | None = None
    if isinstance(source, Path) and meta.keys is not None:
        files = FileRows(source, meta.keys)
    else:
        model = source if isinstance(source, nn.Module) else read_policy(source, trust_remote_code).model
        held = dict(model.named_parameters(remove_duplicate=False))

    def read(name: str, first: int, last: int) -> Tensor | None:
        if name in meta.values:
            return rows_of(meta.values[name], first, last)
        if ".lora_" in name:
            return None
        plain = plain_name(name.removeprefix("model."))
        return rows_of(held[plain], first, last) if files is None else files.read(plain, first, last)

    yield read
    if files is not None:
        files.close()
