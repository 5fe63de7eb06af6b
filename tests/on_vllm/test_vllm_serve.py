"""A run that samples on `vllm serve` itself, which covey has not started: one server of the built-in model,
with a key, on a port of this machine. Its head is untied, as the messages say that it has to be on a CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.checks.servers.look import with_servers
from covey.comm import LocalComm
from covey.config import from_dict
from covey.data.text import load_codec
from covey.errors import GuardStop, RunFailed
from covey.learner.backends.single import SingleBackend
from covey.learner.canary import learners_view
from covey.models.load import load_policy
from covey.models.lora import tied_names
from covey.models.policy import Policy
from covey.plan.facts import Facts, ServerFacts
from covey.quickstart import task
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.publisher import Publisher
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.vllm_serve import VllmServe
from covey.rollout.stop_strings import StopSearch
from covey.telemetry.rollouts import read_rollouts
from covey.training.served import served_engine
from covey.types import Finish, GenerationRequest, SamplingParams, TurnId
from support.engines import Plain, sampled
from support.steps import OPTIMIZER

pytestmark = pytest.mark.vllm

KEY = "a-key-of-tests"
SERVE = (
    f"-m vllm.entrypoints.openai.api_server --model {task.MODEL_DIR} --host 127.0.0.1 --dtype float32 "
    f"--max-model-len 256 --max-num-seqs 8 --enforce-eager --api-key {KEY} --logprobs-mode "
    "processed_logprobs --load-format dummy --hf-overrides"
).split()
ENVIRONMENT = {
    **{"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_PLUGINS": ""},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the server listens."""
    log, port = tmp_path_factory.mktemp("serve") / "log", free_port()
    words = [*SERVE, '{"tie_word_embeddings": false}', "--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, *words], env=os.environ | ENVIRONMENT, stdout=out, stderr=out
        )
    try:
        until = time.monotonic() + 400
        while "Application startup complete" not in log.read_text():
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY)
    return path


@pytest.fixture
def policy() -> Policy:
    return load_policy(task.MODEL_DIR, device=torch.device("cpu"), disable_dropout=True)


Built = tuple[ServerEngine, Publisher, Facts]


@pytest.fixture
def build(address: str, key: Path, policy: Policy) -> Iterator[Callable[..., Built]]:
    """The engine of a run and its publisher, as a run builds them."""
    engines: list[ServerEngine] = []

    def built(tied: dict[str, str] | None = None, **options: Any) -> Built:
        config = from_dict(
            {
                **{"model": "quickstart", "dataset": "quickstart", "reward_funcs": ["accuracy"]},
                **{"rollout_servers": [address], "rollout_token_file": str(key), "rollout_timeout": 60},
                **{"output_dir": str(key.parent), **options},
            }
        ).config
        facts = with_servers(Facts(), config)
        tokenizer = load_codec(task.MODEL_DIR).tokenizer
        engine = served_engine(config, facts, policy, LocalComm(), tokenizer)
        engines.append(engine)
        if tied is not None:
            engine._servers[0].tied = tied  # type: ignore[attr-defined]
        backend = SingleBackend(policy, OPTIMIZER)
        canary = Canary(
            requests=canary_requests(policy.vocab),
            view=learners_view(backend, lambda: None),
            bound=Bound(torch.float32, torch.float32),
        )
        return engine, Publisher(backend, engine, LocalComm(), canary=canary, tied=tied_names(policy)), facts

    yield built
    for engine in engines:
        engine.close()


