"""A rollout server and its client in one process: what is sampled, what is refused, and what is not lost."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save

from covey.checksums import checksum
from covey.errors import RunFailed
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.native.engine import NativeEngine
from covey.rollout.server.call import Refused, address_fault, read_token
from covey.rollout.server.http import ROUTES
from covey.rollout.server.token import own_token
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import (
    MARKER,
    RUN_HEADER,
    ServerStatus,
    completion_of,
    request_body,
    requests_of,
)
from covey.types import Finish, GenerationRequest, SamplingParams, TurnId
from support.engines import Plain, sampled
from support.servers import TOKEN, Running, engine_on, policy_of_server, running, status_of


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    """Models of three servers; each is its server's alone."""
    return [policy_of_server() for _ in range(3)]


@pytest.fixture
def server(policies: list[Policy]) -> Iterator[Running]:
    """One server, without weights."""
    with running(policies[0]) as found:
        yield found
        assert found.failed == []


@pytest.fixture(scope="module")
def requests(quickstart_codec: Any) -> list[GenerationRequest]:
    """Four prompts of the embedded task with four siblings each."""
    rows = task.training_rows()[:4]
    prompts = quickstart_codec.encode([quickstart_codec.render(r["messages"]) for r in rows])
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=12, stop_token_ids=quickstart_codec.stop_token_ids
    )
    return [
        GenerationRequest(prompt_token_ids=tuple(prompt), sampling=sampling, turn=key(number, sibling))
        for number, prompt in enumerate(prompts)
        for sibling in range(4)
    ]


def key(prompt: int, sibling: int) -> TurnId:
    return TurnId(seed=1, split="train", rollout=0, attempt=0, prompt_id=prompt, sibling=sibling)


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in plain_weights(policy)}


def same(one: list[Plain], two: list[Plain]) -> bool:
    return [(c.token_ids, c.finish) for c in one] == [(c.token_ids, c.finish) for c in two]


def test_a_server_samples_what_the_engine_of_the_process_does(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    own = NativeEngine(policies[1])
    own.publish(iter(()), 5)
    expected = sampled(own, requests)
    engine = engine_on([server.address])
    receipt = engine.publish(plain_weights(policies[1]), 5)
    assert receipt.members[server.address].fingerprints == {
        name: checksum(tensor) for name, tensor in plain_weights(policies[1])
    }
    found = sampled(engine, requests)
    assert same(found, expected)
    assert [c.versions for c in found] == [(5,) * len(c.token_ids) for c in found]
    for one, two in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)
    engine.close()


