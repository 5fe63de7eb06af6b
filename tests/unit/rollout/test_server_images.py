"""Images of requests on rollout servers: each is sent once, and servers sample what the engine of the process
does."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.data.vision import VisionSpec
from covey.errors import EngineLost
from covey.media.errors import MediaError
from covey.media.sizes import limits_of, preparation_of
from covey.media.store import key_of_bytes
from covey.models.lora import plain_weights
from covey.models.policy import Policy
from covey.rollout.server.call import Refused
from covey.rollout.server.images import HeldImages, ImagesMissing
from covey.rollout.server.media_wire import media_body, media_of, query_of
from covey.rollout.server.queue import parts_of
from covey.rollout.server.sampling_wire import bans_of
from covey.rollout.server.values import WireError
from covey.rollout.server.wire import request_body, requests_of
from covey.types import GenerationRequest, Medium
from support.engines import sampled
from support.image_requests import (
    BLUE,
    RED,
    WIDE,
    agrees,
    expected,
    image_at,
    image_of,
    own_gap,
    request_of,
    requests_with_images,
    spec_of,
)
from support.servers import Running, engine_on, policy_of_server, running, status_of
from support.vision import IMAGE, picture


@pytest.fixture(scope="module")
def spec(vision_model: Path) -> VisionSpec:
    """How its prompts hold images."""
    return spec_of(vision_model)


@pytest.fixture(scope="module")
def policies(vision_model: Path) -> list[Policy]:
    """That of the run, and those of three servers."""
    return [policy_of_server(vision_model) for _ in range(4)]


@pytest.fixture(scope="module")
def requests(policies: list[Policy], spec: VisionSpec, tmp_path_factory: Any) -> list[GenerationRequest]:
    """Requests with images and without."""
    return requests_with_images(policies[0], spec, tmp_path_factory.mktemp("images"))


def seeing(
    policy: Policy, directory: Path, max_bytes: int = 1 << 20, **more: Any
) -> AbstractContextManager[Running]:
    """A server whose model takes images."""
    held = HeldImages(IMAGE, limits_of(directory), max_bytes)
    about = {"images": preparation_of(directory), "bans": bans_of(policy.head.banned)}
    return running(policy, held_images=held, **about, **more)


@pytest.fixture
def server(policies: list[Policy], vision_model: Path) -> Iterator[Running]:
    """One server, without weights."""
    with seeing(policies[1], vision_model) as found:
        yield found
        assert found.failed == []


def taken(server: Running) -> Counter[str]:
    """Count the images that a server is sent from now on, by their keys."""
    assert server.front.images is not None
    real, counts = server.front.images.keep, Counter[str]()

    def keep(key: str, *rest: Any) -> None:
        counts[key] += 1
        real(key, *rest)

    server.front.images.keep = keep  # type: ignore[method-assign]
    return counts


def wait_until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("num", [1, 2])
def test_servers_sample_what_the_engine_of_the_process_does(
    policies: list[Policy], vision_model: Path, requests: list[GenerationRequest], num: int
) -> None:
    own = expected(policies[0], requests)
    # Prompts that differ in the image alone.
    assert own[0].logprobs != own[2].logprobs
    assert own_gap(policies[0], requests, own) < 1e-5
    with seeing(policies[1], vision_model) as one, seeing(policies[2], vision_model) as two:
        servers = [one, two][:num]
        counts = [taken(server) for server in servers]
        engine = engine_on([server.address for server in servers])
        engine.publish(plain_weights(policies[0]), 0)
        assert agrees(sampled(engine, requests), own)
        sent = [dict(count) for count in counts]
        # Again: nothing is sent a second time.
        assert agrees(sampled(engine, requests), own)
        for count, before, server in zip(counts, sent, servers, strict=True):
            assert set(count.values()) == {1}
            assert num == 2 or dict(count) == before
            assert server.failed == []
        assert {key for count in counts for key in count} == {m.key for r in requests for m in r.media}
        engine.close()


def test_generate_on_a_server_samples_the_same(
    policies: list[Policy], vision_model: Path, requests: list[GenerationRequest]
) -> None:
    own = expected(policies[0], requests)
    policies[3].use_stream("padded")
    with seeing(policies[3], vision_model) as server:
        assert server.engine.name == "generate"
        engine = engine_on([server.address])
        engine.publish(plain_weights(policies[0]), 0)
        assert agrees(sampled(engine, requests), own)
        engine.close()


def test_calls_that_share_an_image_send_it_once(
    server: Running,
    policies: list[Policy],
    requests: list[GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("covey.rollout.server.queue.IMAGES_OF_CALL", 1)
    counts = taken(server)
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies[0]), 0)
    assert agrees(sampled(engine, requests), expected(policies[0], requests))
    assert set(counts.values()) == {1} and len(counts) == 3
    engine.close()


def test_a_call_has_no_more_images_than_a_server_holds_at_once(
    spec: VisionSpec, policies: list[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.rollout.server.queue.IMAGES_OF_CALL", 2)
    media = [replace(image_of(spec, RED), key=f"{n:016x}") for n in range(5)]
    own: list[list[Medium]] = [
        [media[0]],
        [media[0], media[1]],
        [],
        [media[2]],
        media[1:],
        media[1:],
        [media[1]],
    ]
    asks = [(number, request_of(policies[0], parts, number)) for number, parts in enumerate(own)]
    parts = [[number for number, _ in part.values()] for part in parts_of(asks)]
    assert parts == [[0, 1, 2], [3], [4, 5, 6]]


def test_what_a_lost_server_had_is_sent_to_the_other_one_with_its_images(
    policies: list[Policy], vision_model: Path, requests: list[GenerationRequest]
) -> None:
    with seeing(policies[1], vision_model) as lost, seeing(policies[2], vision_model) as other:
        counts = [taken(server) for server in (lost, other)]
        engine = engine_on([lost.address, other.address])
        engine.publish(plain_weights(policies[0]), 0)

        def break_off(*given: Any) -> Any:
            raise ConnectionResetError("a test")

        lost.front.generate = break_off  # type: ignore[method-assign]
        assert agrees(sampled(engine, requests), expected(policies[0], requests))
        assert counts[0] and len(counts[1]) == 3 and set(counts[1].values()) == {1}
        engine.close()


def test_images_are_dropped_within_a_bound_and_sent_again(
    policies: list[Policy],
    vision_model: Path,
    requests: list[GenerationRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that cross drop the images of each other."""
    monkeypatch.setattr("covey.rollout.server.queue.IMAGES_OF_CALL", 1)
    most = len(RED) + len(WIDE)
    with seeing(policies[1], vision_model, most) as server:
        counts, held = taken(server), server.front.images
        assert held is not None
        engine = engine_on([server.address])
        engine.publish(plain_weights(policies[0]), 0)
        for _ in range(2):
            assert agrees(sampled(engine, requests), expected(policies[0], requests))
            assert 0 < held.held_bytes <= most
        assert max(counts.values()) > 1
        engine.close()
        wait_until(lambda: held.held_bytes == 0)
        assert server.failed == []


