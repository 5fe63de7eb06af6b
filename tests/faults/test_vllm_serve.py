"""Servers of `vllm serve` that answer garbage, break off or stand still, and what a publish asks of them. The
server is a stand-in with vLLM's routes; tests/on_vllm runs the real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from covey.activity import Activity
from covey.errors import RunFailed
from covey.plan.facts import VllmServeFacts
from covey.rollout.server.call import Caller
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.vllm_serve import VllmServe
from covey.types import Finish, GenerationRequest, SamplingParams, TurnId
from support.engines import sampled
from support.web import Handler, listening

pytestmark = pytest.mark.multi

WEIGHTS = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.ones(3)}
DONE = b"data: [DONE]\n\n"


def event(tokens: list[int], finish: str | None = None, **changes: Any) -> bytes:
    """A part of a completion, as vLLM sends it."""
    choice = {
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        "finish_reason": finish,
    }
    return f"data: {json.dumps({'choices': [choice | changes]})}\n\n".encode()


GOOD = [event([3]), event([4, 5]), event([6], "length"), DONE]


@dataclass
class StandIn:
    """A server; `parts` are what each completion is sent as, None where it says nothing more."""

    parts: list[bytes | None] = field(default_factory=lambda: list(GOOD))
    label: str = "default"
    reloads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    resets: list[bool] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/weight_info":
                return {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
                return {"success": True}
            case "/reset_prefix_cache":
                return {"success": self.resets.pop(0) if self.resets else True}
            case "/collective_rpc":
                if body["method"] == "reload_weights":
                    directory = Path(body["kwargs"]["weights_path"])
                    files = [load_file(str(file)) for file in sorted(directory.iterdir())]
                    self.reloads.append({name: tensor for file in files for name, tensor in file.items()})
                return {"results": [None]}


@contextmanager
def standing_in(**changes: Any) -> Iterator[StandIn]:
    stand_in = StandIn(**changes)

    class Answers(Handler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.read_json()
            if self.path != "/v1/completions":
                self.answer(200, stand_in.answer(self.path, body))
                return
            stand_in.asked.append(body)
            self.send_response(200)
            self.end_headers()
            for part in stand_in.parts:
                if part is None:
                    stand_in.over.wait(30)
                    return
                self.wfile.write(part)

    with listening(Answers) as stand_in.address:
        try:
            yield stand_in
        finally:
            stand_in.over.set()


@contextmanager
def engine_on(
    directory: Path, *servers: StandIn, unties_head: bool = False, tokenizer: Tokenizer | None = None
) -> Iterator[ServerEngine]:
    about = VllmServeFacts(
        version="0.32.0", max_num_seqs=2, unties_head=unties_head, directory=str(directory)
    )
    given: dict[str, Any] = {"model": "m", "vocab": 10, "max_len": 64, "dtype": "float32"}
    given |= {"tokenizer": tokenizer}
    engine = ServerEngine(
        [
            VllmServe(
                Caller(address=server.address, token="", timeout_s=1.5, run="run-1"),
                about,
                tied={"head": "embed"},
                **given,
            )
            for server in servers
        ],
        Activity(),
        timeout_s=1.5,
        publishes=True,
        noise_keys=False,
        tokenizer=tokenizer,
    )
    try:
        yield engine
    finally:
        engine.close()


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_token_ids=(1, 2 + number // 2),
            sampling=SamplingParams(temperature=0.7, max_new_tokens=4, stop_token_ids=(9,)),
            turn=TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=0, sibling=number),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("unties_head", [False, True])
def test_a_publish_gives_it_every_tensor_and_leaves_no_file(tmp_path: Path, unties_head: bool) -> None:
    with standing_in() as server, engine_on(tmp_path, server, unties_head=unties_head) as engine:
        server.resets = [False, True]
        receipt = engine.publish(iter(WEIGHTS.items()), 3)
        assert set(receipt.members[server.address].unread) == set(WEIGHTS)
        expected = WEIGHTS | ({"head": WEIGHTS["embed"]} if unties_head else {})
        (read,) = server.reloads
        assert read.keys() == expected.keys() and all(read[n].equal(t) for n, t in expected.items())
        assert list(tmp_path.iterdir()) == [] and server.label == "covey run-1 3" and server.resets == []
        found = sampled(engine, requests(5))
        assert {c.token_ids for c in found} == {(3, 4, 5, 6)} and {c.versions for c in found} == {(3,) * 4}
        assert len({body["seed"] for body in server.asked}) == 5
        assert {body["temperature"] for body in server.asked} == {0.7}


def test_a_stop_string_ends_a_completion_that_goes_on(tmp_path: Path) -> None:
    """vLLM is not told of it: the run reads no more, and cuts what came in one part with the end."""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(10)}, unk_token="t0"))
    parts: list[bytes | None] = [event([3]), event([4, 5]), event([6]), None]
    with standing_in(parts=parts) as server, engine_on(tmp_path, server, tokenizer=tokenizer) as engine:
        engine.publish(iter(WEIGHTS.items()), 3)
        for string, expected in (("3 t4", (3, 4)), ("t4 t5 t6", (3, 4, 5, 6))):
            asked = [replace(r, sampling=replace(r.sampling, stop_strings=(string,))) for r in requests(3)]
            found = sampled(engine, asked)
            assert {(c.token_ids, c.finish) for c in found} == {(expected, Finish.STOP)}
            assert {len(c.logprobs) for c in found} == {len(expected)}
        # What is no token of the model is looked for in no text.
        server.parts = [event([3, 1 << 40])]
        with pytest.raises(RunFailed, match="outside the vocabulary"):
            sampled(engine, asked)


def test_a_cache_that_is_not_emptied_fails_the_publish(tmp_path: Path) -> None:
    with standing_in() as server, engine_on(tmp_path, server) as engine:
        server.resets = [False] * 100
        with pytest.raises(RunFailed, match=r"F141.*did not empty its prefix cache"):
            engine.publish(iter(WEIGHTS.items()), 0)
        assert server.label == "covey run-1 -1" and list(tmp_path.iterdir()) == []


BROKEN: dict[str, list[bytes | None]] = {
    "no JSON": [b"data: <html>\n\n"],
    "an error in the middle": [event([3]), b'data: {"error": {"message": "out of memory"}}\n\n'],
    "an early end": [event([3])],
    "no finish": [event([3]), DONE],
    "aborted": [event([3], "abort"), DONE],
    "other logprobs than tokens": [event([3], "length", logprobs={"token_logprobs": []}), DONE],
    "no logprobs": [event([3], "length", logprobs=None), DONE],
    "a token of no vocabulary": [event([10], "length"), DONE],
    "more tokens than asked for": [event([3] * 5, "length"), DONE],
    "silence in the middle": [event([3]), None],
}


PASSING = ("an early end", "silence in the middle")


@pytest.mark.parametrize("what", BROKEN)
def test_a_server_that_is_broken_loses_its_work_to_another(tmp_path: Path, what: str) -> None:
    with ExitStack() as stack:
        good, bad = stack.enter_context(standing_in()), stack.enter_context(standing_in())
        engine = stack.enter_context(engine_on(tmp_path, good, bad))
        engine.publish(iter(WEIGHTS.items()), 0)
        bad.parts = BROKEN[what]
        started = time.monotonic()
        assert {c.token_ids for c in sampled(engine, requests(12))} == {(3, 4, 5, 6)}
        assert time.monotonic() - started < 20 and bad.asked
        seen = " ".join(notice.seen for notice in engine.take_notices())
        # What breaks off or is silent is asked again; by then the work is done.
        assert (bad.address in seen) is (what not in PASSING) and good.address not in seen


def test_weights_that_were_replaced_meanwhile_are_not_sampled_from(tmp_path: Path) -> None:
    with standing_in() as server, engine_on(tmp_path, server) as engine:
        engine.publish(iter(WEIGHTS.items()), 0)
        server.label = "default"
        with pytest.raises(RunFailed, match=r"F140.*labeled 'default'"):
            sampled(engine, requests(3))


@pytest.mark.parametrize("is_lost", [False, True], ids=["", "lost"])
def test_a_further_turn_goes_whole_to_the_server_that_has_the_conversation(
    tmp_path: Path, is_lost: bool
) -> None:
    """Its cache of prefixes has all but the last tokens. Conversations of a lost server go to the other."""
    with ExitStack() as stack:
        pair = stack.enter_context(standing_in()), stack.enter_context(standing_in())
        engine = stack.enter_context(engine_on(tmp_path, *pair))
        engine.publish(iter(WEIGHTS.items()), 0)
        first = [replace(r, prompt_token_ids=(1, n), may_go_on=True) for n, r in enumerate(requests(10))]
        asked = {engine.submit(request): request for request in first}
        ended: list[tuple[int, ...]] = []
        for completion in engine.results():
            request = asked[completion.request_id]
            said = (*request.prompt_token_ids, *completion.token_ids.tolist())
            ended.append(said)
            if request.turn.turn < 2:
                turn = replace(request.turn, turn=request.turn.turn + 1)
                further = replace(request, prompt_token_ids=(*said, 8), turn=turn, extends=request.turn)
                asked[engine.submit(further)] = further
            if is_lost and request.turn.turn == 1:
                pair[1].parts = [event([10], "length"), DONE]
        whole = (3, 4, 5, 6, 8, 3, 4, 5, 6, 8, 3, 4, 5, 6)
        assert sorted(tokens for tokens in ended if len(tokens) > 12) == [(1, n, *whole) for n in range(10)]
        held = [{tuple(body["prompt"][:2]) for body in server.asked} for server in pair]
        assert all(held) and len(held[0] | held[1]) == 10
        assert bool(held[0] & held[1]) is is_lost
        prompts = [body["prompt"] for server in pair for body in server.asked]
        assert {len(prompt) for prompt in prompts} == {2, 7, 12} and (is_lost or len(prompts) == 30)
