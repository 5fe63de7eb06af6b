"""The native engine against `generate` under the same noise, and what its batching may not change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from covey.kernels import choose
from covey.kernels.cpu.decoder import CompiledLlama
from covey.kernels.cpu.kernels import CpuKernels
from covey.kernels.draws import Drawn
from covey.kernels.llama.decoder import LlamaDecoder
from covey.quickstart import task
from covey.rollout.generate import GenerateEngine
from covey.rollout.native import caches
from covey.rollout.native import decoding as decoding_module
from covey.rollout.native.cache import PrefillLayout
from covey.rollout.native.engine import NativeEngine
from covey.types import Finish
from support.engines import plain
from support.needs import need


@pytest.fixture(scope="session")
def quickstart_prompts(quickstart_codec):
    """The first prompts of the embedded task."""
    rows = task.training_rows()[:8]
    return quickstart_codec.encode([quickstart_codec.render(r["messages"]) for r in rows])


@pytest.fixture(autouse=True, params=["flat", "shared", "compiled flat", "compiled shared"])
def layout(request, monkeypatch, quickstart_policy):
    """Every test runs with prompts copied to their rows and with prompts read where they are, in torch and in
    C."""
    if "shared" in request.param:
        monkeypatch.setattr(caches, "_FLAT_PROMPT", 0)
    if "compiled" in request.param:
        need("a C compiler")
    else:
        monkeypatch.setattr(choose, "open_library", lambda: None)
        monkeypatch.setattr(quickstart_policy, "_kernels", CpuKernels(None))
    return request.param


def flips(one, two) -> int:
    """Tokens that differ, a missing one counting as such."""
    count = 0
    for a, b in zip(one, two, strict=True):
        count += sum(x != y for x, y in zip(a.token_ids, b.token_ids, strict=False))
        count += abs(len(a.token_ids) - len(b.token_ids))
    return count


def largest_logprob_gap(one, two) -> float:
    """Over the completions with equal tokens."""
    gaps = [
        abs(x - y)
        for a, b in zip(one, two, strict=True)
        if a.token_ids == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    assert gaps
    return max(gaps)


def contents(completions):
    return [(c.token_ids, c.finish) for c in completions]


# -- against generate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_embedded_model_samples_what_generate_samples(
    temperature, quickstart_policy, quickstart_codec, quickstart_prompts, requests_of, run_engine
):
    requests = requests_of(
        quickstart_prompts,
        8,
        stop=quickstart_codec.stop_token_ids,
        max_new_tokens=20,
        temperature=temperature,
    )
    native = run_engine(NativeEngine(quickstart_policy), requests)
    oracle = run_engine(GenerateEngine(quickstart_policy), requests)
    assert flips(native, oracle) == 0
    assert contents(native) == contents(oracle)
    assert largest_logprob_gap(native, oracle) < 1e-4
    # The comparison has something to compare: many different completions, most of them ended by a stop token.
    assert len({c.token_ids for c in native}) > 16
    assert Counter(c.finish for c in native)[Finish.STOP] > 32


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_random_models_sample_what_generate_samples(
    family, tiny_policy, random_prompts, requests_of, run_engine
):
    # Prompts of 3 to 19 tokens, some equally long, with windows of 7 where there are windows.
    requests = requests_of(random_prompts(9, 3, 19, 9), 6, stop=(5, 17, 40), max_new_tokens=24)
    policy = tiny_policy(family)
    native = run_engine(NativeEngine(policy), requests)
    oracle = run_engine(GenerateEngine(policy), requests)
    total = sum(len(c.token_ids) for c in oracle)
    assert total > 200
    # A draw flips where two noisy logits are equal to rounding: below one in ten thousand, and then the
    # rest of that completion differs. One completion of 24 is the most that may.
    assert sum(a != b for a, b in zip(contents(native), contents(oracle), strict=True)) <= 1
    assert largest_logprob_gap(native, oracle) < 1e-4
    assert {c.finish for c in native} == {Finish.STOP, Finish.LENGTH}


def test_logprobs_are_what_the_learner_computes(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(6, 11), 3, max_new_tokens=9, temperature=0.7)
    for request, completion in zip(requests, run_engine(NativeEngine(policy), requests), strict=True):
        ids = torch.tensor([*request.prompt_token_ids, *completion.token_ids])
        policy.use_stream("padded")
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None], use_cache=False).logits[0] / 0.7
        policy.use_stream("prefix")
        start = len(request.prompt_token_ids)
        expected = logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_policy_that_cannot_be_streamed_is_refused(tiny_policy, random_prompts, requests_of, run_engine):
    # On padded rows the model's own attention is in place: it would run over the whole stream, through
    # every prompt.
    policy = tiny_policy("llama")
    policy.use_stream("padded")
    requests = requests_of(random_prompts(9, 3), 2)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        run_engine(NativeEngine(policy), requests)


# -- what may not matter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 2, 5, 7])
def test_refilled_rows_give_the_same_completions(
    max_rows, tiny_policy, random_prompts, requests_of, run_engine
):
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(9, 3, 14), 4, stop=(5, 17, 40), max_new_tokens=16)
    whole = run_engine(NativeEngine(policy), requests)
    few = run_engine(NativeEngine(policy, max_rows=max_rows), requests)
    assert contents(few) == contents(whole)
    assert largest_logprob_gap(few, whole) < 1e-4
    assert len({len(c.token_ids) for c in whole}) >= 3  # rows end at different times


@pytest.mark.parametrize("max_rows", [5, 256])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("stride", [2, 8, 40])
def test_how_seldom_the_host_looks_does_not_matter(
    stride, family, max_rows, tiny_policy, random_prompts, requests_of, run_engine
):
    policy = tiny_policy(family)
    requests = requests_of(random_prompts(9, 3, 14), 4, stop=(5, 17, 40), max_new_tokens=16)
    each = run_engine(NativeEngine(policy, max_rows=max_rows, stride=1), requests)
    seldom = run_engine(NativeEngine(policy, max_rows=max_rows, stride=stride), requests)
    assert contents(seldom) == contents(each)
    assert largest_logprob_gap(seldom, each) < 1e-4
    assert {c.finish for c in each} == {Finish.STOP, Finish.LENGTH}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_that_nobody_reads_change_nothing(
    family, layout, tiny_policy, random_prompts, requests_of, run_engine, monkeypatch
):
    policy = tiny_policy(family)
    requests = requests_of(random_prompts(9, 3, 14, 5), 6, stop=(5, 17, 40), max_new_tokens=16)
    monkeypatch.setattr(decoding_module, "_FEW_ROWS", 256)
    without = run_engine(NativeEngine(policy), requests)
    monkeypatch.setattr(decoding_module, "_FEW_ROWS", 1)
    engine, spare = NativeEngine(policy), []
    real = engine._decoding._spare
    monkeypatch.setattr(engine._decoding, "_spare", lambda active: (spare.append(real(active)), spare[-1])[1])
    # A second round finds what the spare rows of the first have left in the cache.
    run_engine(engine, requests_of(random_prompts(9, 3, 14, 5, seed=1), 6, max_new_tokens=16, rollout=1))
    assert contents(run_engine(engine, requests)) == contents(without)
    if "compiled" in layout and family == "llama":
        # The step in C takes any number of rows alike.
        assert set(spare) == {0}
    else:
        assert 0 in spare and len(set(spare)) > 3


@pytest.mark.parametrize("max_rows", [3, 256])
def test_the_order_of_submission_does_not_matter(
    max_rows, tiny_policy, random_prompts, requests_of, run_engine
):
    policy = tiny_policy("gemma2")
    requests = requests_of(random_prompts(9, 3, 14), 4, stop=(5, 17, 40), max_new_tokens=16)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0)).tolist()
    one = run_engine(NativeEngine(policy, max_rows=max_rows), requests)
    two = run_engine(NativeEngine(policy, max_rows=max_rows), [requests[i] for i in order])
    assert contents(two) == contents([one[i] for i in order])


def test_requests_with_settings_of_their_own(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    prompts = random_prompts(9, 3)
    mixed = [
        *requests_of(prompts, 2, max_new_tokens=4, temperature=0.5),
        *requests_of(prompts, 2, max_new_tokens=15, stop=(5, 17), temperature=1.3, rollout=1),
    ]
    together = run_engine(NativeEngine(policy), mixed)
    assert contents(together) == contents([run_engine(NativeEngine(policy), [r])[0] for r in mixed])
    oracle = run_engine(GenerateEngine(policy), mixed)
    assert contents(together) == contents(oracle)


# -- ends --------------------------------------------------------------------------------------------------


def test_every_completion_ends_by_stop_or_by_length(tiny_policy, random_prompts, requests_of, run_engine):
    stop = (5, 17, 40)
    requests = requests_of(random_prompts(9, 3), 12, stop=stop, max_new_tokens=16)
    done = run_engine(NativeEngine(tiny_policy("llama")), requests)
    assert {c.finish for c in done} == {Finish.STOP, Finish.LENGTH}
    for c in done:
        assert not set(c.token_ids[:-1]) & set(stop)
        assert (c.token_ids[-1] in stop) == (c.finish is Finish.STOP)
        assert c.finish is Finish.STOP or len(c.token_ids) == 16
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions)
        assert c.seconds >= 0


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_a_stop_token_at_the_limit_is_a_stop(engine, tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    prompts = random_prompts(9)
    (free,) = run_engine(engine(policy), requests_of(prompts, 1, max_new_tokens=6))
    assert free.finish is Finish.LENGTH
    stop = free.token_ids[-1]
    assert stop not in free.token_ids[:-1]
    (stopped,) = run_engine(engine(policy), requests_of(prompts, 1, max_new_tokens=6, stop=(stop,)))
    assert (stopped.token_ids, stopped.finish) == (free.token_ids, Finish.STOP)


@pytest.mark.parametrize("max_rows", [2, 256])
def test_one_new_token(max_rows, tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("gpt2")
    requests = requests_of(random_prompts(9, 3, 5), 3, max_new_tokens=1)
    done = run_engine(NativeEngine(policy, max_rows=max_rows), requests)
    assert [len(c.token_ids) for c in done] == [1] * 9
    assert contents(done) == contents(run_engine(GenerateEngine(policy), requests))


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_without_stop_tokens_nothing_but_the_length_ends(
    engine, tiny_policy, random_prompts, requests_of, run_engine
):
    # The model's own end token is 2; the request names none, so 2 is a token like any other.
    policy = tiny_policy("llama")
    with torch.no_grad():
        policy.model.lm_head.weight[2] = (
            3
            * policy.model.lm_head.weight[2:].norm(dim=-1).max()
            * (policy.model.lm_head.weight[2] / policy.model.lm_head.weight[2].norm())
        )
    assert policy.model.config.eos_token_id == 2
    done = run_engine(engine(policy), requests_of(random_prompts(9, 9, 4), 6, max_new_tokens=20))
    assert any(2 in c.token_ids[:-1] for c in done)
    assert {(len(c.token_ids), c.finish) for c in done} == {(20, Finish.LENGTH)}
    alone = NativeEngine(policy, max_rows=1)
    expected = run_engine(alone, requests_of(random_prompts(9, 9, 4), 6, max_new_tokens=20))
    assert contents(done) == contents(expected)


# -- abort -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_aborted_before_anything_runs(engine, tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(9, 3), 3, max_new_tokens=8)
    expected = run_engine(engine(policy), requests)
    running = engine(policy)
    numbers = [running.submit(r) for r in requests]
    running.abort([numbers[1], numbers[4], 999])
    done = {c.request_id: plain(c) for c in running.results()}
    assert sorted(done) == numbers
    for i, number in enumerate(numbers):
        if i in (1, 4):
            assert (done[number].token_ids, done[number].finish) == ((), Finish.ABORT)
        else:
            assert done[number].token_ids == expected[i].token_ids


@pytest.mark.parametrize("max_rows", [4, 256])
def test_aborted_while_running(max_rows, tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    short = requests_of(random_prompts(9), 1, max_new_tokens=3)
    long = requests_of(random_prompts(7, 4), 5, max_new_tokens=12, rollout=1)
    expected = run_engine(NativeEngine(policy), [*short, *long])
    engine = NativeEngine(policy, max_rows=max_rows)
    first, *numbers = [engine.submit(r) for r in (*short, *long)]
    results = engine.results()
    done = [plain(next(results))]
    assert done[0].request_id == first
    # The first completion has three tokens, so rows that started with it have three; later ones wait.
    gone = [numbers[0], numbers[2], numbers[9]]
    engine.abort(gone)
    done += map(plain, results)
    assert sorted(c.request_id for c in done) == [first, *numbers]
    for c in done:
        wanted = expected[c.request_id - first].token_ids
        if c.request_id in gone:
            assert c.finish is Finish.ABORT
            assert c.token_ids == wanted[: len(c.token_ids)]
            assert len(c.logprobs) == len(c.token_ids) <= 3
        else:
            # The rows that moved into the holes go on as if nothing had been there.
            assert c.token_ids == wanted
    started = {c.request_id: len(c.token_ids) for c in done if c.finish is Finish.ABORT}
    assert started[gone[0]] > 0
    assert (started[gone[2]] == 0) == (max_rows == 4)


# -- work done once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_share", [True, False])
@pytest.mark.parametrize("max_rows", [256, 5])
def test_a_prompt_is_prefilled_once_for_all_siblings(
    max_rows, may_share, tiny_policy, random_prompts, requests_of, run_engine, monkeypatch
):
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(9, 3, 14), 8, stop=(5, 17, 40), max_new_tokens=10)
    prefilled, decoded, counted = [], [], []
    hidden, steps = policy.hidden, {kind: kind.hidden for kind in (LlamaDecoder, CompiledLlama)}

    def count(tokens, layout):
        # The step in C hands long prompts on.
        if not any(tokens is other for other in counted):
            counted.append(tokens)
            (prefilled if isinstance(layout, PrefillLayout) else decoded).append(tokens.numel())

    def counting(tokens, positions, layout):
        count(tokens, layout)
        return hidden(tokens, positions, layout)

    def counting_step(self, tokens, positions, layout):
        count(tokens, layout)
        return steps[type(self)](self, tokens, positions, layout)

    decode = CompiledLlama.decode

    def counting_decode(self, tokens, *given):
        drawn = decode(self, tokens, *given)
        decoded.extend([tokens.numel()] * len(drawn[0]))
        return drawn

    monkeypatch.setattr(policy, "hidden", counting)
    monkeypatch.setattr(CompiledLlama, "decode", counting_decode)
    for kind in steps:
        monkeypatch.setattr(kind, "hidden", counting_step)
    engine = NativeEngine(policy, max_rows=max_rows)
    engine._branches.may_share = may_share
    done = run_engine(engine, requests)
    # 9, 3 and 14 tokens, together or one by one, each time filled up to a multiple of 16.
    assert prefilled == ([32] if max_rows == 256 else [16, 16, 16])
    # A completion of n tokens is fed n - 1 of them: the first comes from the prompt, the last is fed to
    # nobody. What siblings that started together begin with is fed once.
    once = {
        (r.prompt_token_ids, c.token_ids[:n])
        for r, c in zip(requests, done, strict=True)
        for n in range(1, len(c.token_ids))
    }
    every = sum(len(c.token_ids) - 1 for c in done)
    assert len(once) < every
    if not may_share:
        assert sum(decoded) == every
    elif max_rows == 256:
        assert sum(decoded) == len(once)
    else:
        assert len(once) <= sum(decoded) < every
    assert max(decoded) <= max_rows


def one_by_one(self, tokens_b, positions_b, layout, inputs, most):
    """A call for the hidden states of one token a row, and one that draws from them."""
    hidden_bE = self.hidden(tokens_b, positions_b, layout)
    hidden_nE = hidden_bE if inputs.shared_n is None else hidden_bE.index_select(0, inputs.shared_n)
    drawn = self.draw(hidden_nE, replace(inputs, shared_n=None, lead_b=None))
    return Drawn(*(part[None] for part in drawn if part is not None))


@pytest.mark.parametrize("look", [2, 5, 16])
@pytest.mark.parametrize("max_rows", [256, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_in_one_call_are_those_of_a_call_each(
    dtype, look, max_rows, tiny_policy, random_prompts, requests_of, run_engine, monkeypatch
):
    """To the bit, with siblings that part, rows that end and settings of a row's own."""
    policy = tiny_policy("llama").to(dtype)
    requests = requests_of(random_prompts(9, 3, 14), 6, stop=(5, 17, 40), max_new_tokens=40)
    requests = [
        replace(r, sampling=replace(r.sampling, temperature=0.3 + n % 3, max_new_tokens=20 + n))
        for n, r in enumerate(requests)
    ]
    monkeypatch.setattr(decoding_module, "_MOST_IN_A_CALL", look)
    found = [run_engine(NativeEngine(policy, max_rows=max_rows), requests)]
    monkeypatch.setattr(CompiledLlama, "decode", one_by_one)
    found.append(run_engine(NativeEngine(policy, max_rows=max_rows), requests))
    assert len({len(c.token_ids) for c in found[0]}) > 3
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, one.logprobs, one.finish) == (other.token_ids, other.logprobs, other.finish)


