"""The fullest forward pass of a configuration, and the bytes that it holds.

What autograd keeps of a decoder layer follows from the modules of transformers (`modeling_qwen2.py` and its
kin) and from covey's attention and head; a test holds the forecast to measured runs. Widths are elements, `e`
is the size of one in the dtype that is computed in; float32 takes 4 bytes whatever that is.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.options.schema import Config
from covey.plan.facts import Facts, ModelSizes
from covey.plan.recompute import Recompute
from covey.plan.shape import tokens_per_pass

FLOAT = 4
CLOSED_FORM = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose layers are known by the line; of any other twice their activations are counted."""

HEAD_BLOCK = {"cpu": (2048, 1 << 21), "gpu": (4096, 1 << 26)}
PREFILL_TOKENS = 16384
MAX_ROWS = 256
FLAT_PROMPT = 64
NOISE_BLOCK = 512
CACHE_SHARE = 0.3
STRIDE, MOST_RECORDINGS = 8, 48
STEP_FAMILIES, MOST_COPIED = frozenset({"llama", "mistral", "qwen2", "qwen3"}), 1 << 29
SENT_TOGETHER = 64 << 20
"""The limits of kernels/protocol.py, kernels/gpu, kernels/llama, rollout/noise.py, rollout/native/{engine,
caches,budget}.py and rollout/server/wire.py; a test holds them to these."""

_UNKNOWN_FAMILY = 2.0
_QUERY_NORMS = frozenset({"qwen3"})
_FROM_FIRST_NORM = ("q_proj", "k_proj", "v_proj")
_FROM_SECOND_NORM = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """A forward pass over rows of full length.

    tokens   of the stream; siblings share their prompt
    trained  tokens that are predicted
    keys     that attention gathers: every row has its prompt's beside its own
    cells    query-key pairs of the completions' masks
    later    whether an earlier pass of the same step has left gradients
    shared   tokens of a prompt that several passes go on from: its keys and values are kept for them
    """

    tokens: int
    trained: int
    keys: int
    cells: int
    later: bool
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of the configuration decides which activations are kept.

    `element` are the bytes of an element in the dtype that is computed in; `cuda` says where; `offload`
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


def pass_sizes(config: Config, facts: Facts, longest_prompt: int) -> list[PassSize]:
    """Return the passes that rows of every length up to the longest make, halving; one of them is the
    fullest.

    Short completions leave room for more rows, each with the keys of its whole prompt.
    """
    lengths = dict.fromkeys(max(1, config.max_completion_length >> n) for n in range(32))
    return [size for length in lengths for size in _passes(config, facts, longest_prompt, length)]


