"""What a forward pass keeps for the backward pass: everything, or less, computed again or held elsewhere.

Recomputation calls a decoder layer once more with the arguments it had, the layout of the stream among them,
so that it sees the same rows whenever and on whichever thread it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from covey.plan.recompute import Recompute

_aten = torch.ops.aten
# Outputs that selective recomputation keeps: linear layers, and attention whose scores are never held.
# Products of eager attention are batched (bmm) and as large as its scores; they are computed again. So are
# experts, to whose output some models add in place, and compiled flex attention and attention in C, which the
# policy cannot see into.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
# Operators that a build may lack, by name: of the packages flash-attn and bitsandbytes, products of
# `kernels.products`.
_KEPT_NAMES = (
    *("flash_attn._flash_attn_varlen_forward.", "mkldnn._linear_pointwise.", "covey.widened_linear."),
    "bitsandbytes.gemm_4bit.",
)

# Tensors below this stay where they are: moving them costs more than they take.
_MOVED_BYTES = 1 << 20


def set_recompute(model: nn.Module, kind: Recompute) -> None:
    """Set which activations of a model of transformers are computed again in the backward pass."""
    owner: Any = model
    if kind == "none":
        # transformers 5.23 renames both methods; the older names are what 5.17 has.
        disable = getattr(owner, "activation_checkpointing_disable", None)
        (disable or owner.gradient_checkpointing_disable)()
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps)
    enable = getattr(owner, "activation_checkpointing_enable", None)
    (enable or owner.gradient_checkpointing_enable)(how)
    # transformers and peft hook the embedding, so that its output needs gradients. Recomputation as above
    # does without, and a model with a hook is not sampled from by the short step.
    owner.disable_input_require_grads()


def _keeps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in _KEPT or str(operator).startswith(_KEPT_NAMES):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def offloaded(model: nn.Module) -> Iterator[None]:
    """Within it a forward pass keeps its activations in the machine's memory.

    Weights are kept for the backward pass too, and stay where they are. Copies go through pinned memory.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(kept: Tensor) -> tuple[torch.device, Tensor]:
        is_small = kept.numel() * kept.element_size() < _MOVED_BYTES
        if is_small or kept.is_sparse or kept.untyped_storage().data_ptr() in weights:
            return kept.device, kept
        # With the strides of the original, so that products add in the same order.
        away = torch.empty_like(kept, device="cpu", pin_memory=kept.is_cuda)
        return kept.device, away.copy_(kept, non_blocking=kept.is_cuda)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, kept = packed
        return kept.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
