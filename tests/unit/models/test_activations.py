"""Recomputed and offloaded activations: the same loss and gradient, and less of them kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from covey.kernels.llama.decoder import llama_decoder
from covey.kernels.torch_.kernels import TorchKernels
from covey.models import activations
from covey.models.adapter_shapes import LoraSettings
from covey.models.lora import add_adapter, merged
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.plan import activations as forecast
from covey.plan.facts import ModelSizes

KINDS = ("none", "selective", "full")


class Counter(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def value_and_gradients(policy: Policy, rows: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Counter]:
    """Logprobs, the gradients of every weight, and what the backward pass called."""
    policy.train().zero_grad(set_to_none=True)
    torch.manual_seed(0)  # GPT-2 has dropout
    logprob = policy(micro_of(rows, policy.stream, policy.device)).logprob_N
    loss = logprob.square().sum()
    with Counter() as counter:
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return logprob.detach(), gradients, counter


@pytest.mark.parametrize("stream", ["padded", "packed", "prefix"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "mixtral", "gpt_oss"])
def test_bit_for_bit(family, stream, tiny_model, random_rows):
    rows = random_rows((11, (9, 4, 1)), (5, (8, 2)))
    policy = Policy(tiny_model(family), stream=stream)
    results = {}
    for kind in KINDS:
        policy.keep_activations(kind)
        assert policy.recompute == kind
        results[kind] = value_and_gradients(policy, rows)
    logprob, gradients, plain = results["none"]
    assert len(gradients) == len(list(policy.model.parameters()))
    for kind in ("selective", "full"):
        again, found, counter = results[kind]
        assert torch.equal(again, logprob)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(found[name], gradient), name
        assert sum(counter.calls.values()) > sum(plain.calls.values())
    # Selective recomputation repeats no linear layer; whole layers repeat all of them.
    products = {k: results[k][2].calls.get("mm", 0) + results[k][2].calls.get("addmm", 0) for k in KINDS}
    assert products["none"] == products["selective"] < products["full"]


def test_the_output_of_flash_attn_is_kept():
    """Its kernel is an operator whose name is all that is known here."""
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define("_flash_attn_varlen_forward(Tensor q) -> Tensor")
    kernel = torch.ops.flash_attn._flash_attn_varlen_forward.default
    assert activations._keeps(None, kernel) is CheckpointPolicy.MUST_SAVE
    assert activations._keeps(None, torch.ops.aten.bmm.default) is CheckpointPolicy.PREFER_RECOMPUTE
    library._destroy()


def test_the_layout_survives(tiny_model, random_rows):
    """Two forward passes before their backward passes: each is computed again under its own layout."""
    policy = Policy(tiny_model("llama"))
    first, second = random_rows((11, (9, 4, 1)), seed=1), random_rows((3, (2, 8)), (4, (5,)), seed=2)
    results = []
    for kind in KINDS:
        policy.keep_activations(kind)
        policy.train().zero_grad(set_to_none=True)
        losses = [policy(micro_of(r, "prefix", policy.device)).logprob_N.sum() for r in (first, second)]
        (losses[0] * 2.0 + losses[1]).backward()
        results.append({n: p.grad.clone() for n, p in policy.named_parameters()})
    for found in results[1:]:
        assert all(torch.equal(found[n], g) for n, g in results[0].items())


def kept_bytes(policy: Policy, micro: Any) -> int:
    """Bytes of what a forward pass keeps, each storage once, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage
        return tensor

    class Kept(TorchDispatchMode):
        """Also what selective recomputation keeps in a store of its own."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if policy.recompute == "selective" and func in activations._KEPT:
                for tensor in out if isinstance(out, tuple) else (out,):
                    pack(tensor)
            return out

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Kept():
        loss = policy(micro).logprob_N.sum()
    del loss
    return sum(s.nbytes() for s in held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_share_that_selective_recomputation_keeps(family, dtype, random_rows):
    sizes = {"vocab_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
    if family == "qwen3":
        config: Any = transformers.Qwen3Config(
            hidden_size=64, intermediate_size=192, num_key_value_heads=4, head_dim=16, **sizes
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=128, intermediate_size=344, num_key_value_heads=8, **sizes
        )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    policy = Policy(model, stream="packed").train()
    # Some processors' C computes such narrow heads; selective recomputation keeps nothing of its attention.
    policy.kernels = TorchKernels()
    micro = micro_of(random_rows((100, (200, 178))), "packed", policy.device)
    found = {}
    for kind in KINDS:
        policy.keep_activations(kind)
        found[kind] = kept_bytes(policy, micro)
    # The forecast of memory knows the same numbers, but for rotary embeddings and positions.
    for kind in KINDS:
        assert found[kind] == pytest.approx(_forecast(config, dtype, kind), rel=0.12), kind
    assert found["full"] < 0.25 * found["selective"], found


def _forecast(config: Any, dtype: torch.dtype, kind: Any) -> int:
    """What the plan says of two packed rows, of which 299 and 277 tokens are computed: a size that needs no
    padding."""
    model = ModelSizes(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=config.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=False,
        parameters=0,
    )
    size = forecast.PassSize(tokens=576, trained=378, cells=0, later=False)
    how = forecast.Training(
        element=dtype.itemsize, full=True, recompute=kind, rank=0, dora=False, cuda=False, offload=False
    )
    # One block holds the logits of so small a vocabulary; they are kept.
    return forecast.kept_bytes(model, size, how) + 378 * config.vocab_size * 4


def test_offloaded_activations_are_the_same(tiny_model, random_rows, monkeypatch):
    rows = random_rows((11, (9, 4, 1)), (5, (8, 2)))
    policy = Policy(tiny_model("qwen3"))
    monkeypatch.setattr(activations, "_MOVED_BYTES", 64)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    moved = []
    empty_like = torch.empty_like

    def counted(kept, **settings):
        made = empty_like(kept, **settings)
        if "pin_memory" in settings:
            moved.append(made)
        return made

    monkeypatch.setattr(torch, "empty_like", counted)
    for kind in KINDS:
        policy.keep_activations(kind)
        logprob, gradients, _ = value_and_gradients(policy, rows)
        assert moved == []
        policy.keep_activations(kind, offload=True)
        again, found, _ = value_and_gradients(policy, rows)
        assert torch.equal(again, logprob)
        assert all(torch.equal(found[n], g) for n, g in gradients.items())
        assert moved and not weights & {t.untyped_storage().data_ptr() for t in moved}
        moved.clear()


def test_nothing_is_moved_without_a_gradient(tiny_model, random_rows, monkeypatch):
    policy = Policy(tiny_model("qwen3"))
    policy.keep_activations("none", offload=True)

    def refuse(model: object) -> None:
        raise AssertionError("offloaded in a pass without gradient")

    monkeypatch.setattr("covey.models.policy.offloaded", refuse)
    with torch.no_grad():
        policy(micro_of(random_rows((5, (3,))), "prefix", policy.device))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_the_sampler_keeps_its_short_step(is_adapted, tiny_model):
    """transformers leaves a hook on the embedding, and a model with hooks is not sampled from by it."""
    policy = Policy(tiny_model("qwen3"))
    if is_adapted:
        settings = LoraSettings(
            rank=2,
            alpha=4.0,
            dropout=0.0,
            target_modules=("all-linear",),
            modules_to_save=(),
            use_dora=False,
            use_rslora=False,
        )
        add_adapter(policy, settings, seed=1)
    for kind in ("full", "selective", "none", "full"):
        policy.keep_activations(kind)
        with merged(policy):
            assert llama_decoder(policy, 16) is not None, kind
