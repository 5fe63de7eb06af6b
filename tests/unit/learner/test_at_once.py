"""All passes of a step in one call against the same one by one: the gradient is the same to the last bit.

One by one they go through autograd, and each has the loss of its own tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.batching.pack import pack
from covey.comm import LocalComm
from covey.learner import at_once
from covey.learner.backends.single import SingleBackend
from covey.learner.update import accumulate
from covey.models import passes_native
from covey.models.lora import LoraSettings, add_adapter
from covey.models.passes_native import Passes
from covey.place import Place
from support.steps import CASES, OPTIMIZER, distance, for_case, plan_of, policy, rows

# All in one pass; prompts whose rows take several passes; rows that share nothing; a pass for each row.
CUTS = {
    "whole": {},
    "prefix": {"max_tokens": 30},
    "packed": {"stream": "packed", "max_tokens": 60},
    "alone": {"max_tokens": 1},
}


@pytest.fixture(scope="module")
def given():
    return rows()


def batch_of(given, case, cut):
    return pack(for_case(given, case), plan_of(**cut, top_entropy_quantile=case.share), rollout=0)[0]


def taken(batch, backend, config):
    """The sums of a step, its gradient, and how often it looked and went."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("look", "go"):
            real = getattr(Passes, name)
            patch.setattr(Passes, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
        sums = accumulate(batch, backend, config, LocalComm())
    gradient = backend.masters.gradients()
    backend.masters._optimizer.zero_grad(set_to_none=True)
    return sums, gradient, calls


def one_by_one(batch, backend, config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.policy, "_passes", lambda *args: None)
        sums, gradient, calls = taken(batch, backend, config)
    assert calls == []
    return sums, gradient


def assert_same(batch, backend, config, calls):
    sums, gradient, found = taken(batch, backend, config)
    assert found == calls
    expected, due = one_by_one(batch, backend, config)
    # What fipo looks ahead by is added up in an order of its own for each length.
    most = 1e-6 if config.loss_type == "fipo" else 0.0
    assert distance(gradient, due) <= most
    assert all(distance({n: f * g for n, g in gradient.items()}, due) > 0.5 for f in (0.0, -1.0, 2.0))
    assert sums.totals() == pytest.approx(expected.totals(), rel=1e-5, abs=1e-6)
    assert (sums.tokens, sums.sequences) == (expected.tokens, expected.sequences)
    assert torch.allclose(torch.stack(sums.gradients), torch.stack(expected.gradients), rtol=most, atol=most)
    assert bool(sums.gaps) == bool(expected.gaps)
    assert not sums.gaps or torch.equal(torch.stack(sums.gaps).max(), torch.stack(expected.gaps).max())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
def test_every_loss_where_each_ratio_is_1(name, cut, given):
    case = replace(CASES[name], is_on_policy=True)
    backend = SingleBackend(policy(CUTS[cut].get("stream", "prefix")), OPTIMIZER)
    assert_same(batch_of(given, case, CUTS[cut]), backend, case.config, ["go"])


@pytest.mark.parametrize("cut", ["prefix", "packed"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_on_policy])
def test_every_loss_behind_an_update(name, cut, given):
    backend = SingleBackend(policy(CUTS[cut].get("stream", "prefix")), OPTIMIZER)
    # What real needs of the whole step is looked at, too.
    calls = ["look", "go"] if name.startswith("real") else ["go"]
    assert_same(batch_of(given, CASES[name], CUTS[cut]), backend, CASES[name].config, calls)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads, given):
    case = CASES["entropy bonus"]
    backend = SingleBackend(policy("prefix"), OPTIMIZER)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(batch_of(given, case, CUTS["prefix"]), backend, case.config, ["go"])
    finally:
        torch.set_num_threads(before)


def test_it_adds_to_what_is_there(given):
    case = replace(CASES["entropy bonus"], is_on_policy=True)
    backend = SingleBackend(policy("prefix"), OPTIMIZER)
    batch = batch_of(given, case, CUTS["prefix"])
    accumulate(batch, backend, case.config, LocalComm())
    once = backend.masters.gradients()
    sums = accumulate(batch, backend, case.config, LocalComm())
    assert distance(backend.masters.gradients(), {n: 2 * g for n, g in once.items()}) <= 1e-6
    assert torch.equal(sums.gradients[-1], backend.gradient_sample())
    assert sums.silent == 0


def test_an_error_of_the_loss_comes_out(given, monkeypatch):
    """Of what is measured between a pass and its backward pass; nothing goes on behind it."""
    backend, calls = SingleBackend(policy("prefix"), OPTIMIZER), []

    def broken(inputs, config):
        calls.append(inputs)
        raise KeyboardInterrupt

    monkeypatch.setattr(at_once, "policy_loss", broken)
    with pytest.raises(KeyboardInterrupt):
        accumulate(batch_of(given, CASES["k3"], CUTS["prefix"]), backend, CASES["k3"].config, LocalComm())
    assert len(calls) == 1


