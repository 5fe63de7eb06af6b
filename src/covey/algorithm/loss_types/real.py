"""real: the completions of a group told apart by their scores (`covey.algorithm.contrast`).

Axes: S sequences of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.algorithm.loss_types.declare import Average, Loss
from covey.texts import tr

if TYPE_CHECKING:
    from torch import Tensor

    from covey.algorithm.losses import Terms


def _share(terms: Terms) -> Tensor:
    """This micro-batch's share: the value, and the gradient of each score times its derivative."""
    import torch

    from covey.algorithm.ratios import sequence_means

    inputs = terms.inputs
    assert inputs.contrast is not None, "real needs the sums of the whole step"
    log_ratio_N = inputs.logprob_N - terms.old_N
    score_S = sequence_means(log_ratio_N, inputs.sequence_N, inputs.trained_count_S)
    moved_S = score_S - score_S.detach()
    share_S = inputs.contrast.coefficient_S * moved_S + inputs.contrast.value_S
    return torch.where(inputs.trained_count_S > 0, share_S, 0.0).sum()


REAL = Loss(
    name="real",
    place=9,
    summary="classify the completions of a group",
    average=Average.TOKENS,
    share=_share,
    options=("real_tau",),
    ignores=(
        "importance_sampling_level",
        "top_entropy_quantile",
        "off_policy_sequence_mask_delta",
        "rollout_importance_sampling_mode",
        "vllm_importance_sampling_mode",
    ),
    derivative_at_1=None,
    by_group=True,
    per_completion=tr("which classifies each completion as good or not good as a whole"),
)