def test_weights_are_those_that_were_published_last(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    """A publish that changes nothing on the server would give the same completions."""
    engine = engine_on([server.address])
    weights = weights_of(policies[1])
    engine.publish(iter(weights.items()), 0)
    before = sampled(engine, requests)
    engine.publish(iter({n: t + 0.05 * torch.randn(t.shape) for n, t in weights.items()}.items()), 1)
    assert not same(sampled(engine, requests), before)
    engine.publish(iter(weights.items()), 2)
    assert same(sampled(engine, requests), before)
    engine.close()


def test_a_few_servers_share_the_work_and_keep_siblings_together(
    policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    with running(policies[0]) as one, running(policies[2]) as two:
        engine = engine_on([one.address, two.address])
        engine.publish(plain_weights(policies[1]), 0)
        submitted: dict[str, list[tuple[int, ...]]] = {one.address: [], two.address: []}
        for server in (one, two):
            real = server.engine.submit
            server.engine.submit = lambda r, real=real, s=server: (  # type: ignore[method-assign]
                submitted[s.address].append(r.prompt_token_ids),
                real(r),
            )[1]
        alone = engine.members[two.address]
        found = sampled(engine, requests)
        assert [len(prompts) for prompts in submitted.values()] == [8, 8]
        assert not set(submitted[one.address]) & set(submitted[two.address])
        assert same(sampled(alone, requests), found)
        assert len(submitted[two.address]) == 8 + 16
        engine.close()


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/"), ("POST", "/v1/none")])
@pytest.mark.parametrize("header", [None, "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
def test_every_route_asks_for_the_token(server: Running, method: str, path: str, header: str | None) -> None:
    status, body = raw(server, method, path, b"{}", {"Authorization": header} if header else {})
    assert status == 401 and "token" in body["error"]


def raw(
    server: Running, method: str, path: str, data: bytes | None, headers: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=10)
    connection.request(method, path, body=data, headers=headers)
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body


def own(more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"Authorization": f"Bearer {TOKEN}", **(more or {})}


def test_unknown_routes_and_bodies_without_or_beyond_their_length_are_refused(server: Running) -> None:
    assert raw(server, "GET", "/v1/none", None, own())[0] == 404
    for path in (path for method, path in ROUTES if method == "POST"):
        assert raw(server, "POST", path, None, own({"Content-Length": str(1 << 40)}))[0] == 413
        assert raw(server, "POST", path, None, own({"Transfer-Encoding": "chunked"}))[0] == 411
        assert raw(server, "POST", path, None, own({"Content-Length": "-1"}))[0] == 411
        assert raw(server, "POST", path, b"\xff{", own())[0] == 400


def test_tensors_beyond_the_bound_are_refused_before_they_are_read(server: Running) -> None:
    too_many = str((1 << 22) + (1 << 20) + 1)
    headers = own({"Content-Length": too_many, RUN_HEADER: "run-1"})
    assert raw(server, "POST", "/v1/publish/tensors?transfer=x", None, headers)[0] == 413


def test_another_run_is_refused_until_the_first_has_ended(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    first, second = engine_on([server.address]), engine_on([server.address], run="run-2")
    first.publish(plain_weights(policies[1]), 0)
    with pytest.raises(RunFailed, match=r"F141.*the run test run-1 uses this server"):
        second.publish(plain_weights(policies[1]), 0)
    # Not even with the address and the token, while the first one samples.
    body = {"version": 0, "requests": [request_body(requests[0])]}
    for path, sent in (
        ("/v1/generate", body),
        ("/v1/abort", {"ids": None}),
        ("/v1/publish/begin", {"version": 1, "form": "whole"}),
        ("/v1/publish/end", {"transfer": "x", "tensors": 0}),
    ):
        with pytest.raises(Refused, match="run-1 uses this server"):
            server.caller("run-2").post(path, sent)
    assert len(sampled(first, requests)) == 16
    first.close()
    wait_until(lambda: not server.front.status().run)
    second.publish(plain_weights(policies[1]), 0)
    second.close()


def wait_until(holds: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def refused_publish(server: Running, tensors: dict[str, torch.Tensor]) -> str:
    """What a server says of weights that it does not take."""
    engine = engine_on([server.address])
    with pytest.raises(RunFailed, match="F141") as failed:
        engine.publish(iter(tensors.items()), 0)
    engine.close()
    assert server.front.status().version == -1
    return str(failed.value)


def test_weights_that_are_not_the_models_are_refused_by_name(server: Running, policies: list[Policy]) -> None:
    weights = weights_of(policies[1])
    first, *_, last = weights
    assert f"no tensor {first}.old" in refused_publish(server, {**weights, f"{first}.old": weights[first]})
    left_out = {n: t for n, t in weights.items() if n != last}
    assert f"weights that were not sent: {last}" in refused_publish(server, left_out)
    assert f"{last} is float32" in refused_publish(server, {**weights, last: weights[last].bfloat16()})
    assert f"{last} is float32" in refused_publish(server, {**weights, last: weights[last][:1]})


def test_after_a_publish_that_failed_nothing_is_sampled(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    engine = engine_on([server.address])
    weights = weights_of(policies[1])
    engine.publish(iter(weights.items()), 3)
    partial = dict(list(weights.items())[:2])
    with pytest.raises(RunFailed, match="F141"):
        engine.publish(iter(partial.items()), 4)
    for version in (3, 4):
        body = {"version": version, "requests": [request_body(requests[0])]}
        with pytest.raises(Refused, match="no whole version"):
            server.caller("run-1").post("/v1/generate", body)
    engine.publish(iter(weights.items()), 4)
    assert len(sampled(engine, requests)) == 16
    engine.close()


def test_two_publishes_that_cross_give_no_mixture(server: Running, policies: list[Policy]) -> None:
    """The newer one takes the place of the other, whose tensors are refused from then on."""
    caller = server.caller("run-1")
    answer = caller.open("POST", "/v1/attend", {"run": "run-1", "name": "test"})
    old = caller.post("/v1/publish/begin", {"version": 1, "form": "whole"})["transfer"]
    weights = weights_of(policies[1])
    name = next(iter(weights))
    caller.post(f"/v1/publish/tensors?transfer={old}", save({name: weights[name]}))
    new = caller.post("/v1/publish/begin", {"version": 2, "form": "whole"})["transfer"]
    with pytest.raises(Refused, match="not open"):
        caller.post(f"/v1/publish/tensors?transfer={old}", save({name: weights[name]}))
    with pytest.raises(Refused, match="not open"):
        caller.post("/v1/publish/end", {"transfer": old, "tensors": 1})
    assert server.front.status().version == -1 and server.front.status().is_receiving
    caller.post(f"/v1/publish/tensors?transfer={new}", save(weights))
    with pytest.raises(Refused, match="2 tensors were sent"):
        caller.post("/v1/publish/end", {"transfer": new, "tensors": 2})
    receipt = caller.post("/v1/publish/end", {"transfer": new, "tensors": len(weights)})
    assert receipt["version"] == 2 == server.front.status().version
    answer.close()


def test_an_id_that_runs_already_or_is_given_twice_is_refused(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies[1]), 0)
    stop = threading.Event()
    server.engine.on_turn = lambda real=server.engine.on_turn: (real(), stop.wait(0.5))  # type: ignore[misc]
    caller, body = server.caller("run-1"), request_body(requests[0])
    with caller.open("POST", "/v1/generate", {"version": 0, "requests": [body]}) as answer:
        with pytest.raises(Refused, match="is running already") as refused:
            caller.post("/v1/generate", {"version": 0, "requests": [body]})
        assert refused.value.status == 409
        with pytest.raises(Refused, match="given twice"):
            caller.post("/v1/generate", {"version": 0, "requests": [body, body]})
        with pytest.raises(Refused, match="version 1 is asked for") as refused:
            caller.post("/v1/generate", {"version": 1, "requests": [request_body(requests[1])]})
        assert refused.value.body["version"] == 0
        stop.set()
        lines = list(answer.lines())
    assert [line["id"] for line in lines if "id" in line] == [requests[0].turn.text]
    assert lines[-1] == {"done": True}
    engine.close()


def test_who_hangs_up_leaves_nothing_running(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies[1]), 0)
    server.engine.on_turn = lambda real=server.engine.on_turn: (real(), time.sleep(0.2))  # type: ignore[misc]
    for request in requests:
        engine.submit(request)
    results = engine.results()
    next(results)
    results.close()
    wait_until(lambda: not server.front._running)
    assert engine._streams == [] and not engine._queue
    engine.close()


def test_an_abort_ends_what_waits_and_what_runs(
    server: Running, policies: list[Policy], requests: list[GenerationRequest]
) -> None:
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies[1]), 0)
    server.engine.on_turn = lambda real=server.engine.on_turn: (real(), time.sleep(0.02))  # type: ignore[misc]
    numbers = [engine.submit(request) for request in requests]
    found = []
    for completion in engine.results():
        if not found:
            engine.abort([n for n in numbers if n != completion.request_id])
        found.append(completion)
    assert sorted(c.request_id for c in found) == numbers
    assert [c.finish for c in found].count(Finish.ABORT) == 15
    wait_until(lambda: not server.front._running)
    assert len(sampled(engine, requests)) == 16
    engine.close()


def test_weights_go_through_a_directory_that_both_sides_see(tmp_path: Path, policies: list[Policy]) -> None:
    (tmp_path / f"{MARKER}{'0' * 16}").touch()
    outside = tmp_path.parent / "outside.safetensors"
    with running(policies[0], tmp_path) as server:
        caught = []
        real = server.front.give
        server.front.give = lambda *a: (caught.append(len(a[2])), real(*a))[1]  # type: ignore[method-assign]
        engine = engine_on([server.address])
        receipt = engine.publish(plain_weights(policies[1]), 0)
        assert sum(caught) == len(receipt.members[server.address].fingerprints)
        assert [p.name for p in tmp_path.iterdir()] == [f"{MARKER}{'0' * 16}"]
        transfer = server.caller("run-1").post("/v1/publish/begin", {"version": 1, "form": "whole"})[
            "transfer"
        ]
        outside.write_bytes(save({"x": torch.zeros(1)}))
        (tmp_path / "link").symlink_to(outside)
        for name in ("../outside.safetensors", str(outside), "link"):
            with pytest.raises(Refused, match="outside the directory"):
                server.caller("run-1").post("/v1/publish/files", {"transfer": transfer, "file": name})
        with pytest.raises(Refused, match="cannot be read"):
            server.caller("run-1").post("/v1/publish/files", {"transfer": transfer, "file": "none"})
        engine.close()


def test_without_such_a_directory_no_file_is_read(server: Running) -> None:
    caller = server.caller("run-1")
    with (
        caller.open("POST", "/v1/attend", {"run": "run-1", "name": "x"}),
        pytest.raises(Refused, match="403"),
    ):
        caller.post("/v1/publish/files", {"transfer": "x", "file": "x"})


SAMPLING = {
    **{"temperature": 1, "max_new_tokens": 4, "stop_token_ids": [], "stop_strings": []},
    **{"top_p": 1, "top_k": 0, "min_p": 0, "banned_token_ids": []},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_token_ids": []}, "at least one token"),
        ({"prompt_token_ids": [5, 1 << 20]}, "outside the vocabulary"),
        ({"prompt_token_ids": [-1]}, "whole numbers"),
        ({"prompt_token_ids": "12"}, "whole numbers"),
        ({"prompt_token_ids": [1] * 2048}, "more than the 2048"),
        ({"id": ""}, "an id is text"),
        ({"more": 1}, "exactly the fields"),
        ({"sampling": SAMPLING | {"temperature": 0}}, "temperature"),
        ({"sampling": SAMPLING | {"temperature": float("nan")}}, "temperature"),
        ({"sampling": SAMPLING | {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling": SAMPLING | {"stop_strings": "ab"}}, "a list of at most"),
        ({"sampling": SAMPLING | {"stop_strings": ["a"] * 100}}, "a list of at most"),
        ({"sampling": SAMPLING | {"stop_strings": ["a", ""]}}, "text of 1 to"),
        ({"sampling": SAMPLING | {"stop_strings": [["a"]]}}, "text of 1 to"),
        ({"sampling": SAMPLING | {"top_p": 0}}, "top_p is a number above 0"),
        ({"sampling": SAMPLING | {"top_p": 1.01}}, "top_p is a number above 0"),
        ({"sampling": SAMPLING | {"top_k": 321}}, "top_k is a number from 0 to the 320"),
        ({"sampling": SAMPLING | {"top_k": -1}}, "top_k is a number from 0 to the 320"),
        ({"sampling": SAMPLING | {"top_k": 2.0}}, "top_k is a number from 0 to the 320"),
        ({"sampling": SAMPLING | {"min_p": float("nan")}}, "min_p is a number from 0 to 1"),
        ({"turn": {"seed": 1}}, "exactly the fields"),
        ({"extends": {"seed": 1}}, "exactly the fields"),
        ({"may_go_on": 1}, "true or false"),
    ],
)
def test_requests_are_checked(
    policies: list[Policy], requests: list[GenerationRequest], change: dict[str, Any], words: str
) -> None:
    about = status_of(policies[0], has_tokenizer=True)
    body = json.loads(json.dumps(request_body(requests[0])))
    assert requests_of([body], about) == {body["id"]: requests[0]}
    with pytest.raises(WireError, match=words):
        requests_of([{**body, **change}], about)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [3, 4], "logprobs": [-1.0], "versions": [[0, 1]]}, "fewer or more logprobs"),
        ({"token_ids": [900]}, "outside the vocabulary"),
        ({"logprobs": [float("nan")]}, "not finite"),
        ({"logprobs": [0.5]}, "at most 0"),
        ({"logprobs": ["-1"]}, "not finite"),
        ({"versions": [[1, 1]]}, "versions .1., which have to rise up to 0"),
        ({"versions": [0]}, "pairs of a version"),
        ({"versions": [[0, 0]]}, "pairs of a version"),
        ({"versions": [[0, 1.0]]}, "pairs of a version"),
        ({"versions": [[0, 2]]}, "fewer or more logprobs or versions"),
        ({"finish": "abort"}, "with the finish reason"),
        ({"finish": "tired"}, "with the finish reason"),
        ({"token_ids": [], "logprobs": [], "versions": []}, "0 tokens"),
        ({"token_ids": [3] * 13, "logprobs": [-1.0] * 13, "versions": [[0, 13]]}, "more than were asked"),
        ({"seconds": None}, "seconds"),
    ],
)
def test_completions_are_checked(
    requests: list[GenerationRequest], change: dict[str, Any], words: str
) -> None:
    body = {
        **{"id": "x", "token_ids": [3], "logprobs": [-1.0], "versions": [[0, 1]]},
        **{"finish": "length", "seconds": 0.1, "kept": None},
    }
    found = completion_of(body, 7, requests[0], vocab=320, newest=0)
    assert found.request_id == 7 and found.finish is Finish.LENGTH
    with pytest.raises(WireError, match=words):
        completion_of({**body, **change}, 7, requests[0], vocab=320, newest=0)


def test_a_status_of_another_program_is_none(policies: list[Policy]) -> None:
    for body in ([], {}, {"protocol": 1}, {"protocol": 2, "name": 3}):
        with pytest.raises(WireError):
            ServerStatus.of(body)


def test_a_token_is_made_once_and_never_taken_from_a_file_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.token"
    token = own_token(path)
    assert len(token) >= 32 and path.stat().st_mode & 0o777 == 0o600
    assert own_token(path) == token == read_token(str(path))
    path.chmod(0o640)
    with pytest.raises(WireError, match="other users can read it"):
        own_token(path)
    path.write_text("")
    with pytest.raises(WireError, match="0 words"):
        read_token(str(path))


def test_addresses() -> None:
    for good in ("http://127.0.0.1:8000", "https://node1:443", "http://[::1]:80"):
        assert address_fault(good) is None
    for bad in (
        "127.0.0.1:8000",
        "http://",
        "http://u:p@h:1",
        "http://h:1/v1",
        "http://h:0",
        "http://h:x",
        "ftp://h:1",
    ):
        assert address_fault(bad) is not None


def test_only_this_machine_reaches_it(server: Running) -> None:
    port = urlsplit(server.address).port
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port or 0), 2):
        pass
