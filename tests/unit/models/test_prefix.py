"""A prompt whose completions take several passes: computed once, with the values and gradients of passes that
each compute it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from covey.kernels.cpu import attention as compiled_attention
from covey.kernels.torch_.kernels import TorchKernels
from covey.models import flex
from covey.models import policy as policy_module
from covey.models.flex import FlexLayout
from covey.models.layouts import AttentionKind
from covey.models.policy import Policy
from covey.models.prefix import Prefix, share_prompt
from covey.models.probe import micro_of
from covey.token_streams import Row
from covey.types import MicroBatch, StreamSegment
from support.models import policy_of

CPU = torch.device("cpu")
# Heads as wide as the library takes them.
_TWO = {"num_attention_heads": 2, "num_key_value_heads": 1}
HEADS = {
    "qwen2": _TWO,
    "mixtral": _TWO,
    "qwen3": {**_TWO, "head_dim": 32},
    "gpt2": {"n_head": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def split(rows: Sequence[Row], *counts: int) -> list[MicroBatch]:
    """The rows in passes of so many of them, which know of each other."""
    starts = [sum(counts[:n]) for n in range(len(counts))]
    micros = [micro_of(rows[s : s + n], "prefix", CPU) for s, n in zip(starts, counts, strict=True)]
    return share_prompt([replace(m, temperature_N=m.temperature_N * 0.8) for m in micros])


def results(policy: Policy, micros: Sequence[MicroBatch], *, alone: bool) -> dict[str, torch.Tensor]:
    """Logprobs and entropies of all passes, without gradient and with one, and every gradient."""
    policy.shares_prompts = not alone
    policy.zero_grad(set_to_none=True)
    found: dict[str, list[torch.Tensor]] = {"logprob": [], "entropy": [], "annotated": []}
    with torch.no_grad():
        found["annotated"] = [policy(m).logprob_N for m in micros]
    draw = torch.Generator().manual_seed(3)
    for micro in micros:
        stats = policy(micro)
        weight_N = torch.randn(stats.logprob_N.shape, generator=draw)
        ((stats.logprob_N + 0.3 * stats.entropy_N) * weight_N).sum().backward()
        found["logprob"].append(stats.logprob_N.detach())
        found["entropy"].append(stats.entropy_N.detach())
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    return {**{name: torch.cat(parts) for name, parts in found.items()}, **gradients}


def check(policy: Policy, rows: Sequence[Row], counts: Sequence[int], assert_close_guarded) -> None:
    micros = split(rows, *counts)
    expected = results(policy, micros, alone=True)
    got = results(policy, micros, alone=False)
    assert got.keys() == expected.keys()
    assert len(got) > 3
    for name, value in expected.items():
        assert_close_guarded(got[name], value, rtol=5e-5)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1), (2, 3), (4, 1)])
@pytest.mark.parametrize("kind", ["sdpa", "eager", "flash_attn"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "mixtral", "gpt_oss", "mistral"])
@pytest.mark.usefixtures("flash_kernels")
def test_modules(family, kind: AttentionKind, counts, tiny_model, random_rows, assert_close_guarded):
    rows = random_rows((11, (9, 4, 1, 7, 2)))
    policy = Policy(tiny_model(family))
    policy.attention = kind
    check(policy, rows, counts, assert_close_guarded)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_recomputed_and_offloaded(family, recompute, tiny_model, random_rows, assert_close_guarded):
    policy = Policy(tiny_model(family)).train()
    policy.keep_activations(recompute, offload=recompute == "full")
    check(policy, random_rows((90, (9, 40, 1, 7, 2))), (2, 1, 2), assert_close_guarded)


@pytest.mark.needs("a C compiler")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", HEADS)
def test_attention_in_c_beneath_modules(family, recompute, monkeypatch, random_rows, assert_close_guarded):
    """Against the same in torch, each pass alone, in float64 where its products of experts know that."""
    policy = policy_of(family, **HEADS[family])
    policy.train().keep_activations(recompute, offload=recompute == "full")
    micros = split(random_rows((90, (9, 40, 1, 7, 2))), 2, 1, 2)
    called = []
    apply = compiled_attention.Attend.apply
    monkeypatch.setattr(compiled_attention.Attend, "apply", lambda *given: called.append(0) or apply(*given))
    got = results(policy, micros, alone=False)
    assert called
    policy.kernels = TorchKernels()
    if family != "mixtral":
        # In queries' gradients what is alike in keys cancels, and torch's float32 is further off than C's.
        policy.model.double()
    for name, value in results(policy, micros, alone=True).items():
        assert_close_guarded(got[name], value, rtol=5e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_flex_attention(family, monkeypatch, tiny_model, random_rows, assert_close_guarded):
    """Traced and differentiated as on a GPU, with torch's own operators where there the kernels would be."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_COMPILED", torch.compile(torch_flex.flex_attention, backend="aot_eager"))
    monkeypatch.setattr(
        policy_module,
        "stream_layout",
        lambda _, s, d, kernels, prefix: FlexLayout(s, d, compiled=True, prefix=prefix),
    )
    torch._dynamo.reset()
    policy = Policy(tiny_model(family)).train()
    for recompute in ("none", "full"):
        policy.keep_activations(recompute)
        check(policy, random_rows((200, (9, 40, 1, 150, 2))), (2, 1, 2), assert_close_guarded)
    torch._dynamo.reset()


