"""Arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.kernels.upload import upload


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory that is not pinned torch waits until the copy is done."""
    array, calls = np.arange(6, dtype=np.int32), []
    assert torch.equal(upload(array, "cpu"), torch.arange(6, dtype=torch.int32))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (calls.append("pinned"), self)[1])
    monkeypatch.setattr(Tensor, "to", lambda self, *given, **how: (calls.append((given, how)), self)[1])
    upload(array, "cuda:1")
    assert calls == ["pinned", (("cuda:1",), {"non_blocking": True})]
