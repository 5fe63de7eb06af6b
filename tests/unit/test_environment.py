"""What covey sets in the environment for torch and its libraries."""

from __future__ import annotations

import logging
import os
import sys

import pytest

from covey.environment import KEPT_KERNELS, fix_segments, settle

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "GOMP_SPINCOUNT", "TORCH_CUDNN_SDPA_DEPRIORITIZED")


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "7")


def test_what_the_user_has_set_stays():
    settle()
    assert [os.environ[name] for name in NAMES] == ["7", "7", "7"]


def test_what_is_not_set_is_set(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name)
    settle()
    assert os.environ[NAMES[0]] == str(KEPT_KERNELS) and int(os.environ[NAMES[1]]) > 0
    assert os.environ[NAMES[2]] == "1"


@pytest.mark.parametrize("theirs", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_memory_of_a_gpu_grows_in_segments_unless_the_user_says_how(theirs, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64")
        if name != theirs:
            monkeypatch.delenv(name)
    settle()
    found = {n: os.environ.get(n) for n in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
    asked = {theirs: "max_split_size_mb:64"} if theirs else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert {n: v for n, v in found.items() if v} == asked


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({}, ("PYTORCH_ALLOC_CONF", "expandable_segments:False")),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
            ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False"),
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:False"),
        ),
    ],
)
def test_vllm_that_sleeps_has_segments_of_fixed_size(typed, expected, monkeypatch):
    """What the user has set beside stays, in the variable that torch reads."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, typed.get(name, ""))
        if name not in typed:
            monkeypatch.delenv(name)
    settle()
    assert fix_segments() == os.environ[expected[0]] == expected[1]


def test_deepspeed_warns_nobody_on_standard_output(capsys):
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler := logging.StreamHandler(sys.stdout))
    settle()
    logger.warning("Setting accelerator to CPU.")
    logger.error("It cannot go on.")
    logger.removeHandler(handler)
    assert capsys.readouterr().out == "It cannot go on.\n"