def test_the_host_looks_when_something_happens_to_a_row(
    layout, tiny_policy, random_prompts, requests_of, run_engine, monkeypatch
):
    """And else after so many tokens: completions come as they end."""
    engine, decode, asked = NativeEngine(tiny_policy("llama")), CompiledLlama.decode, []

    def seen(self, *given):
        drawn = decode(self, *given)
        asked.append((given[-1], len(drawn[0])))
        return drawn

    monkeypatch.setattr(CompiledLlama, "decode", seen)
    (whole,) = run_engine(engine, requests_of(random_prompts(9), 1, max_new_tokens=40))
    # The first token comes from the prompt.
    assert asked == ([(16, 16), (16, 16), (7, 7)] if "compiled" in layout else [])
    asked.clear()
    stop = whole.token_ids[9]
    (done,) = run_engine(engine, requests_of(random_prompts(9), 1, stop=(stop,), max_new_tokens=40))
    assert done.finish is Finish.STOP and len(done.token_ids) == whole.token_ids.index(stop) + 1
    assert asked == ([(16, len(done.token_ids) - 1)] if "compiled" in layout else [])


@pytest.mark.parametrize("max_rows", [64, 24])
def test_siblings_in_one_row_sample_what_each_samples_in_its_own(
    max_rows, layout, quickstart_policy, quickstart_codec, quickstart_prompts, requests_of, run_engine
):
    """At a low temperature siblings draw the same tokens for long, and some of them all."""
    requests = requests_of(
        quickstart_prompts, 8, stop=quickstart_codec.stop_token_ids, max_new_tokens=20, temperature=0.7
    )
    shared, apart = (NativeEngine(quickstart_policy, max_rows=max_rows) for _ in range(2))
    apart._branches.may_share = False
    fed = {shared: 0, apart: 0}
    for engine in fed:

        def counting(*arguments, engine=engine, feed=engine._decoding._fed):
            given = feed(*arguments)
            fed[engine] += given[0].shape[0]
            return given

        def counting_many(
            sampler, state, given, engine=engine, decode=engine._decoding._until_something_happens
        ):
            drawn = decode(sampler, state, given)
            fed[engine] += given[0].shape[0] * (drawn[0].shape[1] - 1)
            return drawn

        decoding = engine._decoding
        decoding._fed, decoding._until_something_happens = counting, counting_many
    one, two = run_engine(shared, requests), run_engine(apart, requests)
    assert contents(one) == contents(two)
    # In C a row does not depend, to the bit, on what it is batched with.
    assert largest_logprob_gap(one, two) <= (0.0 if "compiled" in layout else 1e-4)
    assert fed[shared] < 0.6 * fed[apart]


