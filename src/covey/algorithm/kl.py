"""Estimates of KL(policy || reference) per token.

Source: J. Schulman, "Approximating KL divergence" (2020), with d = reference - policy. Axis: N tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def k1(logprob_N: Tensor, ref_logprob_N: Tensor) -> Tensor:
    """-d: unbiased and of either sign. Its gradient has mean 0, so in a loss it holds nothing back."""
    return logprob_N - ref_logprob_N


def k2(logprob_N: Tensor, ref_logprob_N: Tensor) -> Tensor:
    """d^2 / 2: biased and never negative; on-policy its gradient is that of the divergence."""
    return 0.5 * (ref_logprob_N - logprob_N).square()


def k3(logprob_N: Tensor, ref_logprob_N: Tensor) -> Tensor:
    """exp(d) - d - 1: unbiased and, but for rounding, never negative.

    Written as expm1(d) - d, whose rounding error in float32 does not average below 0 for small d.
    """
    difference_N = ref_logprob_N - logprob_N
    return torch.expm1(difference_N) - difference_N


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""Every estimate by name: policy's and reference's logprobs (N,) to nats (N,)."""
