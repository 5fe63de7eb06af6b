"""Recorded strides, by a stand-in that keeps to a CUDA graph's rules, and what is told to CUDA itself."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from covey.kernels.draws import Drawn
from covey.kernels.gpu.kernels import GpuKernels
from covey.kernels.gpu.recordings import CudaGraphs, Recordings
from covey.models.adapter_shapes import LoraSettings
from covey.models.lora import add_adapter
from covey.rollout.native import caches
from covey.rollout.native.engine import NativeEngine
from covey.types import Finish
from support.recording import record
from support.syncs import Syncs

SHORT, LONG = (9, 3, 14), (70, 66, 90)


def contents(completions):
    return {c.request_id: (c.token_ids, c.finish) for c in completions}


def values(completions):
    return [list(c) for c in sorted((c.token_ids, c.finish.value) for c in completions)]


def move(policy):
    """Every weight to other memory; who reads the old one gets no numbers."""
    for parameter in policy.parameters():
        old, parameter.data = parameter.data, parameter.data.clone()
        old.fill_(float("nan"))


def change(policy):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.01)


@pytest.mark.parametrize("prompts", [SHORT, LONG], ids=["flat", "prefix"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_what_is_played_is_what_is_computed(
    family, prompts, tiny_policy, random_prompts, requests_of, run_engine
):
    """Of other rows, at other lengths, with weights that were changed where they are, and that were moved."""
    policy = tiny_policy(family)
    recordings = Recordings(record)
    engine = NativeEngine(policy, max_rows=5, stride=3, kernels=GpuKernels(recordings))
    for number, before in enumerate((None, change, None, move, change)):
        if before is not None:
            before(policy)
        requests = requests_of(
            random_prompts(*prompts, seed=number), 4, stop=(5, 17, 40), max_new_tokens=16, rollout=number
        )
        plain = run_engine(NativeEngine(policy, max_rows=5), requests)
        assert values(run_engine(engine, requests)) == values(plain)
        assert {c.finish for c in plain} <= {Finish.STOP, Finish.LENGTH}
    assert recordings.failure == "" and len(recordings) >= 3


def test_an_adapter_that_is_not_merged_is_recorded(tiny_policy, random_prompts, requests_of, run_engine):
    """In bfloat16 the sum would be rounded, so the adapter's products are played."""
    policy = tiny_policy("llama")
    settings = LoraSettings(
        rank=4,
        alpha=8.0,
        dropout=0.0,
        target_modules=("all-linear",),
        modules_to_save=(),
        use_dora=False,
        use_rslora=False,
    )
    add_adapter(policy, settings, seed=1, compute_dtype=torch.bfloat16)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    recordings = Recordings(record)
    engine = NativeEngine(policy, stride=3, kernels=GpuKernels(recordings))
    requests = requests_of(random_prompts(*SHORT), 3, stop=(5, 17), max_new_tokens=12)
    plain = values(run_engine(NativeEngine(policy), requests))
    for _ in range(2):
        assert values(run_engine(engine, requests)) == plain
    made = recordings.num_made
    run_engine(engine, requests)
    assert recordings.failure == "" and recordings.num_made == made


def lengths_of(requests_of, random_prompts, seed):
    """64 completions, of which each ends at a length of its own."""
    drawn = random.Random(seed)
    prompts = random_prompts(*(drawn.randint(66, 100) for _ in range(8)), seed=seed)
    requests = requests_of(prompts, 8, stop=(), max_new_tokens=500, rollout=seed)
    return [
        replace(r, sampling=replace(r.sampling, max_new_tokens=min(500, 1 + int(drawn.expovariate(1 / 150)))))
        for r in requests
    ]


def test_sizes_are_few(tiny_policy, random_prompts, requests_of, monkeypatch):
    """Over 20 rollouts of 64 rows of random lengths; computed is nothing, as only sizes count."""
    policy = tiny_policy("llama")
    recordings = Recordings(lambda compute: lambda: None)
    seen = set()

    def play(cache, size, inputs, compute):
        seen.add((cache, *size))
        rows = inputs[-1].shape[0]
        return Drawn(torch.zeros(rows, 8, dtype=torch.long), torch.zeros(rows, 8))

    monkeypatch.setattr(recordings, "play", play)
    engine = NativeEngine(policy, stride=8, kernels=GpuKernels(recordings))
    for seed in range(20):
        for request in lengths_of(requests_of, random_prompts, seed):
            engine.submit(request)
        assert len(list(engine.results())) == 64
    assert len(seen) <= 30


