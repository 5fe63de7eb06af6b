"""The caches of an engine: made as large as requests need, and kept for the next rollout."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from covey.models.policy import Policy
from covey.rollout.native.cache import KVCache
from covey.rollout.native.shape import CacheShape
from covey.types import GenerationRequest

# The share of free memory that a cache may take: training peaks come on top of it later in the step.
_SHARE = 0.3

# Prompts up to this length are copied to their rows: attention then takes half the calls (measured on a CPU
# with 64 rows; at 100 tokens the two cost the same).
_FLAT_PROMPT = 64
# Tokens: 64 bytes of the narrowest heads in the lowest precision.
_LINE = 16


@dataclass(slots=True)
class Caches:
    """One cache for short prompts, which are copied to their rows, and one for others; a row may go on past
    its end by less than `stride` tokens."""

    policy: Policy
    max_rows: int
    stride: int
    _caches: dict[bool, KVCache] = field(default_factory=dict)

    def fits(self, cache: KVCache, request: GenerationRequest) -> bool:
        """Whether a cache that is in use has room for a request."""
        wanted = len(request.prompt_token_ids), self._completion([request])
        return wanted[0] <= cache.shape.prompt and wanted[1] <= cache.shape.completion

    def grow(self, cache: KVCache, requests: Collection[GenerationRequest]) -> bool:
        """Make a cache that is in use large enough for further requests; False where it is flat, or memory is
        short. Each time all that it holds is copied, so what is too short becomes twice as long."""
        held = cache.shape
        if held.flat:
            return False
        prompt = _aligned(max(len(r.prompt_token_ids) for r in requests))
        completion = self._completion(requests)
        least = replace(
            held,
            prompt=max(held.prompt, prompt),
            completion=max(held.completion, completion),
            slots=held.rows,
        )
        ample = replace(
            least,
            prompt=max(prompt, 2 * held.prompt) if prompt > held.prompt else held.prompt,
            completion=max(completion, 2 * held.completion)
            if completion > held.completion
            else held.completion,
        )
        for shape in (ample, least):
            if self._that_fits(shape, cache) == shape:
                cache.grow(shape)
                return True
        return False

    def for_requests(self, requests: Collection[GenerationRequest], num_prompts: int) -> KVCache:
        """A cache for these requests, of so many prompts; no row may be in one."""
        prompt = max(len(r.prompt_token_ids) for r in requests)
        # The prompt of a further turn is longer, and each has a slot of its own.
        goes_on = any(r.may_go_on or r.extends is not None for r in requests)
        flat = prompt <= _FLAT_PROMPT and not goes_on
        held = self._caches.get(flat)
        # How things lie in memory must not follow from what came before, as products round by it: a resumed
        # run has another past.
        rows = min(len(requests), self.max_rows)
        wanted = CacheShape(
            rows=rows,
            completion=self._completion(requests),
            slots=rows if goes_on else num_prompts,
            prompt=_FLAT_PROMPT if flat else _aligned(prompt),
            flat=flat,
        )
        wanted = self._that_fits(wanted, held)
        if held is not None:
            if held.shape.serves(wanted):
                return held
            both = wanted.covering(held.shape)
            # Where memory is short for both, each gets what it asks for, and the other is made anew.
            wanted = both if self._that_fits(both, held) == both else wanted
        self._caches[flat] = KVCache(wanted)
        return self._caches[flat]

    def _that_fits(self, shape: CacheShape, held: KVCache | None) -> CacheShape:
        """The shape with as many rows as fit once the cache `held` is gone."""
        given_back = 0 if held is None else held.num_bytes
        rows = min(shape.rows, rows_that_fit(self.policy, shape.prompt + shape.completion, given_back))
        return replace(shape, rows=rows, slots=min(shape.slots, rows))

    @property
    def numbers(self) -> frozenset[int]:
        """Those of the caches that there are."""
        return frozenset(cache.number for cache in self._caches.values())

    def clear(self) -> None:
        """Give all of it back; no row may be in one."""
        self._caches.clear()

    def _completion(self, requests: Collection[GenerationRequest]) -> int:
        """Columns for the longest completion."""
        return _aligned(max(r.sampling.max_new_tokens for r in requests) + self.stride - 1)


def _aligned(tokens: int) -> int:
    """A length whose keys and values fill whole cache lines."""
    return -(-tokens // _LINE) * _LINE


def kv_bytes_per_token(policy: Policy) -> int:
    """Bytes of keys and values of one token over all layers, from the model's config."""
    config: Any = policy.model.config
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = next(policy.parameters()).element_size()
    return int(2 * config.num_hidden_layers * kv_heads * width * size)


def free_bytes(device: torch.device) -> int:
    """Memory that is free now: of the GPU, with what torch holds of it and does not use, else of the
    machine."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def rows_that_fit(policy: Policy, tokens_per_row: int, given_back: int = 0) -> int:
    """Rows of this length, prompt included, for which a cache fits once so many bytes are given back; at
    least one."""
    row = kv_bytes_per_token(policy) * tokens_per_row
    return max(1, int(_SHARE * (free_bytes(policy.device) + given_back)) // row)
