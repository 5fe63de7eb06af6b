"""The publisher: sends where the engine is behind, and holds it to what was sent.

Faults in whole runs are in tests/mutants/faults_publish.py.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from covey.comm import LocalComm
from covey.errors import GuardStop
from covey.learner.backends.single import SingleBackend
from covey.learner.canary import learners_view
from covey.models.lora import tied_names
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.native.engine import NativeEngine
from covey.rollout.publisher import Publisher
from support.engines import CopyEngine, Fleet, plain
from support.models import VOCAB, policy_of
from support.processes import run_in_processes
from support.steps import OPTIMIZER

FP32 = torch.float32
UP = "model.layers.1.mlp.up_proj.weight"


class Setting:
    """A backend, engines that hold copies, and their publisher."""

    def __init__(self, family="llama", kind=CopyEngine, members=0, **changes):
        self.backend = SingleBackend(policy_of(family, **changes), OPTIMIZER)
        if members:
            self.engine = Fleet({f"s{n}": kind(self.backend.policy) for n in range(members)})
        else:
            self.engine = kind(self.backend.policy)
        view = learners_view(self.backend, lambda: None)
        self.publisher = Publisher(
            self.backend,
            self.engine,
            LocalComm(),
            canary=Canary(requests=canary_requests(VOCAB), view=view, bound=Bound(FP32, FP32)),
            tied=tied_names(self.backend.policy),
        )

    def step(self, factor=1.01):
        with torch.no_grad():
            for parameter in self.backend.policy.parameters():
                parameter.mul_(factor)

    def publish(self, version):
        with self.publisher.serve(version):
            pass

    def stopped(self, version):
        with pytest.raises(GuardStop) as stop:
            self.publish(version)
        return stop.value.finding


def test_weights_are_sent_where_the_engine_is_behind_alone():
    setting = Setting()
    setting.publish(0)
    setting.publish(0)
    assert setting.engine.num_publishes == 1
    setting.step()
    setting.publish(1)
    assert setting.engine.num_publishes == 2
    one, two = setting.publisher.taken()
    assert (one.version, two.version) == (0, 1)
    assert one.digest != two.digest
    assert one.num_bytes == two.num_bytes == sum(4 * p.numel() for p in setting.backend.policy.parameters())
    assert 0 < two.canary_gap < 1e-4
    assert 0 < two.canary_s < two.seconds
    assert setting.publisher.taken() == []
    assert setting.publisher.last is two


def test_what_was_published_is_what_is_sampled():
    setting = Setting()
    setting.step(1.1)
    with setting.publisher.serve(4) as engine:
        numbers = [engine.submit(r) for r in canary_requests(VOCAB)]
        done = {c.request_id: plain(c) for c in engine.results()}
    direct = NativeEngine(setting.backend.policy)
    own = [direct.submit(r) for r in canary_requests(VOCAB)]
    expected = {c.request_id: plain(c) for c in direct.results()}
    for a, b in zip(numbers, own, strict=True):
        assert done[a].token_ids == expected[b].token_ids
        assert set(done[a].versions) == {4}


def test_an_engine_on_the_learners_weights_is_asked_for_none():
    policy = policy_of("llama")
    views = []

    class Owner:
        @contextmanager
        def rollout_view(self):
            views.append(1)
            yield policy

        def weights(self, dtype=None):
            raise AssertionError("nothing is sent")
            yield

    publisher = Publisher(Owner(), NativeEngine(policy), LocalComm())
    for version in (0, 0, 1):
        with publisher.serve(version):
            pass
    assert len(views) == 3
    assert (publisher.taken(), publisher.last) == ([], None)


def test_one_that_forgets_its_weights_at_rest_is_sent_them_again():
    setting = Setting()
    setting.publish(0)
    setting.publisher.rest()
    setting.publish(0)
    assert setting.engine.num_publishes == 1
    setting.engine.capabilities = replace(setting.engine.capabilities, forgets=True)
    setting.publisher.rest()
    setting.publish(0)
    assert setting.engine.num_publishes == 2


def test_a_publish_is_a_phase_that_gets_on():
    setting = Setting()
    activity = setting.publisher._comm.activity
    activity.enter("rollout")
    phases = set()
    real = setting.engine.take
    setting.engine.take = lambda *given: (phases.add(activity.moment.phase), real(*given))
    setting.publish(0)
    assert phases == {"publish"}
    assert activity.moment.phase == "rollout"


class Keeps(CopyEngine):
    """Tensors that stay as they are."""

    kept = (UP,)

    def take(self, name, weight):
        if name not in self.kept:
            super().take(name, weight)


def test_a_tensor_that_stays_is_named_with_its_version():
    setting = Setting(kind=Keeps)
    setting.publish(7)
    setting.step()
    found = setting.stopped(8)
    assert (found.code, found.step) == ("F151", 8)
    assert found.seen == (
        f"publish of version 8 to the engine: 30 tensors were sent; held with different values: {UP}"
    )
    assert found.cause == "1 are still those of version 7: they were not replaced."
    # What failed was not served: it is sent again, whole, the next time.
    assert setting.stopped(8).code == "F151"
    setting.engine.kept = ()
    setting.publish(8)


def test_a_fleet_is_held_to_them_one_by_one():
    setting = Setting(kind=CopyEngine, members=3)
    setting.publish(0)
    setting.step()
    setting.engine.members["s1"].take = lambda name, weight: None
    found = setting.stopped(1)
    assert found.code == "F151"
    assert found.seen.startswith(
        "publish of version 1 to server s1: 30 tensors were sent; held with different values"
    )
    assert found.seen.endswith(" and 27 more")


def test_one_of_a_fleet_that_computes_with_something_else():
    setting = Setting(kind=CopyEngine, members=2)
    setting.publish(0)
    setting.step()
    odd = setting.engine.members["s1"]
    real = odd.results
    odd.results = lambda: (replace(c, logprobs=c.logprobs - 0.01) for c in real())
    found = setting.stopped(1)
    assert found.code == "F152"
    assert "to server s1: its log-probabilities of a few test completions differ by up to 0.01" in found.seen


def test_tensors_that_cannot_be_read_back_are_left_to_the_canary():
    setting = Setting(kind=Keeps)
    real = setting.engine.publish

    def publish(weights, version):
        receipt = real(weights, version)
        own = {n: v for n, v in receipt.fingerprints.items() if n != UP}
        return replace(receipt, fingerprints=own, unread=(UP,))

    setting.engine.publish = publish
    setting.publish(0)
    setting.step()
    assert setting.stopped(1).code == "F152"


def test_a_first_gap_that_no_rounding_explains():
    setting = Setting()
    real = setting.engine.results
    setting.engine.results = lambda: (replace(c, logprobs=c.logprobs - 0.02) for c in real())
    found = setting.stopped(0)
    assert found.code == "F152"
    assert "no rounding explains more than 0.01" in found.seen


def test_a_tied_head_may_come_under_one_name_or_two():
    for hidden in ((), ("lm_head.weight",), ("model.embed_tokens.weight",)):
        setting = Setting("qwen2")
        assert tied_names(setting.backend.policy) == {"lm_head.weight": "model.embed_tokens.weight"}
        real = setting.engine.fingerprints
        setting.engine.fingerprints = lambda real=real, hidden=hidden: {
            n: v for n, v in real().items() if n not in hidden
        }
        setting.publish(0)
    setting.engine.fingerprints = lambda: {"other.weight": 1}
    setting.step()
    found = setting.stopped(1)
    assert "missing: model.embed_tokens.weight, " in found.seen
    assert found.seen.endswith("held although not sent: other.weight")


def test_tensors_of_no_version_of_this_run():
    setting = Setting()
    setting.publish(0)
    setting.step()
    real = setting.engine.take
    setting.engine.take = lambda name, weight: real(name, weight * (2 if name == UP else 1))
    assert setting.stopped(1).cause.startswith("They belong to no version of this run")
    setting.engine.take = lambda name, weight: real(name, weight * 2)
    assert setting.stopped(1).cause.startswith("The engine has the weights in another dtype")


@pytest.mark.parametrize(("served", "code"), [(-1, "F150"), (0, "F150"), (1, None), (2, "F155")])
def test_another_version_is_served(served, code):
    setting = Setting()
    setting.publish(0)
    setting.step()
    real = setting.engine.publish
    setting.engine.publish = lambda weights, version: replace(real(weights, version), version=served)
    if code is None:
        setting.publish(1)
    else:
        assert setting.stopped(1).code == code


def test_weights_are_sent_in_the_dtype_of_the_engine():
    setting = Setting()
    setting.engine.policy.to(torch.bfloat16)
    setting.engine.capabilities = replace(setting.engine.capabilities, dtype=torch.bfloat16)
    low = Bound(FP32, torch.bfloat16)
    setting.publisher._canary = replace(setting.publisher._canary, bound=low)
    setting.step()
    setting.publish(1)
    assert setting.publisher.last.num_bytes == 2 * sum(p.numel() for p in setting.backend.policy.parameters())


@pytest.mark.multi
def test_two_ranks(tmp_path: Path) -> None:
    run_in_processes(str(Path(__file__).with_name("publisher_ranks.py")), tmp_path)
    first, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["_shared"] == other["_shared"] == "True"
    assert first["_one_engine"] == "6 asked for, True" and other["_one_engine"] == "0 asked for, True"
    assert first["_one_of_two_servers"] == other["_one_of_two_servers"]
    assert "to server b: 30 tensors were sent; held with different values" in first["_one_of_two_servers"]
    assert first["_breaks_off"] == "ConnectionResetError: the server is gone"
    assert other["_breaks_off"] == (
        "OtherRankFailed: rank 0 failed: ConnectionResetError: the server is gone"
    )
