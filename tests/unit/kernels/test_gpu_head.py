"""The kernels of the head on a GPU: what Triton's interpreter computes of them, and that they compile."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# For an A100 and an H100, in both dtypes; nothing of a GPU is needed for it.
COMPILE = """
from covey.kernels.gpu import head
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for capability in (80, 90):
    for dtype in ("*bf16", "*fp32"):
        pointers = ("factor", "sums", "normaliser", "by_context", "entropy", "by_entropy")
        types = dict.fromkeys(pointers, "*fp32") | {"products": dtype, "contexts": "i32", "columns": "i32"}
        for kernel, constants in ((head._add_block, {"width": 4096}),
                                  (head._differentiate, {"width": 4096, "has_entropy": True})):
            signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants)
            made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            assert ".local" not in made.asm["ptx"], "registers are spilled"
            print(kernel.__name__, capability, dtype)
"""


def run(words: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_as_triton_interprets_them():
    file = str(Path(__file__).with_name("interpreted_head.py"))
    said = run(["-m", "pytest", "-p", "no:cacheprovider", "-n", "0", file], TRITON_INTERPRET="1")
    assert " passed" in said


def test_they_compile_for_gpus_that_are_not_here(tmp_path):
    said = run(["-c", COMPILE], TRITON_CACHE_DIR=str(tmp_path))
    assert len(said.splitlines()) == 8