def test_the_cache_is_allocated_once(tiny_policy, random_prompts, requests_of, run_engine):
    engine = NativeEngine(tiny_policy("llama"))
    first = run_engine(engine, requests_of(random_prompts(9, 14), 4, max_new_tokens=10))
    cache = engine._cache
    storage = [t.data_ptr() for pair in (*cache.prefix.values(), *cache.own.values()) for t in pair]
    # As large, smaller, and the same again: nothing of an earlier round is left in what comes out.
    run_engine(engine, requests_of(random_prompts(14, 9, seed=1), 4, max_new_tokens=10, rollout=1))
    run_engine(engine, requests_of(random_prompts(3, seed=2), 2, max_new_tokens=2, rollout=2))
    again = run_engine(engine, requests_of(random_prompts(9, 14), 4, max_new_tokens=10))
    assert engine._cache is cache
    assert [t.data_ptr() for pair in (*cache.prefix.values(), *cache.own.values()) for t in pair] == storage
    assert contents(again) == contents(first)


def test_a_larger_round_gets_a_larger_cache(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    run_engine(engine, requests_of(random_prompts(5), 2, max_new_tokens=3))
    small = engine._cache
    larger = requests_of(random_prompts(9, 14, 20), 4, max_new_tokens=12)
    assert contents(run_engine(engine, larger)) == contents(run_engine(NativeEngine(policy), larger))
    assert engine._cache is not small
    assert engine._cache.shape.serves(small.shape)


def test_weights_are_the_learners_own(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    engine = NativeEngine(policy)
    requests = requests_of(random_prompts(9, 3), 4, max_new_tokens=10)
    before = run_engine(engine, requests)
    assert {v for c in before for v in c.versions} == {0}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.5)
    assert engine.publish(iter(()), 7).version == 7
    after = run_engine(engine, requests)
    assert {v for c in after for v in c.versions} == {7}
    assert contents(after) != contents(before)
    assert contents(after) == contents(run_engine(NativeEngine(policy), requests))


@pytest.mark.parametrize("engine", [NativeEngine, GenerateEngine])
def test_the_same_round_twice_is_the_same(engine, tiny_policy, random_prompts, requests_of, run_engine):
    running = engine(tiny_policy("gpt2"))
    requests = requests_of(random_prompts(9, 3), 3, stop=(5, 17), max_new_tokens=8)
    one, two = run_engine(running, requests), run_engine(running, requests)
    assert contents(one) == contents(two)
    assert [c.logprobs for c in one] == [c.logprobs for c in two]
    assert list(running.results()) == []


def test_generate_takes_at_most_max_rows_at_a_time(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(9, 3, 9), 4, stop=(5, 17, 40), max_new_tokens=10)
    stream = policy.stream
    few = run_engine(GenerateEngine(policy, max_rows=3), requests)
    assert contents(few) == contents(run_engine(GenerateEngine(policy), requests))
    assert policy.stream == stream


def test_how_the_cache_lies_does_not_follow_from_earlier_rounds(
    tiny_policy, random_prompts, requests_of, run_engine
):
    """A resumed run has another past, and products round by where things lie."""
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(9, 3), 4, max_new_tokens=10)
    fresh, used = NativeEngine(policy), NativeEngine(policy)
    for longer in (20, 70):
        run_engine(used, requests_of(random_prompts(longer), 2, max_new_tokens=3, rollout=1))
    ours, theirs = run_engine(used, requests), run_engine(fresh, requests)
    assert used._cache.shape.flat == fresh._cache.shape.flat
    assert used._cache.start == fresh._cache.start
    assert contents(ours) == contents(theirs)
    assert [c.logprobs for c in ours] == [c.logprobs for c in theirs]
