"""Arrays of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray[Any, Any], device: torch.device | str) -> Tensor:
    """The array on the device. The host does not wait for a GPU: from pinned memory a copy is queued like a
    kernel, while one from other memory waits for all that was queued before."""
    host = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
