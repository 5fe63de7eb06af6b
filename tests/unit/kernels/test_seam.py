"""Whatever computes, the policy and its engine say the same: every kind of kernels against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from covey.kernels.choose import choose_kernels
from covey.kernels.cpu.attention import Attend
from covey.kernels.cpu.decoder import CompiledLlama
from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.cpu.library import open_library
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import Recordings
from covey.kernels.llama.decoder import LlamaDecoder
from covey.kernels.torch_.decoder import ModuleDecoder
from covey.kernels.torch_.kernels import TorchKernels
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.rollout.native.engine import NativeEngine
from covey.types import GenerationRequest, SamplingParams, TurnId
from support.engines import plain
from support.models import VOCAB, random_model
from support.needs import need
from support.recording import record
from support.rows import random_rows


def in_c() -> CpuKernels:
    need("a C compiler")
    return CpuKernels(open_library())


KINDS = {
    "cpu": in_c,
    "cpu without a compiler": lambda: CpuKernels(None),
    "gpu": lambda: GpuKernels(Recordings(record)),
}
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2")


# Heads that fill the widest vectors of a CPU: C serves no narrower ones.
_WIDE = {
    "gpt2": {"n_embd": 128},
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
}


def policy_with(kernels, family="llama"):
    policy = Policy(random_model(family, **_WIDE[family]), kernels=kernels)
    kernels.prepare(policy.model)
    return policy.eval()


def results(policy, stream="prefix"):
    """Logprobs, entropies, and the gradient of a sum of both."""
    policy.use_stream(stream)
    policy.zero_grad()
    stats = policy(micro_of(random_rows((40, (9, 30, 1, 12)), (5, (3, 3))), stream, torch.device("cpu")))
    weight_N = torch.linspace(0.5, 1.5, stats.logprob_N.shape[0])
    (stats.logprob_N * weight_N + 0.3 * stats.entropy_N).sum().backward()
    gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return {"logprob": stats.logprob_N.detach(), "entropy": stats.entropy_N.detach(), **gradients}


def sampled(policy, kernels=None, rollout=0, engine=None):
    engine = engine or NativeEngine(policy, max_rows=5, kernels=kernels)
    sampling = SamplingParams(temperature=0.9, max_new_tokens=14, stop_token_ids=(7, 19))
    for prompt in range(3):
        tokens = torch.randint(
            VOCAB, (11 + prompt,), generator=torch.Generator().manual_seed(prompt)
        ).tolist()
        for sibling in range(3):
            key = TurnId(seed=1, split="train", rollout=rollout, attempt=0, prompt_id=prompt, sibling=sibling)
            engine.submit(GenerationRequest(prompt_token_ids=tuple(tokens), sampling=sampling, turn=key))
    done = sorted(engine.results(), key=lambda c: c.request_id)
    return [plain(c).token_ids for c in done], torch.tensor([p for c in done for p in c.logprobs])


@pytest.mark.parametrize("stream", ["prefix", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_torch(kind, family, stream, assert_close_guarded):
    expected = results(policy_with(TorchKernels(), family), stream)
    got = results(policy_with(KINDS[kind](), family), stream)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_close_guarded(got[name], value, rtol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_those_of_torch(kind, family, assert_close_guarded):
    tokens, logprobs = sampled(policy_with(TorchKernels(), family))
    got, got_logprobs = sampled(policy_with(KINDS[kind](), family))
    assert got == tokens
    assert_close_guarded(got_logprobs, logprobs, rtol=2e-5)


def test_each_kind_computes_by_its_own_means(monkeypatch):
    """No kind passes the comparisons above for computing nothing itself."""
    calls = []
    apply = Attend.apply
    monkeypatch.setattr(Attend, "apply", lambda *given: calls.append("C") or apply(*given))
    for kernels, decoder, is_in_c in (
        (TorchKernels(), ModuleDecoder, False),
        (KINDS["cpu"](), CompiledLlama, True),
        (KINDS["cpu without a compiler"](), LlamaDecoder, False),
        (KINDS["gpu"](), LlamaDecoder, False),
    ):
        policy = policy_with(kernels)
        calls.clear()
        results(policy)
        assert bool(calls) == is_in_c
        assert type(kernels.decoder(policy, 32)) is decoder
    recordings = Recordings(record)
    sampled(policy, GpuKernels(recordings))
    assert recordings.num_made > 0 and not recordings.failure


@pytest.mark.parametrize("family", FAMILIES)
def test_recordings_outlive_a_rollout(family):
    """They are of a decoder, which stays the same while the weights lie where they did."""
    recordings = Recordings(record)
    policy = policy_with(GpuKernels(), family)
    engine = NativeEngine(policy, max_rows=5, kernels=GpuKernels(recordings))
    sampled(policy, engine=engine)
    made = recordings.num_made
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    tokens = sampled(policy, engine=engine)[0]
    assert made > 0 and recordings.num_made == made
    assert tokens == sampled(policy, TorchKernels())[0]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_kernels_are_chosen_by_the_device_and_the_option(device):
    kind = {"cpu": CpuKernels, "cuda": GpuKernels, "mps": TorchKernels}[device]
    assert type(choose_kernels("auto", device)) is kind
    assert type(choose_kernels("torch", device)) is TorchKernels


@pytest.mark.parametrize("kind", ["torch", *KINDS])
def test_weights_that_lie_elsewhere_are_read_there(kind, assert_close_guarded):
    """As DDP, sharding, offloading and merging rebind them, between passes and between rollouts."""
    policy = policy_with(TorchKernels() if kind == "torch" else KINDS[kind]())
    engine = NativeEngine(policy, max_rows=5)
    results(policy), sampled(policy, engine=engine)
    for parameter in policy.parameters():
        old, parameter.data = parameter.data, 1.1 * parameter.data
        old.fill_(float("nan"))
    fresh = policy_with(TorchKernels())
    for parameter in fresh.parameters():
        parameter.data.mul_(1.1)
    for name, value in results(fresh).items():
        assert_close_guarded(results(policy)[name], value, rtol=5e-5)
    tokens, logprobs = sampled(fresh, rollout=1)
    got, got_logprobs = sampled(policy, rollout=1, engine=engine)
    assert got == tokens
    assert_close_guarded(got_logprobs, logprobs, rtol=2e-5)


@pytest.mark.parametrize("kind", ["torch", *KINDS])
def test_a_policy_can_be_copied(kind):
    """Used or not; a copy has weights of its own."""
    policy = policy_with(TorchKernels() if kind == "torch" else KINDS[kind]())
    before = results(policy)
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    after = results(twin)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