def test_a_step_of_single_tokens_needs_its_prompts_alone(given):
    case = replace(CASES["dapo, token"], is_on_policy=True)
    short = [_cut(row) for row in given]
    backend = SingleBackend(policy("prefix"), OPTIMIZER)
    (batch,) = pack(for_case(short, case), plan_of(max_tokens=1), rollout=0)
    assert any(micro.shared is not None for micro in batch.micro_batches)
    assert_same(batch, backend, case.config, ["go"])


def _cut(row):
    """With the first token of its completion alone."""
    sample = row.annotated.sample
    end = sample.prompt_length + 1
    first = replace(
        sample,
        token_ids=sample.token_ids[:end],
        is_trained=sample.is_trained[:end],
        sampler_logprobs=sample.sampler_logprobs[:1],
        versions=sample.versions[:1],
    )
    return replace(row, annotated=replace(row.annotated, sample=first), loss_mask=row.loss_mask[:1])


@pytest.mark.parametrize("part", ["tokens_T", "target_N"])
@pytest.mark.parametrize("value", [-1, 10_000])
def test_a_token_that_does_not_exist(part, value, given):
    case = replace(CASES["dapo, token"], is_on_policy=True)
    backend = SingleBackend(policy("prefix"), OPTIMIZER)
    batch = batch_of(given, case, CUTS["prefix"])
    micro = batch.micro_batches[-1]
    wrong = getattr(micro, part).clone()
    wrong[-1] = value
    micros = (*batch.micro_batches[:-1], replace(micro, **{part: wrong}))
    with pytest.raises(IndexError, match="does not exist"):
        accumulate(replace(batch, micro_batches=micros), backend, case.config, LocalComm())


def _adapted(policy):
    settings = LoraSettings(rank=4, alpha=8)
    add_adapter(policy, settings, seed=0)


CHANGES = {
    "a frozen weight": lambda policy: policy.get_parameter("model.model.norm.weight").requires_grad_(False),
    "an adapter": _adapted,
    "offloaded activations": lambda policy: policy.keep_activations("none", offload=True),
    "checkpointing": lambda policy: policy.keep_activations("full"),
    "padded rows": lambda policy: policy.use_stream("padded"),
    "another attention": lambda policy: setattr(policy, "attention", "eager"),
    "no compiler": lambda policy: setattr(policy, "library", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_taken_one_by_one(name, given):
    case = replace(CASES["dapo, token"], is_on_policy=True)
    plain = SingleBackend(policy("prefix"), OPTIMIZER)
    batch = batch_of(given, case, CUTS["whole"])
    assert plain.passes(batch.micro_batches) is not None
    changed = policy("prefix")
    CHANGES[name](changed)
    backend = SingleBackend(changed, OPTIMIZER)
    assert backend.passes(batch.micro_batches) is None


def test_many_tokens_take_several_calls(given, monkeypatch):
    """Between which signals are heard and the watchdog sees that the step gets on."""
    case = replace(CASES["entropy bonus"], is_on_policy=True)
    backend, comm = SingleBackend(policy("prefix"), OPTIMIZER), LocalComm()
    batch = batch_of(given, case, CUTS["prefix"])
    accumulate(batch, backend, case.config, comm)
    gradient = backend.masters.gradients()
    backend.masters._optimizer.zero_grad(set_to_none=True)
    monkeypatch.setattr(passes_native, "_TOKENS_OF_A_CALL", 1)
    seen = []
    monkeypatch.setattr(Place, "advance", lambda self, *at: seen.append(at))
    sums = accumulate(batch, backend, case.config, comm)
    assert seen == [(1, 4), (2, 4), (4, 4)]
    assert distance(backend.masters.gradients(), gradient) == 0.0
    assert len(sums.gradients) == 5 and sums.silent == 0
    assert torch.equal(sums.gradients[-1], backend.gradient_sample())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("which", ["old", "entropy"])
def test_what_annotates_rows_is_what_trains_them(which, cut, given):
    stream = CUTS[cut].get("stream", "prefix")
    backend = SingleBackend(policy(stream), OPTIMIZER)
    micros = batch_of(given, CASES["dapo, token"], CUTS[cut]).micro_batches
    seen = []
    value_N = backend.annotate(micros, which, seen.append)
    assert seen == [len(micros)]
    with torch.no_grad():
        one_by_one = [backend.policy(micro) for micro in micros]
    parts = [stats.logprob_N if which == "old" else stats.entropy_N for stats in one_by_one]
    assert torch.equal(value_N, torch.cat(parts))
    assert float(value_N.abs().min()) > 0.0


def test_a_frozen_policy_is_looked_at(given):
    """A reference has no gradients to add to."""
    micros = batch_of(given, CASES["dapo, token"], CUTS["prefix"]).micro_batches
    expected = policy("prefix").look(micros, lambda done: None)
    frozen = policy("prefix").requires_grad_(False)
    assert frozen.passes(micros, lambda: torch.zeros(1)) is None
    assert torch.equal(frozen.look(micros, lambda done: None).logprob_N, expected.logprob_N)