def test_the_least_used_is_let_go(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    recordings = Recordings(record, most=1)
    engine = NativeEngine(policy, stride=3, kernels=GpuKernels(recordings))
    requests = requests_of(random_prompts(*SHORT), 3, stop=(5, 17), max_new_tokens=16)
    plain = values(run_engine(NativeEngine(policy), requests))
    for _ in range(2):
        assert values(run_engine(engine, requests)) == plain
        assert len(recordings) == 1
    assert recordings.num_made > 3 and recordings.failure == ""


def test_recordings_outlive_another_cache(tiny_policy, random_prompts, requests_of, run_engine):
    """An evaluation of short prompts between rollouts of long ones records nothing anew."""
    recordings = Recordings(record)
    engine = NativeEngine(tiny_policy("llama"), stride=3, kernels=GpuKernels(recordings))
    every = [requests_of(random_prompts(*prompts), 2, max_new_tokens=9) for prompts in (LONG, SHORT)]
    for requests in every:
        run_engine(engine, requests)
    made = recordings.num_made
    for requests in every:
        run_engine(engine, requests)
    assert recordings.num_made == made == len(recordings)
    # A cache that grows is another one, whose recordings replace those of the old one.
    run_engine(engine, requests_of(random_prompts(*SHORT), 2, max_new_tokens=40))
    numbers = {key[0] for key in recordings._held}
    assert numbers == engine._caches.numbers and len(numbers) == 2


def test_an_engine_that_rests_keeps_nothing(tiny_policy, random_prompts, requests_of, run_engine):
    policy = tiny_policy("llama")
    recordings = Recordings(record)
    resting = NativeEngine(policy, stride=3, kernels=GpuKernels(recordings), rests=True)
    awake = NativeEngine(policy, stride=3, kernels=GpuKernels(Recordings(record)))
    for number in range(2):
        requests = requests_of(random_prompts(*LONG), 3, stop=(5, 17), max_new_tokens=9, rollout=number)
        assert values(run_engine(resting, requests)) == values(run_engine(awake, requests))
        for engine in (resting, awake):
            engine.rest()
        assert len(recordings) == 0 and not resting._caches.numbers and awake._caches.numbers
        left = resting._decoding
        assert left.cache is left._decoder is left._last_hidden_FD is None
        assert awake._cache is not None


def test_an_engine_at_work_does_not_rest(tiny_policy, random_prompts, requests_of):
    engine = NativeEngine(tiny_policy("llama"), rests=True)
    for request in requests_of(random_prompts(*SHORT), 2, max_new_tokens=9):
        engine.submit(request)
    results = engine.results()
    found = [next(results)]
    engine.rest()
    assert len([*found, *results]) == 6


def refuses(compute):
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def says_nothing(compute):
    raise NotImplementedError


def falls_short(compute):
    return lambda: None


@pytest.mark.parametrize("broken", [refuses, says_nothing, falls_short])
def test_without_a_recording_decoding_goes_on_and_says_so(
    broken, tiny_policy, random_prompts, requests_of, run_engine
):
    policy = tiny_policy("llama")
    requests = requests_of(random_prompts(*SHORT), 2, stop=(5, 17), max_new_tokens=9)
    plain = run_engine(NativeEngine(policy), requests)
    recordings = Recordings(broken)
    engine = NativeEngine(policy, stride=3, kernels=GpuKernels(recordings))
    assert engine.given_up == ""
    assert contents(run_engine(engine, requests)) == contents(plain)
    assert recordings.failure in engine.given_up and recordings.failure and len(recordings) == 0


def test_a_recorded_stride_never_waits(tiny_policy, random_prompts, requests_of):
    """On the meta device; the host reads what was drawn once a stride, and once where rows begin."""
    policy = tiny_policy("llama").to("meta")
    engine = NativeEngine(policy, stride=8, kernels=GpuKernels(Recordings(lambda compute: lambda: None)))
    requests = requests_of(random_prompts(*LONG), 4, max_new_tokens=17)
    with Syncs() as syncs:
        for request in requests:
            engine.submit(request)
        assert len(list(engine.results())) == 12
    # Tokens and logprobs, of the first draw and of two strides; what a recording gives is compared once.
    assert dict(syncs.found) == {"rollout/native/engine.py: _take": 2 * 3, **COMPARED}


COMPARED = {"kernels/gpu/recordings.py: _made": 2}


# -- what CUDA is told


class FakeCuda:
    """The part of torch.cuda that records; a graph lives until nobody holds it."""

    def __init__(self, monkeypatch):
        self.handles, self.captures, self.current, self.told = 0, [], "main", []
        fake = self

        class Graph:
            def capture_begin(self, pool=None, capture_error_mode="global"):
                fake.captures.append((pool, capture_error_mode, fake.current))

            def capture_end(self):
                if fake.captures[-1] == "broken":
                    raise RuntimeError("capture was invalidated")

            def replay(self):
                pass

        class On:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                self.before, fake.current = fake.current, self.stream

            def __exit__(self, *error):
                fake.current = self.before

        def handle():
            self.handles += 1
            return self.handles

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": lambda: "side",
            "stream": On,
            "graph_pool_handle": handle,
            "synchronize": lambda: None,
            "current_device": lambda: 0,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            told = lambda device, pool, name=name: self.told.append((name, pool))  # noqa: E731
            monkeypatch.setattr(torch._C, name, told, raising=False)


def test_graphs_share_one_pool_and_leave_other_threads_alone(monkeypatch):
    fake, graphs = FakeCuda(monkeypatch), CudaGraphs()
    held = [graphs(lambda: None), graphs(lambda: None)]
    assert fake.captures == [(1, "thread_local", "side")] * 2 and fake.current == "main"
    # torch gives a pool up with its last graph: the next one has another.
    held.pop()
    held.append(graphs(lambda: None))
    assert fake.captures[-1][0] == 1
    held.clear()
    graphs(lambda: None)
    assert fake.captures[-1][0] == 2


def test_a_recording_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    fake, graphs = FakeCuda(monkeypatch), CudaGraphs()

    def fails():
        assert fake.current == "side" and not gc.isenabled()
        fake.captures.append("broken")
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs(fails)
    assert fake.current == "main" and gc.isenabled()
    # Else the allocator would wait for the end of this recording for good.
    assert fake.told == [("_cuda_endAllocateToPool", 1), ("_cuda_releasePool", 1)]


# -- room


def requests_for_room(number, prompt, tokens):
    sampling = SimpleNamespace(max_new_tokens=tokens)
    request = SimpleNamespace(
        prompt_token_ids=(1,) * prompt, sampling=sampling, may_go_on=False, extends=None
    )
    return [request] * number


def room_of(monkeypatch, budget):
    """With memory for so many tokens, those of the cache that is given back among them."""
    monkeypatch.setattr(
        caches, "rows_that_fit", lambda policy, tokens, given_back: max(1, budget[0] // tokens)
    )
    return caches.Caches(SimpleNamespace(), max_rows=64, stride=1)


def test_a_cache_that_grows_serves_both(monkeypatch):
    held = room_of(monkeypatch, [10**6])
    first = held.for_requests(requests_for_room(8, 80, 16), 2)
    second = held.for_requests(requests_for_room(4, 160, 160), 4)
    assert (second.shape.rows, second.shape.slots, second.shape.prompt) == (8, 4, 160)
    assert held.for_requests(requests_for_room(8, 80, 16), 2) is second is not first
    assert held.numbers == {second.number}


def test_a_cache_stays_while_free_memory_varies(monkeypatch):
    budget = [24_000]
    held = room_of(monkeypatch, budget)
    first = held.for_requests(requests_for_room(64, 100, 500), 8)
    assert first.shape.rows == 24_000 // (112 + 512)
    for budget[0] in (24_900, 22_000, 26_000):
        assert held.for_requests(requests_for_room(64, 100, 500), 8) is first
    budget[0] = 60_000
    assert held.for_requests(requests_for_room(64, 100, 500), 8).shape.rows == 64


def test_short_memory_is_not_shared_by_two_shapes(monkeypatch):
    """Few long rows of training and many short ones of an evaluation: each has as many as fit alone."""
    held = room_of(monkeypatch, [24_000])
    for _ in range(2):
        assert held.for_requests(requests_for_room(8, 100, 2000), 2).shape.rows == 8
        assert held.for_requests(requests_for_room(64, 80, 200), 64).shape.rows == 64


def test_rows_are_counted_with_the_old_cache_given_back(monkeypatch):
    asked = []

    def fits(policy, tokens, given_back):
        asked.append(given_back)
        return 64

    monkeypatch.setattr(caches, "rows_that_fit", fits)
    held = caches.Caches(SimpleNamespace(), max_rows=64, stride=1)
    first = held.for_requests(requests_for_room(8, 80, 16), 2)
    monkeypatch.setattr(type(first), "num_bytes", 500)
    held.for_requests(requests_for_room(8, 160, 16), 2)
    assert asked[0] == 0 and set(asked[1:]) == {500}
