"""What the libraries of a CPU run read from the environment when torch loads them."""

from __future__ import annotations

import os

# Kernels that oneDNN keeps compiled: by itself up to 1,024 of half a megabyte each, and a decoding step in
# bfloat16 brings two of sizes that do not come again.
KEPT_KERNELS = 64
# How often an idle OpenMP thread looks for work before it sleeps. By itself it looks for milliseconds, and a
# machine that has other work, a reward's process say, then slows a small model by tens of times. A short spin
# costs a few percent on an idle one.
_LOOKS = 2000


def settle() -> None:
    """Set what the user has not set; to be called before torch is imported."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_KERNELS))
    os.environ.setdefault("GOMP_SPINCOUNT", str(_LOOKS))