def test_an_image_that_cannot_be_read_ends_the_rollout_with_its_reason(
    server: Running, policies: list[Policy], spec: VisionSpec, tmp_path: Path
) -> None:
    """It is no fault of a server."""
    file = tmp_path / "image.png"
    file.write_bytes(RED)
    request = request_of(policies[0], [5, image_at(spec, file), 6])
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies[0]), 0)
    file.write_bytes(BLUE)
    with pytest.raises(MediaError, match=r"image\.png has changed"):
        sampled(engine, [request])
    file.unlink()
    with pytest.raises(MediaError, match=r"image\.png does not exist"):
        sampled(engine, [request])
    assert engine.take_notices() == []
    engine.close()


def test_a_server_without_images_is_refused(
    policies: list[Policy], vision_model: Path, requests: list[GenerationRequest]
) -> None:
    bans = bans_of(policies[2].head.banned)
    with seeing(policies[1], vision_model) as one, running(policies[2], bans=bans) as two:
        engine = engine_on([one.address, two.address])
        engine.publish(plain_weights(policies[0]), 0)
        with pytest.raises(ValueError, match=f"{two.address} takes no images"):
            engine.submit(requests[0])
        # A process that does not publish hears of its servers as it samples.
        other = engine_on([two.address], publishes=False)
        other.publish(iter(()), 0)
        other.submit(requests[0])
        with pytest.raises(EngineLost, match="takes no images"):
            list(other.results())
        caller = two.caller("run-1")
        for path, body in (
            ("/v1/images/missing", {"keys": []}),
            (f"/v1/images?{query_of(requests[0].media[0])}", RED),
            ("/v1/generate", {"version": 0, "requests": [request_body(requests[0])]}),
        ):
            with pytest.raises(Refused, match="takes no images"):
                caller.post(path, body)
        other.close()
        engine.close()