def _passes(config: Config, facts: Facts, prompt: int, completion: int) -> list[PassSize]:
    """The fullest pass of a step of such rows, and the smaller one after it where there are only the two."""
    model = facts.model_sizes
    on_cpu = None if facts.cuda or model is None else (model.hidden, model.layers)
    budget = tokens_per_pass(config, longest_prompt=prompt, cpu_model=on_cpu)
    of_step = config.per_device_train_batch_size * config.gradient_accumulation_steps
    group = max(1, min(config.num_generations, of_step))
    # Groups are whole, or alone in several passes.
    whole = budget // (prompt + group * completion) * group
    rows = min(whole or max(1, (budget - prompt) // completion), of_step)

    def holding(rows: int, *, later: bool) -> PassSize:
        prompts = -(-rows // group)
        return PassSize(
            tokens=prompts * prompt + rows * completion,
            trained=rows * completion,
            keys=prompts * prompt + rows * (prompt + completion),
            cells=rows * completion * (prompt + completion),
            shared=0 if whole else prompt,
            later=later,
        )

    if of_step >= 2 * rows or of_step == rows:
        return [holding(rows, later=of_step > rows)]
    return [holding(rows, later=False), holding(of_step - rows, later=True)]


def kept_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what the device holds for the backward pass when the head has been computed."""
    read = size.trained * model.hidden * training.element
    # Keys and values, and the sum of their gradients so far.
    kv = 2 * model.kv_heads * model.head_width
    read += model.layers * size.shared * kv * (training.element + FLOAT)
    if training.offload:
        return read
    layers = model.layers * kept_of_layer(model, size, training)
    return layers + mask_bytes(size, training) + size.tokens * _norm(model.hidden, training) + read


def kept_of_layer(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what is held of one decoder layer until its backward pass."""
    if training.recompute == "none":
        return layer_bytes(model, size, training)
    num_bytes = size.tokens * model.hidden * training.element
    if training.recompute == "selective":
        num_bytes += _product_bytes(model, size, training)
    return num_bytes


def mask_bytes(size: PassSize, training: Training) -> int:
    """Return what attention adds to the scores of completions, once for all layers, with what it is made
    of: a bool and an int64 a cell."""
    return size.cells * (training.element + 1 + 8)


def layer_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return what autograd holds of one decoder layer."""
    e = training.element
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    per_token = 2 * _norm(model.hidden, training) + _inputs(model, training)
    if model.family in _QUERY_NORMS:
        per_token += _norm(query + key, training)
    per_token += 3 * model.intermediate * e  # gate, silu(gate), up
    per_token += 2 * query * e + FLOAT * model.heads  # attention: gathered queries, output, log-sum-exp
    num_bytes = size.tokens * per_token + 2 * size.keys * key * e
    return num_bytes if model.family in CLOSED_FORM else round(_UNKNOWN_FAMILY * num_bytes)


def _product_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Outputs of a layer's matrix products and of its attention, which selective recomputation keeps."""
    query = model.heads * model.head_width
    outputs = _outputs(model)
    per_token = (sum(outputs.values()) + query) * training.element + FLOAT * model.heads
    if not training.full:
        adapted = [name for name in outputs if name in model.adapted]
        per_token += FLOAT * sum(outputs[name] + training.rank for name in adapted)
    num_bytes = size.tokens * per_token
    return num_bytes if model.family in CLOSED_FORM else round(_UNKNOWN_FAMILY * num_bytes)


def _outputs(model: ModelSizes) -> dict[str, int]:
    """Widths of what the linear layers of a decoder layer give."""
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    outputs = {"q_proj": query, "o_proj": model.hidden, "down_proj": model.hidden}
    outputs |= dict.fromkeys(("k_proj", "v_proj"), key)
    return outputs | dict.fromkeys(_FROM_SECOND_NORM, model.intermediate)


def working_bytes(model: ModelSizes, size: PassSize, training: Training) -> int:
    """Return the most that one layer takes at once without being kept: its MLP, or its attention."""
    e = training.element
    query, key = model.heads * model.head_width, model.kv_heads * model.head_width
    mlp = size.tokens * (2 * model.hidden + 3 * model.intermediate) * e
    attention = size.tokens * (2 * model.hidden + 4 * query + 2 * key) * e
    attention += 2 * size.keys * key * e
    num_bytes = max(mlp, attention)
    num_bytes = num_bytes if model.family in CLOSED_FORM else round(_UNKNOWN_FAMILY * num_bytes)
    # Each product dequantizes its weight.
    return num_bytes + (model.hidden * model.intermediate * e if training.packed_bits else 0)


def weight_bytes(model: ModelSizes, training: Training) -> int:
    """Return the bytes of the model's own weights as they compute."""
    packed = model.packable_parameters if training.packed_bits else 0
    return training.element * (model.parameters - packed) + int(training.packed_bits * packed / 8)


def _norm(width: int, training: Training) -> int:
    """Bytes a token of an RMSNorm: its input in float32, and normalised where the norm's weight is
    trained."""
    return width * (FLOAT + (training.element if training.full else 0))


def _inputs(model: ModelSizes, training: Training) -> int:
    """Bytes a token of the linear layers' inputs; a frozen layer without an adapter keeps none.

    An adapter in float32 on a layer of lower precision keeps a float32 copy of its own.
    """
    query = model.heads * model.head_width
    groups = (
        (model.hidden, _FROM_FIRST_NORM),
        (query, ("o_proj",)),
        (model.hidden, _FROM_SECOND_NORM),
        (model.intermediate, ("down_proj",)),
    )
    if training.full:
        return sum(width for width, _ in groups) * training.element
    num_bytes = 0
    for width, names in groups:
        adapted = sum(name in model.adapted for name in names)
        copies = min(adapted, 1) if training.element == FLOAT else adapted
        num_bytes += FLOAT * (copies * width + adapted * training.rank)
    if training.dora:
        outputs = _outputs(model).items()
        num_bytes += 2 * FLOAT * sum(width for name, width in outputs if name in model.adapted)
    return num_bytes


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """The logits that the head holds at once: of `tokens` tokens and `words` words of the vocabulary."""

    tokens: int
    words: int

    @property
    def num_bytes(self) -> int:
        """One block in float32."""
        return self.tokens * self.words * FLOAT


def head_block(model: ModelSizes, trained: int, *, cuda: bool) -> HeadBlock:
    """Return the block that models/head.py chooses for so many trained tokens."""
    tokens, cells = HEAD_BLOCK["gpu" if cuda else "cpu"]
    tokens = max(1, min(trained, max(tokens, cells // model.vocabulary)))
    return HeadBlock(tokens, min(model.vocabulary, max(1, cells // tokens)))