def test_queries_of_the_prompt_cost_flex_attention_nothing():
    """Whole blocks of them see nothing; what sees them is as without a pass of their own."""
    segments = (StreamSegment(start=0, length=300), StreamSegment(start=300, length=90, parent=0))
    prefix = Prefix(300)
    prefix.keep("keys", torch.zeros(300, 1, 4))
    whole, behind = (
        FlexLayout(segments, CPU, compiled=False, prefix=p).block_mask(None).to_dense()[0, 0]
        for p in (None, prefix)
    )
    assert whole.sum(dim=1).tolist() == [1, 2, 3, 4]
    assert behind.sum(dim=1).tolist() == [0, 0, 3, 4]


@pytest.mark.parametrize("compiled", [False, True])
def test_first_tokens_that_are_not_trained(compiled, monkeypatch, random_rows, assert_close_guarded):
    """Of some completions, which the prompt's last position then predicts nothing of, or of all."""
    if not compiled:
        monkeypatch.setattr(Policy, "kernels", TorchKernels())
    policy = policy_of("qwen2", num_attention_heads=2, num_key_value_heads=1, hidden_size=128)
    for untrained in ((0, 3), (0, 1), (1, 2, 4), (0, 1, 2, 3, 4)):
        rows = random_rows((11, (9, 4, 1, 7, 2)))
        for number in untrained:
            is_trained = rows[number].is_trained.copy()
            is_trained[11] = False
            rows[number] = replace(rows[number], is_trained=is_trained)
        for counts in ((1, 1, 1, 1, 1), (2, 3), (2, 1, 2)):
            check(policy, rows, counts, assert_close_guarded)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_dropout_is_drawn_once_for_a_prompt(family, recompute, tiny_model, random_rows):
    """The gradient is the slope of what the same draws give at weights beside these, in float64."""
    policy = Policy(tiny_model(family).double()).train()
    for layer in policy.model.model.layers if family == "qwen3" else ():
        layer.self_attn.attention_dropout = 0.3
    policy.keep_activations(recompute)
    micros = split(random_rows((11, (9, 4, 1, 7, 2))), 2, 1, 2)
    way = {
        name: torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(4))
        for name, p in policy.named_parameters()
    }

    def total(step: float = 0.0, seed: int = 7) -> float:
        torch.manual_seed(seed)
        value = 0.0
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter += step * way[name]
        for micro in micros:
            stats = policy(micro)
            loss = (stats.logprob_N * torch.arange(len(micro.target_N))).sum()
            if step == 0.0:
                loss.backward()
            value += float(loss)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter -= step * way[name]
        return value

    here = total()
    slope = sum(float((p.grad * way[n]).sum()) for n, p in policy.named_parameters())
    assert slope == pytest.approx((total(1e-4) - total(-1e-4)) / 2e-4, rel=1e-3)
    assert total(1e-9) == pytest.approx(here, rel=1e-5)
    assert abs(total(1e-9, seed=8) - here) > 1e-3 * abs(here)


