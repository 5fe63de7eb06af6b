"""The fullest forward pass of a configuration, and the bytes that it holds.

What autograd keeps of a decoder layer follows from the modules of transformers (`modeling_qwen2.py` and its
kin) and from covey's attention and head; the layers of other families are taken for such. A test holds the
forecast to measured runs. Widths are elements, `e` is
the size of one in the dtype that is computed in; float32 takes 4 bytes whatever that is.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.options.schema import Config
from covey.plan.facts import Facts, ModelSizes
from covey.plan.recompute import Recompute
from covey.plan.shape import tokens_per_pass

FLOAT = 4
HEAD_CELLS = {"cpu": 1 << 21, "gpu": 1 << 26}
PREFILL_TOKENS = 16384
MAX_ROWS = 256
FLAT_PROMPT = 64
CACHE_SHARE = 0.3
"""Limits of kernels/protocol.py and rollout/native/{engine,caches}.py; a test holds them to these."""

_QUERY_NORMS = frozenset({"qwen3"})
# Blocks of logits that are there at once.
_HEAD_BLOCKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """A forward pass over rows of full length.

    tokens   of the stream; siblings share their prompt
    trained  tokens that are predicted
    cells    query-key pairs of the completions' masks
    later    whether an earlier pass of the same step has left gradients
    shared   tokens of a prompt that several passes go on from: its keys and values are kept for them
    """

    tokens: int
    trained: int
    cells: int
    later: bool
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of the configuration decides which activations are kept.

    `element` are the bytes of an element in the dtype that is computed in; `full` says that there is no
    adapter, `frozen_text` that the language model is frozen then; `cuda` says where; `offload`
    that what is kept leaves the GPU. In one process it `absorbs`: each gradient of lower precision is added
    to the float32 one, and let go, as soon as it is there. Quantized weights have `packed_bits` each, 0 where
    there are none.
    """

    element: int
    full: bool
    recompute: Recompute
    rank: int
    dora: bool
    cuda: bool
    offload: bool
    absorbs: bool = False
    packed_bits: float = 0.0
    frozen_text: bool = False

    @property
    def trains_text(self) -> bool:
        """Return whether the language model's own layer weights are trained."""
        return self.full and not self.frozen_text


def fullest_pass(config: Config, facts: Facts, prompt: int) -> PassSize:
    """Return the fullest pass of a step whose rows all have the longest prompt and completion."""
    model, completion = facts.model.sizes, config.most_tokens
    on_cpu = None if facts.machine.cuda or model is None else (model.hidden, model.layers)
    budget = tokens_per_pass(config, longest_prompt=prompt, cpu_model=on_cpu)
    of_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
    group = max(1, min(config.num_generations, of_step))
    # Groups are whole, or alone in several passes.
    whole = budget // (prompt + group * completion) * group
    rows = min(whole or max(1, (budget - prompt) // completion), of_step)
    prompts = -(-rows // group)
    return PassSize(
        tokens=prompts * prompt + rows * completion,
        trained=rows * completion,
        cells=rows * completion * (prompt + completion),
        shared=0 if whole else prompt,
        later=of_step > rows,
    )


def kept_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what the device holds for the backward pass when the head has been computed."""
    read = size.trained * model.hidden * training.element
    # Keys and values, and the sum of their gradients so far.
    read += size.shared * key_bytes(model, training.element + FLOAT)
    if training.offload:
        return read
    layers = model.layers * kept_of_layer(model, size, training)
    last_norm = size.tokens * model.hidden * (FLOAT + (training.element if training.trains_text else 0))
    return layers + mask_bytes(size, training) + last_norm + read


def kept_of_layer(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what is held of one decoder layer until its backward pass: its input, and with selective
    recomputation what its matrix products and its attention give."""
    if training.recompute == "none":
        return layer_bytes(model, size, training)
    per_token = model.hidden * training.element
    if training.recompute == "selective":
        linears = _linears(model)
        outputs = sum(out for _, out in linears.values())
        per_token += (outputs + model.heads * model.head_width) * training.element + FLOAT * model.heads
        if not training.full:
            per_token += FLOAT * sum(linears[name][1] + training.rank for name in _adapted(model))
    return size.tokens * per_token


def mask_bytes(size: PassSize, training: Training) -> int:
    """Return what attention adds to the scores of completions, once for all layers, with what it is made
    of: a bool and an int64 a cell."""
    return size.cells * (training.element + 1 + 8)


def layer_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what autograd holds of one decoder layer.

    Norms keep their input in float32, and what they give where their weight is trained; linear layers their
    input where they are trained, an adapter a float32 copy of it; a gated MLP three outputs; attention the
    queries, keys and values, its output and a log-sum-exp.
    """
    e = training.element
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    normed = 2 * model.hidden + (query + key if model.family in _QUERY_NORMS else 0)
    per_token = normed * (FLOAT + (e if training.trains_text else 0))
    per_token += 3 * model.intermediate * e + 2 * query * e + FLOAT * model.heads
    if training.trains_text:
        per_token += (2 * model.hidden + query + model.intermediate) * e
    for width, out in (_linears(model)[name] for name in _adapted(model) if not training.full):
        per_token += FLOAT * (width + training.rank + (2 * out if training.dora else 0))
    return size.tokens * (per_token + 2 * key * e)


def _linears(model: ModelSizes) -> dict[str, tuple[int, int]]:
    """Widths of the inputs and outputs of a decoder layer's linear layers."""
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    return {
        "q_proj": (model.hidden, query),
        "k_proj": (model.hidden, key),
        "v_proj": (model.hidden, key),
        "o_proj": (query, model.hidden),
        "gate_proj": (model.hidden, model.intermediate),
        "up_proj": (model.hidden, model.intermediate),
        "down_proj": (model.intermediate, model.hidden),
    }


def _adapted(model: ModelSizes) -> list[str]:
    """Those of them that have an adapter."""
    return [name for name in _linears(model) if name in model.adapted]


def working_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return the most that one layer takes at once without being kept: its MLP, or its attention."""
    e = training.element
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    mlp = size.tokens * (2 * model.hidden + 3 * model.intermediate) * e
    attention = size.tokens * (2 * model.hidden + 4 * query + 4 * key) * e
    # Each product dequantizes its weight.
    return max(mlp, attention) + (model.hidden * model.intermediate * e if training.packed_bits else 0)


def key_bytes(model: ModelSizes, element: int) -> int:
    """Return the bytes of the keys and values of a token in all layers."""
    return 2 * model.layers * model.kv_heads * model.head_width * element


def outer_parameters(model: ModelSizes) -> int:
    """Return the weights of the embedding, and of the head where it has its own."""
    return model.vocabulary * model.hidden * (1 if model.tied else 2)


def weight_bytes(model: ModelSizes, training: Training) -> int:
    """Return the bytes of the model's own weights as they compute."""
    packed = model.packable_parameters if training.packed_bits else 0
    return training.element * (model.parameters - packed) + int(training.packed_bits * packed / 8)


def head_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what the head works with: blocks of logits in float32, and the gradient of the hidden states."""
    cells = min(size.trained * model.vocabulary, HEAD_CELLS["gpu" if training.cuda else "cpu"])
    low = training.element if training.element != FLOAT else 0
    return _HEAD_BLOCKS * FLOAT * cells + size.trained * model.hidden * (FLOAT + low)
