"""Publishing an adapter alone to an engine that applies it: what is sent, what is checked, and each fault."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.learner.backends.single import SingleBackend
from covey.learner.canary import learners_view
from covey.models.adapter_shapes import LoraSettings, is_of_adapter
from covey.models.lora import add_adapter, tied_names
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.publisher import Publisher
from support.engines import AdapterEngine, Fleet
from support.models import VOCAB, policy_of
from support.servers import engine_on, running
from support.steps import OPTIMIZER

FP32 = torch.float32
TARGETS = ("q_proj", "o_proj", "up_proj")
# A and B in three layers.
NUM_MATRICES = 2 * len(TARGETS) * 3


class Setting:
    """A learner of an adapter, engines that apply adapters, and a publisher between them."""

    def __init__(self, engine=None, num_members=0, dtype=FP32, **settings):
        bare = policy_of("llama")
        policy = copy.deepcopy(bare)
        given = {"rank": 4, "alpha": 16, "target_modules": TARGETS, **settings}
        add_adapter(policy, LoraSettings(**given), seed=0, compute_dtype=dtype)
        self.backend = SingleBackend(policy, OPTIMIZER, compute_dtype=dtype)
        self.bare = bare
        self.engine = engine or (
            Fleet({f"s{n}": AdapterEngine(bare) for n in range(num_members)})
            if num_members
            else AdapterEngine(bare)
        )
        self.publisher = self.new_publisher()

    def new_publisher(self):
        view = learners_view(self.backend, lambda: None)
        canary = Canary(requests=canary_requests(VOCAB), view=view, bound=Bound(FP32, FP32))
        tied = tied_names(self.backend.policy)
        return Publisher(self.backend, self.engine, LocalComm(), canary=canary, tied=tied)

    def step(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.backend.policy.named_parameters():
                if is_of_adapter(name):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    def publish(self, version):
        with self.publisher.serve(version):
            pass
        return self.publisher.last

    def stopped(self, version):
        with pytest.raises(GuardStop) as stop:
            self.publish(version)
        return stop.value.finding


def test_the_base_is_sent_once_and_then_the_adapter_alone():
    setting = Setting()
    first = setting.publish(0)
    assert len(setting.engine.given) == first.num_tensors == 30 + NUM_MATRICES
    # Its scale, 4, is in B.
    own = dict(setting.backend.policy.model.named_parameters())
    at = "model.layers.0.self_attn.q_proj.lora_{}.{}weight"
    for version in (1, 2):
        setting.step(version)
        last = setting.publish(version)
        assert len(setting.engine.given) == NUM_MATRICES and all(map(is_of_adapter, setting.engine.given))
        assert last.num_bytes == sum(4 * t.numel() for t in setting.engine.matrices.values())
        assert last.num_tensors == first.num_tensors and last.digest != first.digest
        assert last.canary_gap < 1e-4
        held = setting.engine.matrices
        a, b = (held[f"base_model.model.{at.format(kind, '')}"] for kind in "AB")
        assert torch.equal(a, own[at.format("A", "default.")])
        assert torch.equal(b, 4 * own[at.format("B", "default.")])


def test_in_bfloat16_the_scale_is_rounded_once_with_b():
    setting = Setting(dtype=torch.bfloat16, alpha=12)
    setting.step()
    adapter = setting.backend.adapter_alone
    own = dict(setting.backend.policy.model.named_parameters())
    for name, matrix in adapter.matrices(None):
        of = own[name.removeprefix("base_model.model.").replace(".weight", ".default.weight")]
        factor = 3 if ".lora_B." in name else 1
        assert of.dtype == FP32 and torch.equal(matrix, (factor * of).to(torch.bfloat16))
    assert {t.dtype for _, t in adapter.base(None)} == {torch.bfloat16}
    assert {t.dtype for _, t in adapter.matrices(FP32)} == {FP32}


@pytest.mark.parametrize(
    ("rank", "settings"),
    [(3, {}), (0, {}), (8, {"use_dora": True}), (8, {"modules_to_save": ("lm_head",)})],
)
def test_what_an_engine_does_not_apply_is_added_to_the_weights(rank, settings):
    setting = Setting(**settings)
    setting.engine.capabilities = replace(setting.engine.capabilities, adapter_rank=rank)
    for version in (0, 1):
        setting.step(version)
        setting.publish(version)
        assert len(setting.engine.given) == 30 and not any(map(is_of_adapter, setting.engine.given))


def test_another_run_of_the_same_base_sends_none():
    setting = Setting()
    setting.publish(0)
    setting.publisher = setting.new_publisher()
    setting.step()
    assert len(setting.engine.given) > NUM_MATRICES
    setting.publish(0)
    assert len(setting.engine.given) == NUM_MATRICES


@pytest.mark.parametrize("lost", ["all of it", "one bit"])
def test_a_base_that_the_engine_lost_is_sent_again(lost):
    setting = Setting()
    setting.publish(0)
    if lost == "all of it":
        setting.engine.base = {}
    else:
        setting.engine.base["model.norm.weight"] = setting.engine.base["model.norm.weight"] * 2
    setting.step()
    setting.publish(1)
    assert len(setting.engine.given) == 30 + NUM_MATRICES
    setting.step()
    setting.publish(2)
    assert len(setting.engine.given) == NUM_MATRICES


def test_one_of_a_fleet_without_the_base():
    setting = Setting(num_members=2)
    setting.publish(0)
    setting.engine.members["s1"].base = {}
    setting.step()
    setting.publish(1)
    assert all(len(e.given) == 30 + NUM_MATRICES for e in setting.engine.members.values())


def test_an_adapter_that_stays():
    setting = Setting()
    setting.publish(0)
    setting.step(1)
    setting.publish(1)
    real, former = setting.engine.use, setting.engine.matrices
    setting.engine.use = lambda matrices: real(former)
    setting.step(2)
    found = setting.stopped(2)
    assert found.code == "F151" and ".lora_A.weight" in found.seen
    assert found.cause == f"{NUM_MATRICES} are still those of version 1: they were not replaced."


def test_a_matrix_that_is_lost_and_a_base_that_changed_meanwhile():
    setting = Setting()
    setting.publish(0)
    setting.step()
    real, name = setting.engine.use, "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    setting.engine.use = lambda matrices: real({n: t for n, t in matrices.items() if n != name})
    found = setting.stopped(1)
    assert found.code == "F151" and f"missing: {name}" in found.seen
    setting.engine.use = real
    held, digest = setting.engine.base, setting.engine.held_base()
    setting.engine.held_base = lambda: digest
    held["model.norm.weight"] = held["model.norm.weight"] * 2
    found = setting.stopped(2)
    assert found.code == "F151" and found.seen.endswith("held with different values: model.norm.weight")


@pytest.fixture
def served():
    """A run whose engine is two servers that apply adapters, in threads of this process."""
    bare = policy_of("llama")
    engines = [AdapterEngine(bare) for _ in range(2)]
    with (
        running(bare, engine=engines[0], adapter_rank=8) as a,
        running(bare, engine=engines[1], adapter_rank=8) as b,
    ):
        engine = engine_on([a.address, b.address], adapter_rank=8)
        yield Setting(engine=engine), engines, (a, b)
        engine.close()
        assert a.failed == b.failed == []


def test_servers_are_sent_the_base_once(served):
    setting, engines, servers = served
    setting.publish(0)
    assert all(len(e.given) == 30 + NUM_MATRICES for e in engines)
    setting.step(1)
    setting.publish(1)
    assert all(len(e.given) == NUM_MATRICES for e in engines)
    assert {s.front.status().base for s in servers} == {engines[0].held_base()}
    # One that came back without it has it again with the next publish.
    engines[1].base = {}
    servers[1].front._about = replace(servers[1].front._about, base="")
    setting.step(2)
    setting.publish(2)
    assert all(len(e.given) == 30 + NUM_MATRICES for e in engines)
    assert setting.engine.take_notices() == []


def test_faults_of_one_server(served):
    setting, engines, servers = served
    setting.publish(0)
    engines[1].update = lambda name: 0.0
    setting.step(1)
    found = setting.stopped(1)
    assert found.code == "F152" and servers[1].address in found.seen
    del engines[1].update
    real, former = engines[1].use, engines[1].matrices
    setting.publish(2)
    engines[1].use = lambda matrices: real(former)
    setting.step(2)
    found = setting.stopped(3)
    assert found.code == "F151" and servers[1].address in found.seen


def test_what_a_server_refuses_of_an_adapter(served):
    _, _, (a, _) = served
    caller = a.caller(run="run-1")
    answer = caller.open("POST", "/v1/attend", {"run": "run-1", "name": "n"})
    answer.json()

    def said(form: str, **about) -> str:
        a.front._about = replace(a.front._about, **about)
        with pytest.raises(Exception) as refused:
            caller.post("/v1/publish/begin", {"version": 1, "form": form})
        return str(refused.value)

    assert "form is whole or adapter" in said("half")
    assert "has no base" in said("adapter", base="")
    assert "takes whole weights" in said("adapter", adapter_rank=0, base="x")
    a.front._about = replace(a.front._about, adapter_rank=8)
    transfer = caller.post("/v1/publish/begin", {"version": 1, "form": "adapter"})["transfer"]
    with pytest.raises(Exception, match=r"model.norm.weight is no matrix of an adapter"):
        caller.post(f"/v1/publish/tensors?transfer={transfer}", save({"model.norm.weight": torch.ones(2)}))
    answer.close()