def test_what_passes_over_a_prompt_have_in_common():
    """Written out: prompt 9 8; completions 5 6, and 5 7 and 4."""
    rows = [
        Row(token_ids=(9, 8, *own), is_trained=[False] * 2 + [True] * len(own), prompt_length=2, prompt_key=0)
        for own in ((5, 6), (5, 7), (4,))
    ]
    first, second = split(rows, 1, 2)
    assert (second.context_U.tolist(), second.context_N.tolist()) == ([1, 2], [0, 1, 0])
    for micro in (first, second):
        assert micro.shared.target_F.tolist() == [5, 5, 4]
        assert micro.shared.temperature_F.tolist() == pytest.approx([0.8] * 3)
    assert (first.shared.own_X.tolist(), first.shared.index_N.tolist()) == ([1], [0, 3])
    assert (second.shared.own_X.tolist(), second.shared.index_N.tolist()) == ([1], [1, 3, 2])
    assert (first.shared.follows, first.shared.is_followed) == (False, True)
    assert (second.shared.follows, second.shared.is_followed) == (True, False)
    (alone,) = split(rows, 3)
    assert alone.shared is None


def test_what_a_loss_does_not_use_has_no_gradient():
    """So that the head computes none of an entropy's."""
    prefix = Prefix(2)
    kept, own = ([torch.ones(length, requires_grad=True) for _ in range(2)] for length in (2, 3))
    for is_last in (False, True):
        prefix.is_last = is_last
        for name, part in enumerate(kept):
            prefix.keep(name, part)
        (2.0 * prefix.extend((0, 1), own)[0]).sum().backward()
    assert kept[0].grad.tolist() == [4.0, 4.0]
    assert own[0].grad.tolist() == [4.0] * 3
    assert kept[1].grad is None
    assert own[1].grad is None


def test_a_prompt_is_computed_once(monkeypatch, tiny_model, random_rows):
    """Its tokens, and the product of its last position with the head."""
    counts, contexts = [], []
    policy = Policy(tiny_model("gemma2"))
    hidden, stats = Policy.hidden, Policy._stats

    def counted(self, tokens_T, *rest):
        counts.append(len(tokens_T))
        return hidden(self, tokens_T, *rest)

    def projected(self, hidden_TD, micro):
        contexts.append(len(micro.context_U))
        return stats(self, hidden_TD, micro)

    monkeypatch.setattr(Policy, "hidden", counted)
    monkeypatch.setattr(Policy, "_stats", projected)
    policy.kernels = TorchKernels()
    micros = split(random_rows((30, (9, 4, 7, 5))), 2, 1, 1)
    for micro in micros:
        policy(micro)
    # The last token of a row predicts nothing.
    assert counts == [30, 8 + 3, 6, 4]
    assert contexts == [1, 8 + 3, 6, 4]
    counts.clear()
    with policy.recomputing_prompts():
        for micro in micros:
            policy(micro)
    assert counts == [30 + 8 + 3, 30 + 6, 30 + 4]
    assert policy.shares_prompts


def test_a_step_that_is_cut_short_leaves_nothing_behind(tiny_model, random_rows, assert_close_guarded):
    """What an error has interrupted is begun again with the weights of then."""
    policy, rows = Policy(tiny_model("qwen3")), random_rows((30, (9, 4, 7)))
    policy(split(rows, 1, 1, 1)[0])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter *= 1.5
    check(policy, rows, (1, 1, 1), assert_close_guarded)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_of_a_prompt_outlives_its_passes(compiled, recompute, monkeypatch, random_rows):
    """Without the garbage collector: memory follows from the passes alone."""
    if not compiled:
        monkeypatch.setattr(Policy, "kernels", TorchKernels())
    policy = policy_of("qwen2", num_attention_heads=2, num_key_value_heads=1, hidden_size=128)
    policy.train().keep_activations(recompute)
    made: list[weakref.ref[object]] = []
    keep = Prefix.keep

    def seen(self, name, part):
        made.append(weakref.ref(self))
        keep(self, name, part)

    monkeypatch.setattr(Prefix, "keep", seen)
    gc.disable()
    try:
        for micro in split(random_rows((30, (9, 4, 7))), 1, 1, 1):
            policy(micro).logprob_N.sum().backward()
            assert any(ref() is not None for ref in made) == micro.shared.is_followed
    finally:
        gc.enable()
    assert made
