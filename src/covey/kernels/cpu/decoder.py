"""A sampler's forward pass through a model of the Llama family in one call, in float32 or bfloat16 on a CPU.

The C functions of this folder read the weights where the learner has them, and copy them only where
they are few. A row's result does not depend, to the bit, on what it is batched with.

Axes: n tokens, T tokens of a prefill, E model width, D head width, P positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.kernels.cpu.calls import (
    NORMS,
    PRODUCTS,
    SPANS,
    DrawCall,
    Functions,
    Layer,
    Model,
    PanelCopy,
    TokenCall,
    Weight,
)
from covey.kernels.cpu.library import INT, POINTER, address
from covey.kernels.draws import Drawn
from covey.kernels.llama.weights import Linear, Llama, llama, weights_of
from covey.kernels.protocol import Cache, CacheLayout, DrawInputs, SampledModel, Spans, StepLayout

# Columns that a product takes at a time, and a multiple of every vector's width.
_COLUMNS, _ALIGNED = 4, 64
# Weights of all layers up to which a copy that lies as the products read it is worth its memory.
_PANELLED = 1 << 23
# The vocabulary up to which a copy of the head is made, too.
_SMALL_VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class _Products:
    """Linear layers as the library takes them; `kept` are the panels and biases that were made for it,
    `copies` the panels with their weights."""

    layers: tuple[Mapping[str, Any], ...]
    head: Any
    kept: list[Tensor]
    copies: Any


@dataclass(frozen=True, slots=True)
class CompiledLlama:
    """As `Decoder` says: a policy's weights where they are, and the cosines and sines of every position,
    (P, 1, D).

    `draws` says whether `draw` serves the policy, whose logits are plain products.
    `addresses` are where the weights are.
    """

    functions: Functions
    policy: SampledModel
    weights: Llama
    products: _Products
    norms: tuple[Mapping[str, Tensor | None], ...]
    last_norm: Tensor
    cos_P1D: Tensor
    sin_P1D: Tensor
    draws: bool
    addresses: Sequence[int]
    models: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    is_compiled = True

    @property
    def sampler(self) -> CompiledLlama | None:
        """Return this decoder if it draws tokens itself, else None."""
        return self if self.draws else None

    def serves(self, weights: Sequence[Tensor], num_positions: int) -> bool:
        """Whether these are the weights it was made of. In bfloat16 it has copies that `refresh` leaves."""
        is_read = all(weight.dtype == torch.float32 for weight in weights)
        is_same = self.addresses == [weight.data_ptr() for weight in weights]
        return is_read and is_same and len(self.cos_P1D) >= num_positions

    def refresh(self) -> None:
        """Copy the weights anew where they are copied, after a step of the optimizer; forget the caches."""
        self.models.clear()
        copies = self.products.copies
        self.functions.lay_panels(INT(len(copies)), ctypes.byref(copies), INT(torch.get_num_threads()))

    def hidden(self, tokens_n: Tensor, positions_n: Tensor, layout: CacheLayout) -> Tensor:
        """As the protocol says."""
        spans = layout.spans(positions_n)
        if spans is None:
            return self.policy.hidden(tokens_n, positions_n, layout)
        model = self._model(layout.cache)
        hidden_nE = self.cos_P1D.new_empty(tokens_n.shape[0], model.width)
        self._refuse_out_of_bounds(model, tokens_n, positions_n, spans, layout.longest)
        tokens, _kept = self._token_call(model, tokens_n, positions_n, spans, hidden_nE, layout.longest)
        self.functions.step(ctypes.byref(model), ctypes.byref(tokens))
        return hidden_nE.to(self.weights.embedding.dtype)

    def draw(self, hidden_nE: Tensor, inputs: DrawInputs) -> Drawn:
        """As the protocol says."""
        token_1n, logprob_1n, call, _kept = self._draw_call(hidden_nE.float(), inputs, 1)
        self.functions.draw(ctypes.byref(call))
        return Drawn(token_1n[0], logprob_1n[0])

    def decode(
        self, tokens_b: Tensor, positions_b: Tensor, layout: StepLayout, inputs: DrawInputs, most: int
    ) -> Drawn:
        """As the protocol says; what `hidden` and `draw` give one by one."""
        spans = layout.spans(positions_b)
        model = self._model(layout.cache)
        self._refuse_out_of_bounds(model, tokens_b, positions_b, spans, layout.longest + most, most)
        hidden_bE = self.cos_P1D.new_empty(tokens_b.shape[0], model.width)
        fed = tokens_b.clone(), positions_b.clone()
        tokens, _buffers = self._token_call(model, *fed, spans, hidden_bE, layout.longest + most)
        token_kn, logprob_kn, call, _kept = self._draw_call(hidden_bE, inputs, most)
        done = self.functions.decode(*map(ctypes.byref, (model, tokens, call)), INT(most))
        return Drawn(token_kn[:done], logprob_kn[:done])

    def copy_rows(self, cache: Cache, sources: Sequence[int], targets: Sequence[int], columns: range) -> None:
        """As the protocol says."""
        rows = (INT * (2 * len(sources)))(*sources, *targets)
        second = ctypes.byref(rows, len(sources) * ctypes.sizeof(INT))
        span = INT(columns.start), INT(len(columns))
        model = self._model(cache)
        if columns.start < 0 or columns.stop > model.own_columns:
            raise IndexError(f"columns {columns.start} to {columns.stop} of {model.own_columns}")
        if not all(0 <= row < model.own_slots for row in (*sources, *targets)):
            raise IndexError(f"rows {sources} to {targets}, and the cache has {model.own_slots}")
        self.functions.copy_rows(ctypes.byref(model), INT(len(sources)), ctypes.byref(rows), second, *span)

    def _refuse_out_of_bounds(
        self,
        model: Any,
        tokens_n: Tensor,
        positions_n: Tensor,
        spans: Spans,
        longest: int,
        more: int = 1,
    ) -> None:
        """IndexError where the library would read or write beyond what it is given, of the next `more` tokens
        of each row, which see `longest` at most; it does not look itself."""
        num = tokens_n.shape[0]
        if any(getattr(spans, name).shape[0] != num for name in SPANS) or positions_n.shape[0] != num:
            raise IndexError(f"{num} tokens, and their spans are of another number")
        if not num:
            return
        own_n, prompt_n = spans.row_first + spans.row_count, spans.slot_first + spans.slot_count
        # A prompt's tokens go to its slot and leave the rows alone.
        in_row = torch.where(spans.row_count > 0, own_n + (more - 1), 0)
        limits = (
            ("token", tokens_n, self.weights.embedding.shape[0] - 1),
            ("position", positions_n, self.cos_P1D.shape[0] - more),
            ("prompt slot", spans.slot, model.prefix_slots - 1),
            ("column of a prompt", prompt_n, model.prefix_columns),
            ("row", spans.row, model.own_slots - 1),
            ("column of a row", in_row, model.own_columns),
            ("first column of a prompt", spans.slot_first, model.prefix_columns),
            ("first column of a row", spans.row_first, model.own_columns),
            ("tokens of a prompt", spans.slot_count, longest),
            ("tokens of a row", spans.row_count, longest),
            ("tokens that one sees", spans.slot_count + spans.row_count + (more - 1), longest),
        )
        least, most = torch.stack([value for _, value, _ in limits]).aminmax(dim=1)
        for (name, _, limit), low, high in zip(limits, least.tolist(), most.tolist(), strict=True):
            if low < 0 or high > limit:
                raise IndexError(f"{name} {low} to {high}, and the limit is {limit}")

    def _token_call(
        self, model: Any, tokens_n: Tensor, positions_n: Tensor, spans: Spans, hidden_nE: Tensor, longest: int
    ) -> tuple[Any, object]:
        """New tokens that see `longest` others at most, and what has to live as long as they."""
        number, threads = tokens_n.shape[0], torch.get_num_threads()
        longest = -(-longest // _ALIGNED) * _ALIGNED
        every = (model.heads + 2 * model.key_heads) * model.head_width
        sizes = {
            "heads": number * every,
            "attended": number * model.heads * model.head_width,
            "gate": number * model.inner,
            "up": number * model.inner,
            "normed": threads * number * model.width,
            "scores": threads * longest,
        }
        buffers = hidden_nE.new_empty(sum(sizes.values())).split(list(sizes.values()))
        addresses = {name: part.data_ptr() for name, part in zip(sizes, buffers, strict=True)}
        tokens = TokenCall(
            number=number,
            token=tokens_n.data_ptr(),
            position=positions_n.data_ptr(),
            hidden=hidden_nE.data_ptr(),
            scores_width=longest,
            threads=threads,
            **{name: getattr(spans, name).data_ptr() for name in SPANS},
            **addresses,
        )
        return tokens, buffers

    def _draw_call(
        self, hidden_bE: Tensor, draws: DrawInputs, most: int
    ) -> tuple[Tensor, Tensor, Any, object]:
        """Where ids and logprobs of so many draws go, (most, n) each; the draws, and what has to live as long
        as they."""
        number, states, threads = draws.key_n.shape[0], hidden_bE.shape[0], torch.get_num_threads()
        vocab = draws.table_V.shape[0]
        shared_n, lead_b = draws.shared_n, draws.lead_b
        if (states if shared_n is None else int(shared_n.max()) + 1) > states or (
            (number if lead_b is None else int(lead_b.max()) + 1) > number
        ):
            raise IndexError(f"{number} rows draw from {states} states, and one is beyond them")
        room = -(-vocab // _ALIGNED) * _ALIGNED
        logits_XV = hidden_bE.new_empty(states + (threads if draws.shared_n is not None else 0), room)
        logprob_kn, token_kn = hidden_bE.new_empty(most, number), draws.key_n.new_empty(most, number)
        position_n, stop_s = draws.position_n.clone(), torch.tensor(draws.stops, dtype=torch.int64)
        found = DrawCall(
            number=number,
            states=states,
            width=hidden_bE.shape[1],
            vocab=vocab,
            stops=len(draws.stops),
            threads=threads,
            head=ctypes.addressof(self.products.head),
            hidden=hidden_bE.data_ptr(),
            temperature=draws.temperature_n.data_ptr(),
            key=draws.key_n.data_ptr(),
            table=draws.table_V.data_ptr(),
            shared=address(draws.shared_n),
            lead=address(draws.lead_b),
            stop=stop_s.data_ptr(),
            position=position_n.data_ptr(),
            token=token_kn.data_ptr(),
            logits=logits_XV.data_ptr(),
            logprob=logprob_kn.data_ptr(),
        )
        return token_kn, logprob_kn, found, (hidden_bE, logits_XV, position_n, stop_s)

    def logits(self, hidden_nE: Tensor) -> Tensor:
        """Float32 logits (n, V), as `SampledModel.logits`."""
        output: Any = self.policy.model.get_output_embeddings()  # type: ignore[operator]
        return self.policy.logits_of(self._product(hidden_nE, output.weight))

    def _product(self, hidden_nE: Tensor, weight_VE: Tensor) -> Tensor:
        hidden_nE = hidden_nE.float()
        number, (vocab, width) = hidden_nE.shape[0], weight_VE.shape
        out_nV = hidden_nE.new_empty(number, vocab)
        self.functions.multiply_rows(
            *(INT(number), POINTER(hidden_nE.data_ptr()), INT(width)),
            *(ctypes.byref(self.products.head), POINTER(out_nV.data_ptr()), INT(vocab)),
            INT(torch.get_num_threads()),
        )
        return out_nV

    def _model(self, cache: Cache) -> Any:
        if id(cache) in self.models:
            return self.models[id(cache)][0]
        known = self.weights
        layers = (Layer * len(known.layers))()
        width, key_heads = known.head_width, known.layers[0].heads[1].weight.shape[0] // known.head_width
        like = known.embedding.new_empty(1, key_heads, 0, width)
        prefix = own = like
        for number, (products, norms) in enumerate(zip(self.products.layers, self.norms, strict=True)):
            prefix, own = cache.tensors(number, like)
            layers[number] = Layer(
                **products,
                **{name: address(norm) for name, norm in norms.items()},
                prefix=prefix.data_ptr(),
                own=own.data_ptr(),
            )
        model = Model(
            layers=len(known.layers),
            width=known.embedding.shape[1],
            heads=known.layers[0].heads[0].weight.shape[0] // width,
            key_heads=key_heads,
            head_width=width,
            inner=known.layers[0].down.weight.shape[1],
            epsilon=known.epsilon,
            scaling=known.scaling,
            embedding=known.embedding.data_ptr(),
            norm=self.last_norm.data_ptr(),
            cosines=self.cos_P1D.data_ptr(),
            sines=self.sin_P1D.data_ptr(),
            layer=ctypes.addressof(layers),
            prefix_slots=prefix.shape[1],
            prefix_columns=prefix.shape[3],
            own_slots=own.shape[1],
            own_columns=own.shape[3],
        )
        self.models[id(cache)] = model, layers, cache
        return model


def _products(library: ctypes.CDLL, known: Llama, head: Linear) -> _Products:
    """Every linear layer; those of a small model with room for a copy of their weights in panels."""
    width = library.panel_width()
    kept: list[Tensor] = []
    copies: list[Any] = []

    def product(part: Linear, *, is_few: bool = True) -> Any:
        rows, columns = part.weight.shape
        bias = panels = None
        if part.bias is not None:
            bias = part.bias.float()
            kept.append(bias)
        if is_few and known.size <= _PANELLED and rows % width == 0:
            panels = torch.empty(part.weight.shape)
            copies.append(PanelCopy(address(part.weight), address(panels), rows, columns))
            kept.append(panels)
        return Weight(*(address(tensor) for tensor in (part.weight, bias, panels)))

    layers = [
        {name: product(part) for name, part in zip(PRODUCTS, layer.products, strict=True)}
        for layer in known.layers
    ]
    last = product(head, is_few=head.weight.shape[0] <= _SMALL_VOCABULARY)
    return _Products(tuple(layers), last, kept, (PanelCopy * len(copies))(*copies))


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


@torch.inference_mode()
def compiled_llama(
    library: ctypes.CDLL, policy: SampledModel, num_positions: int, former: CompiledLlama | None = None
) -> CompiledLlama | None:
    """The decoder of a policy whose model `llama` recognises, in float32 or bfloat16 on a CPU, for
    positions up to `num_positions`; None for any other. A `former` one of the same weights is brought up to
    date and kept."""
    known = llama(policy.model)
    if known is None or policy.device.type != "cpu":
        return None
    output: Any = policy.model.get_output_embeddings()  # type: ignore[operator]
    head = Linear(output.weight, getattr(output, "bias", None))
    weights = [*weights_of(known), head.weight, *([] if head.bias is None else [head.bias])]
    if former is not None and former.serves(weights, num_positions):
        former.refresh()
        return former
    parts = [head, *(part for layer in known.layers for part in layer.products)]
    dtype = known.embedding.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    if any(w.dtype != dtype or not w.is_contiguous() for w in weights):
        return None
    if any(weight.untyped_storage().nbytes() == 0 for weight in weights):
        # Of a policy whose weights are elsewhere there is nothing to read.
        return None
    if any(part.weight.shape[0] % _COLUMNS for part in parts) or known.head_width % 2:
        return None
    functions = Functions.of(library, dtype)
    spec = policy.head
    cos_P1D, sin_P1D = known.rotations(known.embedding, torch.arange(num_positions))
    is_plain = spec.scale == 1.0 and spec.softcap is None and not spec.banned
    made = CompiledLlama(
        functions,
        policy,
        known,
        _products(library, known, head),
        tuple({name: _float(getattr(layer, name)) for name in NORMS} for layer in known.layers),
        known.norm.float(),
        cos_P1D.float().contiguous(),
        sin_P1D.float().contiguous(),
        draws=is_plain,
        addresses=[weight.data_ptr() for weight in weights],
    )
    made.refresh()
    return made
