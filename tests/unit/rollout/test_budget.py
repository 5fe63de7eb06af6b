"""The native engine's cache stays within the memory that is free."""

from __future__ import annotations

import pytest
import torch

from covey.rollout.native import caches
from covey.rollout.native.engine import NativeEngine


def test_bytes_of_a_token(quickstart_policy):
    # Keys and values, 4 layers, 2 key heads of width 128 / 4 = 32, 4 bytes: 2 * 4 * 2 * 32 * 4.
    assert caches.kv_bytes_per_token(quickstart_policy) == 2048


def test_rows_follow_from_free_memory(quickstart_policy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "free_bytes", lambda device: 10 * 2048 * 100)
    # 30 % of room for ten rows of 100 tokens.
    assert caches.rows_that_fit(quickstart_policy, 100) == 3
    assert caches.rows_that_fit(quickstart_policy, 50) == 6
    # A row that does not fit is tried all the same: the forecast is no proof that it fails.
    assert caches.rows_that_fit(quickstart_policy, 10**6) == 1


def test_the_engine_decodes_no_more_rows_side_by_side(
    quickstart_policy, random_prompts, requests_of, run_engine, monkeypatch: pytest.MonkeyPatch
):
    requests = requests_of(random_prompts(9, 4), 4, max_new_tokens=6)
    expected = run_engine(NativeEngine(quickstart_policy), requests)
    monkeypatch.setattr(caches, "free_bytes", lambda device: 10 * 2048 * (64 + 16))
    engine = NativeEngine(quickstart_policy)
    done = run_engine(engine, requests)
    assert engine._cache is not None and engine._cache.shape.rows == 3
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]


def test_what_torch_holds_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch):
    """After an update torch keeps most of a GPU's memory; a second cache would get one row else."""
    for name, value in {"mem_get_info": (100, 1000), "memory_reserved": 800, "memory_allocated": 300}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert caches.free_bytes(torch.device("cuda")) == 100 + 800 - 300
