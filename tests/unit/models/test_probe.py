"""The probe passes attention models and catches models that carry state from row to row."""

from __future__ import annotations

import pytest
import torch
from transformers import StableLmConfig, StableLmForCausalLM

from covey.kernels.torch_.attention import attend_masked
from covey.models import attention
from covey.models.dropout import dropouts
from covey.models.load import choose_stream
from covey.models.policy import Policy
from covey.models.prefix import Prefix
from covey.models.probe import micro_of, probe, widest_stream


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2", "mixtral"])
def test_attention_models_share_prompts(family, tiny_model):
    policy = Policy(tiny_model(family), stream="padded")
    stream, shares_prompts, results = widest_stream(policy)
    assert (stream, shares_prompts, policy.stream) == ("prefix", True, "padded")
    assert [(r.stream, r.passed) for r in results] == [("prefix", True), ("prefix", True)]
    assert all(0 <= r.value_difference < 1e-5 for r in results)
    assert all(0 <= r.gradient_difference < 1e-5 for r in results)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_convolution_and_recurrence_end_on_padded_rows(family, tiny_model):
    policy = Policy(tiny_model(family), stream="padded")
    stream, shares_prompts, results = widest_stream(policy)
    assert (stream, shares_prompts) == ("padded", False)
    assert [(r.stream, r.passed) for r in results] == [("prefix", False), ("packed", False)]
    # Far from the limit of 1e-3 on either side, so that the verdict does not hang on rounding.
    assert all(max(r.value_difference, r.gradient_difference) > 1e-2 for r in results)


def test_a_model_that_loses_the_layout_ends_on_padded_rows(random_rows, assert_close_guarded):
    """StableLM's layers keep the layout from their attention; on rows of their own nothing is lost."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(3)
    config = StableLmConfig(vocab_size=320, num_key_value_heads=4, **sizes)
    model = StableLmForCausalLM(config).eval()
    policy = Policy(model, stream="padded")
    results = choose_stream(policy)
    assert (policy.stream, [r.passed for r in results]) == ("padded", [False, False])
    rows = random_rows((9, (5, 2)), (4, (6, 1)))
    with torch.no_grad():
        expected = [_alone(model, row) for row in rows]
        got = policy(micro_of(rows, "padded", torch.device("cpu"))).logprob_N
    assert_close_guarded(got, torch.cat(expected), rtol=1e-5)


def _alone(model, row):
    ids = torch.tensor([list(row.token_ids)])
    table = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    return table[row.prompt_length - 1 : -1].gather(1, ids[0, row.prompt_length :, None])[:, 0]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_such_models_are_right_on_padded_rows(family, tiny_model, random_rows, assert_close_guarded):
    model = tiny_model(family)
    rows = random_rows((9, (5, 2)), (4, (6, 1)))
    with torch.no_grad():
        expected = [_alone(model, row) for row in rows]
        got = Policy(model, stream="padded")(micro_of(rows, "padded", torch.device("cpu"))).logprob_N
    assert_close_guarded(got, torch.cat(expected), rtol=1e-5)


def test_an_attention_that_leaks_is_caught(tiny_model, monkeypatch):
    def ignores_segments(layout, layer, query, key, value, options):
        return attend_masked(query, key, value, None, options)

    policy = Policy(tiny_model("qwen2"), stream="padded")
    monkeypatch.setattr(attention.StreamLayout, "attend", ignores_segments)
    stream, shares_prompts, results = widest_stream(policy)
    assert (stream, shares_prompts) == ("padded", False)
    assert not any(r.passed for r in results)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("before", ["padded", "packed", "prefix"])
def test_the_probe_leaves_the_policy_as_it_was(before, training, tiny_model):
    policy = Policy(tiny_model("llama"), stream=before).train(training)
    weights = {n: p.detach().clone() for n, p in policy.named_parameters()}
    assert probe(policy, "prefix").passed
    assert (policy.stream, policy.training) == (before, training)
    assert all(torch.equal(p, weights[n]) for n, p in policy.named_parameters())
    assert all(p.grad is None for p in policy.parameters())
    assert not policy.model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "mixtral", "gpt_oss"])
def test_a_prompt_in_a_pass_of_its_own(family, tiny_model):
    found = probe(Policy(tiny_model(family)), "prefix", in_passes=True)
    assert found.passed
    assert 0 < found.gradient_difference < 1e-5
    assert 0 < found.value_difference < 1e-5


def test_passes_that_lose_the_prompt_are_caught(tiny_model, monkeypatch):
    """Such a model computes a prompt in each pass, and is right so."""
    policy = Policy(tiny_model("qwen3"))
    choose_stream(policy)
    assert (policy.stream, policy.shares_prompts) == ("prefix", True)
    monkeypatch.setattr(Prefix, "held", lambda self, name: None)
    found = probe(policy, "prefix", in_passes=True)
    assert not found.passed
    assert found.value_difference < 1e-5
    assert found.gradient_difference > 1e-2
    monkeypatch.undo()
    take = Prefix.take
    monkeypatch.setattr(Prefix, "take", lambda self, name: take(self, name) * 1.5)
    assert probe(policy, "prefix", in_passes=True).value_difference > 1e-2
    choose_stream(policy)
    assert (policy.stream, policy.shares_prompts) == ("prefix", False)


def test_a_prompt_with_dropout_is_shared(tiny_model):
    policy = Policy(tiny_model("gpt2"))
    choose_stream(policy)
    assert (policy.stream, policy.shares_prompts) == ("prefix", True)
    for rate, shares_prompts in ((None, True), (0.0, False)):
        for module, name in dropouts(policy.model):
            setattr(module, name, getattr(module, name) if rate is None else rate)
        with policy.recomputing_prompts():
            assert policy.shares_prompts == shares_prompts
    policy = Policy(tiny_model("gpt2"))
    policy.shares_prompts = False
    with policy.recomputing_prompts():
        assert not policy.shares_prompts
