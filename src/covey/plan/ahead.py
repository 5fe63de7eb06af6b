"""What samples ahead of the training where no server is named."""

from __future__ import annotations

import os

from covey.options.schema import Config


def samples_apart(config: Config) -> bool:
    """Whether the run starts a server of its own on this machine."""
    return config.is_ahead and not config.rollout_servers and not config.use_vllm


def cores_of(num_processes: int) -> tuple[int, int]:
    """The cores of each training process and of the server beside them, without GPUs: half of the machine's
    for sampling."""
    cores = os.cpu_count() or 1
    there = max(1, cores // 2)
    return max(1, (cores - there) // num_processes), there