def change(policy: Policy, seed: int) -> None:
    """Other weights, as far from the former ones as many steps."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.2 * parameter.std() * torch.randn_like(parameter)


def requests(count: int = 24, **sampling: Any) -> list[GenerationRequest]:
    given = {"temperature": 0.7, "max_new_tokens": 12, "stop_token_ids": (), **sampling}
    return [
        GenerationRequest(
            prompt_token_ids=(5 + number // 4, 6, 7),
            sampling=SamplingParams(**given),
            turn=TurnId(
                seed=1, split="train", rollout=0, attempt=0, prompt_id=number // 4, sibling=number % 4
            ),
        )
        for number in range(count)
    ]


def gap(policy: Policy, asked: list[GenerationRequest], completions: list[Plain]) -> float:
    """The largest distance of an engine's log-probability from that of transformers' own model."""
    largest = 0.0
    for request, completion in zip(asked, completions, strict=True):
        tokens = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = policy.model(tokens).logits[0] / request.sampling.temperature
        banned = torch.tensor(request.sampling.banned_token_ids, dtype=torch.long)
        own = logits.index_fill(1, banned, -torch.inf).log_softmax(-1)[len(request.prompt_token_ids) - 1 : -1]
        at = own.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        largest = max(largest, float((at - torch.tensor(completion.logprobs)).abs().max()))
    return largest


def test_it_says_what_it_is_and_its_open_routes_are_named(build: Callable[..., Built]) -> None:
    (server,) = build()[2].servers.asked or ()
    assert isinstance(server, ServerFacts) and server.vllm is not None
    own = server.vllm
    assert own.takes_weights and own.on_cpu and own.unties_head and own.max_num_seqs == 8
    assert (server.max_len, server.dtype, own.logprobs) == (256, "float32", "processed_logprobs")
    assert {"/collective_rpc", "/reset_prefix_cache", "/weight_info", "/pause", "/invocations"} <= {
        *own.open_routes
    }
    # These its key guards, or it does not have them.
    assert not {"/v1/completions", "/v1/load_lora_adapter"} & {*own.open_routes}


def test_each_publish_is_sampled_from(build: Callable[..., Built], policy: Policy) -> None:
    engine, publisher, _ = build()
    asked = requests()
    drawn = []
    for version in range(3):
        if version:
            change(policy, version)
        with publisher.serve(version) as serving:
            assert serving is engine
            completions = sampled(engine, asked)
        assert {v for c in completions for v in c.versions} == {version}
        assert publisher.last is not None and publisher.last.canary_gap is not None
        assert publisher.last.canary_gap < 1e-4
        assert gap(policy, asked, completions) < 1e-4
        drawn.append([c.token_ids for c in completions])
    # Each completion has a seed of its own, and draws the same again.
    assert [c.token_ids for c in sampled(engine, asked)] == drawn[-1]
    assert len({*drawn[-1][:4]}) > 1 and drawn[0] != drawn[1]
    assert engine.take_notices() == []


def test_banned_tokens_have_no_part(build: Callable[..., Built], policy: Policy) -> None:
    engine, publisher, _ = build()
    with publisher.serve(0):
        free = {token for completion in sampled(engine, requests()) for token in completion.token_ids}
        banned = tuple(sorted(free)[:40])
        asked = requests(banned_token_ids=banned)
        completions = sampled(engine, asked)
    assert not {*banned} & {token for completion in completions for token in completion.token_ids}
    assert gap(policy, asked, completions) < 1e-4


@pytest.mark.parametrize("is_emptied", [True, False])
def test_prompts_of_former_weights_are_forgotten(
    build: Callable[..., Built], policy: Policy, monkeypatch: pytest.MonkeyPatch, is_emptied: bool
) -> None:
    """What follows where the cache is not emptied shows that it has to be: the canary's prompts are too short
    to be kept."""
    engine, publisher, _ = build()
    asked = [replace(request, prompt_token_ids=tuple(range(200))) for request in requests(4)]
    with publisher.serve(0):
        assert gap(policy, asked, sampled(engine, asked)) < 1e-4
    change(policy, 1)
    if not is_emptied:
        monkeypatch.setattr(VllmServe, "_empty_cache", lambda self: None)
    with publisher.serve(1):
        assert (gap(policy, asked, sampled(engine, asked)) < 1e-4) is is_emptied


def test_a_completion_ends_with_its_stop_token(build: Callable[..., Built], policy: Policy) -> None:
    engine, publisher, _ = build()
    with publisher.serve(0):
        free = sampled(engine, requests(4))
        stop = free[0].token_ids[3]
        (stopped, *_) = sampled(engine, requests(4, stop_token_ids=(stop,)))
    end = free[0].token_ids.index(stop) + 1
    assert stopped.token_ids == free[0].token_ids[:end] and stopped.finish is Finish.STOP
    assert len(stopped.logprobs) == end and free[0].finish is Finish.LENGTH


def test_a_completion_ends_with_the_token_that_completes_a_stop_string(build: Callable[..., Built]) -> None:
    engine, publisher, _ = build()
    tokenizer = load_codec(task.MODEL_DIR).tokenizer
    with publisher.serve(0):
        free = sampled(engine, requests(max_new_tokens=60))
        found = sampled(engine, requests(max_new_tokens=60, stop_strings=("1", "/an")))
    ends = [StopSearch(tokenizer, ("1", "/an")).first_end(c.token_ids) for c in free]
    assert [c.token_ids for c in found] == [c.token_ids[:end] for c, end in zip(free, ends, strict=True)]
    assert [c.finish is Finish.STOP for c in found] == [end is not None for end in ends]
    assert [len(c.logprobs) for c in found] == [len(c.token_ids) for c in found]
    assert len({*ends}) > 3 and engine.take_notices() == []


def test_a_head_that_stays_old_is_named_at_the_publish(build: Callable[..., Built], policy: Policy) -> None:
    """The fault that every run on this server would have that sends the embedding alone."""
    _, publisher, _ = build(tied={})
    with publisher.serve(0):
        pass
    change(policy, 1)
    with pytest.raises(GuardStop, match="F152"), publisher.serve(1):
        pass


def label(address: str, text: str) -> None:
    body = json.dumps({"new_version": text}).encode()
    call = urllib.request.Request(
        f"{address}/update_weight_version", body, {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(call, timeout=20).close()


@pytest.mark.parametrize("text", ["default", "covey another 0"], ids=["restarted", "another run"])
def test_weights_of_others_are_not_sampled_from(build: Callable[..., Built], address: str, text: str) -> None:
    engine, publisher, _ = build()
    with publisher.serve(0):
        label(address, text)
        with pytest.raises(RunFailed, match=r"F140.*labeled"):
            sampled(engine, requests(4))


def test_a_request_that_is_aborted_ends(build: Callable[..., Built]) -> None:
    engine, publisher, _ = build()
    with publisher.serve(0):
        numbers = [engine.submit(request) for request in requests(8, max_new_tokens=200)]
        results = engine.results()
        engine.submit(requests(1, max_new_tokens=2)[0])
        next(results)
        engine.abort(numbers)
        assert {c.finish for c in results} == {Finish.ABORT}
        started = time.monotonic()
        assert len(sampled(engine, requests(4))) == 4 and time.monotonic() - started < 30


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run(address: str, key: Path, tmp_path: Path, ranks: int) -> None:
    words = (
        "train --model quickstart --dataset quickstart --reward_funcs accuracy --max_completion_length 16 "
        "--learning_rate 1e-3 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_steps 3 "
        f"--num_generations 4 --use_vllm true --vllm_mode server --vllm_server_base_url {address} "
        f"--rollout_token_file key --output_dir out --nproc_per_node {ranks}"
    )
    call: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([sys.executable, "-m", "covey", *words.split()], **call)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "W181" in said and "/collective_rpc" in said and "covey rollout --model quickstart" in said
    assert f"1 rollout server: {address} (vLLM 0.32" in said
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in steps] == [1, 2, 3]
    rollouts = dict(read_rollouts(tmp_path / "out" / "rollouts"))
    assert len(rollouts[0]) == 16 * ranks
    assert max(m["publish/canary_gap"] for m in steps if m["publish/canary_gap"] is not None) < 1e-3
    key.write_text("another")
    done = subprocess.run([sys.executable, "-m", "covey", *words.split()], **call)
    assert done.returncode == 2 and "E421" in done.stdout + done.stderr