def test_too_many_images_are_refused_before_they_are_sent(
    server: Running, policies: list[Policy], spec: VisionSpec
) -> None:
    medium = image_of(spec, RED)
    engine = engine_on([server.address])
    with pytest.raises(ValueError, match="257 images; a rollout server takes 256"):
        engine.submit(request_of(policies[0], [medium] * 257))


def test_only_the_run_sends_images(server: Running, requests: list[GenerationRequest]) -> None:
    engine = engine_on([server.address])
    engine.publish(plain_weights(policies_of(server)), 0)
    with pytest.raises(Refused, match="run-1 uses this server"):
        server.caller("run-2").post(f"/v1/images?{query_of(requests[0].media[0])}", RED)
    with pytest.raises(Refused, match="run-1 uses this server"):
        server.caller("run-2").post("/v1/images/missing", {"keys": []})
    engine.close()


def policies_of(server: Running) -> Policy:
    policy: Policy = server.engine._policy
    return policy


@pytest.fixture
def held(vision_model: Path) -> HeldImages:
    """What a server holds: nothing yet."""
    return HeldImages(IMAGE, limits_of(vision_model), 4096)


def test_files_are_held_to_their_keys(held: HeldImages, spec: VisionSpec) -> None:
    medium = image_of(spec, RED)
    limits = spec.limits
    with pytest.raises(WireError, match="not those of the image"):
        held.keep(medium.key, limits, BLUE)
    with pytest.raises(WireError, match="not those of the image"):
        held.keep(medium.key, replace(limits, max_pixels=2048), RED)
    assert held.missing([medium.key]) == [medium.key] and held.held_bytes == 0
    held.keep(medium.key, limits, RED)
    held.keep(medium.key, limits, RED)
    assert held.missing([medium.key]) == [] and held.held_bytes == len(RED)


