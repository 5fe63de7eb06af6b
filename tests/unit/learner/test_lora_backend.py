"""A policy with an adapter in a backend: its own base is the reference, rollouts are merged, resume is exact.

In bfloat16 the base and whole copies compute in bfloat16, the adapter in float32.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.algorithm.losses import LossConfig
from covey.batching.needs import needs
from covey.batching.pack import pack
from covey.batching.shares import PackPlan
from covey.checkpoint.shards import SavedShards, write_shards
from covey.comm import LocalComm
from covey.learner.annotate import annotate_and_credit
from covey.learner.backends.single import SingleBackend
from covey.learner.update import update
from covey.models.adapter_shapes import LoraSettings
from covey.models.load import load_adapted, save_policy
from support.models import save_model
from support.options import algorithm, credit, learner

BF16, FP32 = torch.bfloat16, torch.float32
OPTIMIZER = learner(weight_decay=0.1)
CREDIT = credit(mask_truncated_completions=True)
LOSS = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.1)
LORA = LoraSettings(rank=4, alpha=8)
KINDS = {
    "lora": LORA,
    "dora": replace(LORA, use_dora=True),
    "whole": replace(LORA, modules_to_save=("lm_head", "norm")),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def backend_of(
    base, settings=LORA, dtype=FP32, *, adapter=None, checkpointing=False, seed=0, optimizer=OPTIMIZER
):
    policy = load_adapted(
        base,
        settings,
        adapter=adapter,
        seed=seed,
        compute_dtype=dtype,
        device=torch.device("cpu"),
        disable_dropout=True,
    )
    if checkpointing:
        policy.keep_activations("full")
    policy.use_stream("prefix")
    return SingleBackend(policy, optimizer, compute_dtype=dtype)


def plan_of(**changes):
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=16,
        num_iterations=1,
        max_tokens=10_000,
        max_completion_length=20,
        stream="prefix",
        device=torch.device("cpu"),
    )
    return replace(plan, **changes)


def step_of(backend, groups, plan=None, rate=1e-2):
    """One rollout's annotation and its one optimizer step, with a KL term."""
    plan = plan or plan_of()
    wanted = needs(algorithm(beta=LOSS.beta), 1)
    rows = annotate_and_credit(groups, backend, credit=CREDIT, needs=wanted, plan=plan, comm=LocalComm())
    return update(pack(rows, plan, rollout=0)[0], backend, LOSS, rate, LocalComm())


def frozen(policy):
    return {n: p.detach().clone() for n, p in policy.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_base(kind, dtype, base, random_rollout):
    backend = backend_of(base, KINDS[kind], dtype)
    before = frozen(backend.policy)
    first = step_of(backend, random_rollout)
    assert first.metrics["kl"].value == 0.0
    second = step_of(backend, random_rollout)
    assert second.metrics["kl"].value > 1e-6
    after = frozen(backend.policy)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert {t.dtype for t in after.values()} == {dtype}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dtypes_of_what_is_trained(dtype, base):
    backend = backend_of(base, KINDS["whole"], dtype)
    held = dict(backend.policy.named_parameters())
    for name, master in zip(backend.masters.names, backend.masters.masters, strict=True):
        is_adapter = ".lora_" in name
        assert held[name].dtype == (FP32 if is_adapter else dtype)
        assert master.dtype == FP32
        assert (master is held[name]) == (is_adapter or dtype == FP32)
    whole = [n for n in backend.masters.names if ".lora_" not in n]
    assert [n.split(".modules_to_save")[0].rpartition(".")[2] for n in whole] == ["norm", "lm_head"]


def test_the_first_step_moves_b_and_not_a(base, random_rollout):
    backend = backend_of(base, optimizer=learner())
    before = {n: p.detach().clone() for n, p in backend.policy.named_parameters()}
    first = step_of(backend, random_rollout)
    for name, parameter in backend.policy.named_parameters():
        assert torch.equal(parameter, before[name]) == (".lora_B." not in name)
    # What is watched is the adapter: half of it is B, and A's norm is what the step is held against.
    num_b = sum(p.numel() for n, p in before.items() if ".lora_B." in n)
    num_a = sum(p.numel() for n, p in before.items() if ".lora_A." in n)
    assert first.stats.frac_params_changed == pytest.approx(num_b / (num_a + num_b), rel=0.02)
    assert 0 < first.stats.update_ratio < 1
    second = step_of(backend, random_rollout)
    assert second.stats.frac_params_changed > 0.99


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_any_cut_gives_the_same_gradient(kind, checkpointing, base, random_rollout):
    def gradient(plan):
        backend = backend_of(base, KINDS[kind], checkpointing=checkpointing)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for master in backend.masters.masters:
                master += 0.02 * torch.randn(master.shape, generator=generator)
        held = []
        backend.step = lambda rate: held.append(backend.masters.gradients()) or backend.masters.step(rate)
        step_of(backend, random_rollout, plan)
        return torch.cat([g.flatten() for g in held[0].values()]).double()

    whole = gradient(plan_of())
    for plan in (plan_of(max_tokens=60), plan_of(max_tokens=1)):
        found = gradient(plan)
        assert float((found - whole).norm() / whole.norm()) < 1e-5
        assert float((2 * found - whole).norm() / whole.norm()) > 0.5


def test_a_rollout_sees_the_merged_policy(base, random_rollout):
    backend = backend_of(base)
    step_of(backend, random_rollout)
    backend.policy.use_stream("padded")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = backend.policy.model(input_ids=ids).logits
        with backend.rollout_view() as policy:
            assert not policy.training and all(layer.merged for layer in policy.adapter.layers)
            assert (policy.model(input_ids=ids).logits - expected).abs().max() < 1e-5
    assert backend.policy.training and not any(layer.merged for layer in backend.policy.adapter.layers)


def test_named_weights_are_those_of_a_plain_model(base, random_rollout):
    from transformers import AutoModelForCausalLM

    backend = backend_of(base, KINDS["whole"])
    step_of(backend, random_rollout)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=FP32)
    names = {n for n, _ in plain.named_parameters()}
    weights = dict(backend.weights(BF16))
    assert weights.keys() == names and {w.dtype for w in weights.values()} == {BF16}
    moved = {n for n, p in plain.named_parameters() if not torch.equal(p.to(BF16), weights[n])}
    assert {n.rpartition(".")[0].rpartition(".")[2] for n in moved} >= {"q_proj", "down_proj", "lm_head"}
    assert "model.embed_tokens.weight" not in moved


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(kind, dtype, base, random_rollout, tmp_path):
    one = backend_of(base, KINDS[kind], dtype)
    for _ in range(2):
        step_of(one, random_rollout)
    save_policy(one.policy, base, tmp_path)
    write_shards(tmp_path / "optimizer", one.shards(), 0, 1)
    two = backend_of(base, KINDS[kind], dtype, adapter=tmp_path, seed=5)
    two.load_shards(SavedShards(tmp_path / "optimizer"))
    for _ in range(2):
        a, b = step_of(one, random_rollout), step_of(two, random_rollout)
        assert a.stats == b.stats
        assert a.metrics["kl"] == b.metrics["kl"]
    others = dict(two.policy.named_parameters())
    assert all(torch.equal(p, others[n]) for n, p in one.policy.named_parameters())


def test_no_second_model_is_taken(base):
    policy = backend_of(base).policy
    with pytest.raises(AssertionError, match="its own base"):
        SingleBackend(policy, OPTIMIZER, reference=policy)
