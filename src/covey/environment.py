"""What torch and its libraries read from the environment when they load."""

from __future__ import annotations

import logging
import os

# Kernels that oneDNN keeps compiled: by itself up to 1,024 of half a megabyte each, and a decoding step in
# bfloat16 brings two of sizes that do not come again.
KEPT_KERNELS = 64
# How often an idle OpenMP thread looks for work before it sleeps. By itself it looks for milliseconds, and a
# machine that has other work, a reward's process say, then slows a small model by tens of times. A short spin
# costs a few percent on an idle one.
_LOOKS = 2000
# torch takes cuDNN's attention first on newer GPUs, which builds a plan for every shape that it meets: half a
# second for each new length of prompts. Its other kernels take any shape.
_CUDNN_LAST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
# The names of torch's settings of its allocator, new and old.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SEGMENTS = "expandable_segments"


def settle() -> None:
    """Set what the user has not set; to be called before torch is imported."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_KERNELS))
    os.environ.setdefault("GOMP_SPINCOUNT", str(_LOOKS))
    os.environ.setdefault(_CUDNN_LAST, "1")
    # A GPU's memory in segments that grow: rollout and update ask for blocks of other sizes, and fixed
    # segments of the one would be lost to the other. torch reads the first name, else the second.
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = f"{_SEGMENTS}:True"
    silence_libraries()


def fix_segments() -> str:
    """Have a GPU's memory in segments of fixed size, as vLLM's sleep mode needs it, whatever the user has set
    beside; returns torch's settings of its allocator. To be called before a GPU is used."""
    name = next((name for name in _ALLOCATOR if os.environ.get(name)), _ALLOCATOR[0])
    fields = [field.strip() for field in os.environ.get(name, "").split(",")]
    others = [field for field in fields if field and not field.startswith(_SEGMENTS)]
    os.environ[name] = ",".join([*others, f"{_SEGMENTS}:False"])
    return os.environ[name]


# DeepSpeed warns on standard output, where `--json` writes, as soon as transformers imports it; bitsandbytes
# of a faster product on CPUs that it could not load, whenever peft imports it.
_TALKATIVE = ("DeepSpeed", "bitsandbytes.backends.cpu.ops")


def silence_libraries() -> None:
    """Print of libraries that warn as they are imported nothing but errors."""
    for logger in map(logging.getLogger, _TALKATIVE):
        if _is_error not in logger.filters:
            logger.addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