@pytest.mark.parametrize(
    ("content", "change", "words"),
    [
        (RED[: len(RED) // 2], {}, "cannot be used"),
        (b"", {}, "cannot be used"),
        (b"<html>", {}, "an HTML page"),
        (picture((9, 9, 9), (4, 1200)), {}, "too long"),
        (RED, {"patch": 8}, "this server's model has 4 2 2"),
        (RED, {"merge": 1}, "this server's model has 4 2 2"),
        (RED, {"temporal": 1}, "this server's model has 4 2 2"),
        (bytes(4097), {}, "an image of 4097 bytes"),
    ],
)
def test_files_that_an_engine_would_fail_on_are_refused(
    held: HeldImages, spec: VisionSpec, content: bytes, change: dict[str, int], words: str
) -> None:
    limits = replace(spec.limits, **change)
    with pytest.raises(WireError, match=words):
        held.keep(key_of_bytes(content, limits), limits, content)


def test_an_engine_may_bound_the_tokens_of_an_image(vision_model: Path, spec: VisionSpec) -> None:
    medium = image_of(spec, RED)
    HeldImages(IMAGE, limits_of(vision_model), max_tokens=6).keep(medium.key, spec.limits, RED)
    with pytest.raises(WireError, match="6 tokens; the engine of this server takes 5"):
        HeldImages(IMAGE, limits_of(vision_model), max_tokens=5).keep(medium.key, spec.limits, RED)


def test_a_decompression_bomb_is_refused(
    held: HeldImages, spec: VisionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 100)
    with pytest.raises(WireError, match="too many pixels"):
        held.keep(key_of_bytes(RED, spec.limits), spec.limits, RED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"key": "0" * 16}, "not here"),
        ({"token_id": 5}, "in its request"),
        ({"num_tokens": 3}, "in its request"),
        ({"grid": [1, 6, 4]}, "in its request"),
        ({"extent": [1, 3, 2]}, "in its request"),
        ({"extent": None}, "in its request"),
        ({"limits": [4, 2, 2, 64, 2048]}, "in its request"),
        ({"key": "cat"}, "16 hexadecimal digits"),
        ({"key": 5}, "16 hexadecimal digits"),
        ({"grid": [1, 4]}, "grid of an image is 3"),
        ({"grid": [1, 4, -6]}, "grid of an image is 3"),
        ({"num_tokens": True}, "num_tokens of an image is 2"),
        ({"limits": [4, 2, 2, 64, 1 << 50]}, "limits of an image is 5"),
        ({"limits": "4 2 2 64 4096"}, "limits of an image is 5"),
        ({"more": 1}, "exactly the fields"),
    ],
)
def test_images_of_requests_are_checked(
    held: HeldImages, policies: list[Policy], spec: VisionSpec, change: dict[str, Any], words: str
) -> None:
    medium = image_of(spec, RED)
    request = request_of(policies[0], [5, medium, 6])
    held.keep(medium.key, spec.limits, RED)
    about = status_of(policies[0], images="as it does", bans=bans_of(policies[0].head.banned))
    body = json.loads(json.dumps(request_body(request)))
    body["media"][0] |= change

    def read() -> GenerationRequest:
        return held.with_files(requests_of([body], about))[request.turn.text]

    if words:
        with pytest.raises((WireError, ImagesMissing), match=words):
            read()
    else:
        (found,) = read().media
        assert found == medium and found.source.place.image().data == RED


def test_placeholders_are_those_of_the_images(
    held: HeldImages, policies: list[Policy], spec: VisionSpec
) -> None:
    medium = image_of(spec, RED)
    held.keep(medium.key, spec.limits, RED)
    whole = request_of(policies[0], [5, medium, 6])
    assert held.with_files({"a": whole})["a"] == whole
    ids = whole.prompt_token_ids
    place = ids.index(IMAGE)
    for prompt, media, words in (
        (ids, (), "6 placeholders for images of 0 tokens"),
        ((*ids, IMAGE), whole.media, "7 placeholders for images of 6 tokens"),
        ((5, 6), whole.media, "0 placeholders for images of 6 tokens"),
        ((*ids[:place], IMAGE, *ids[:place], *ids[place + 1 :]), whole.media, "not side by side"),
    ):
        with pytest.raises(WireError, match=words):
            held.with_files({"a": replace(whole, prompt_token_ids=prompt, media=media)})


def test_a_request_names_a_bounded_number_of_images(spec: VisionSpec) -> None:
    medium = image_of(spec, RED)
    assert len(media_of(media_body([medium] * 256))) == 256
    with pytest.raises(WireError, match="at most 256"):
        media_of(media_body([medium] * 257))
    with pytest.raises(WireError, match="at most 256"):
        media_of({})
