"""Limits on the sizes in a model's config.json, checked before anything is built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.texts import tr

# The least and the most of a size: far above every model there is, and so few that what is made once for each
# is made in seconds.
_SIZES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), (1, 2_000)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), (1, 1_000_000)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), (1, 100_000)),
    "num_key_value_heads": (0, 100_000),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), (0, 10_000_000)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0, 10_000)),
    "vocab_size": (1, 100_000_000),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1_000_000_000)),
}


def impossible_size(config: Mapping[str, Any]) -> str | None:
    """The first size in a config.json that is out of range, in words; None if there is none.

    >>> str(impossible_size({"num_hidden_layers": 10**9}))
    'num_hidden_layers is 1000000000, but must be from 1 to 2,000'
    """
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, Mapping) else (config,):
        for name, (least, most) in _SIZES.items():
            value = part.get(name)
            # Some models have a size for each layer.
            for size in value if isinstance(value, list) else [value]:
                if size is None:
                    continue
                if isinstance(size, bool) or not isinstance(size, int):
                    return tr("{name} is {size!r:.60}, which is no whole number", name=name, size=size)
                if not least <= size <= most:
                    return tr(
                        "{name} is {size!r:.60}, but must be from {least} to {most:,}",
                        name=name,
                        size=size,
                        least=least,
                        most=most,
                    )
    return None
