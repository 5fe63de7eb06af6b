"""What is found out of servers before a run: those of covey, of `vllm serve`, and other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.checks.servers.look import with_servers
from covey.config import from_dict
from covey.plan.facts import Facts, ServerFacts
from support.web import Handler, listening

GUARDED = ("/v1", "/v2", "/inference")
MODEL = {"id": "m", "owned_by": "vllm", "parent": None, "max_model_len": 256}
DEVELOPER = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/pause")
SETTINGS = {
    "vllm_config": {
        "model_config": {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs", "hf_overrides": {}},
        "device_config": {"device": "cuda"},
        "scheduler_config": {"max_num_seqs": 12},
    }
}

Answers = dict[str, Any]
VLLM: Answers = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [MODEL, {**MODEL, "id": "an adapter", "parent": "m"}]},
    **dict.fromkeys(["/v1/completions", "/tokenize"], 405),
}
IN_DEVELOPER_MODE: Answers = {
    **VLLM,
    **dict.fromkeys(DEVELOPER, 405),
    "/weight_info": {"weight_version": "default"},
    "/server_info": SETTINGS,
}


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., ServerFacts]:
    """Facts of a server that answers so, each path with JSON or a status, what begins as `GUARDED` only with
    a key where it has one; every call is one that only reads."""

    def asked(answers: Answers, *, key: str = "", token: str = "", **options: Any) -> ServerFacts:
        class OneOfThem(Handler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                found = answers.get(path, 404)
                if key and path.startswith(GUARDED) and self.headers["Authorization"] != f"Bearer {key}":
                    found = 401
                self.answer(*((found, {"detail": "no"}) if isinstance(found, int) else (200, found)))

        given = {"model": "quickstart", "dataset": "quickstart", "reward_funcs": ["accuracy"]}
        if token:
            (tmp_path / "token").write_text(token)
            given["rollout_token_file"] = str(tmp_path / "token")
        with listening(OneOfThem) as address:
            config = from_dict({**given, "rollout_servers": [address], **options}).config
            (found,) = with_servers(Facts(), config).servers.asked or ()
        return found

    return asked


def test_a_server_of_vllm_says_what_it_is(ask: Callable[..., ServerFacts], tmp_path: Path) -> None:
    found = ask(IN_DEVELOPER_MODE, key="k", token="k", rollout_weights_directory=str(tmp_path))
    assert (found.fault, found.model, found.max_len, found.dtype) == ("", "m", 256, "float32")
    own = found.vllm
    assert own is not None and own.takes_weights and not own.on_cpu and not own.unties_head
    assert (own.version, own.logprobs, own.max_num_seqs) == ("0.32.0", "raw_logprobs", 12)
    assert own.directory == str(tmp_path)
    assert set(own.open_routes) == {*DEVELOPER, "/weight_info", "/server_info", "/tokenize"}


def test_without_a_key_all_of_its_routes_are_open(ask: Callable[..., ServerFacts]) -> None:
    found = ask(VLLM)
    assert found.vllm is not None and not found.vllm.takes_weights
    assert set(found.vllm.open_routes) == {"/v1/completions", "/tokenize"}


def test_a_key_that_it_refuses_is_said(ask: Callable[..., ServerFacts]) -> None:
    assert ask(VLLM, key="k").fault == ask(VLLM, key="k", token="other").fault == "token"


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/health": {}, "/get_world_size": {"world_size": 1}},
        {"/version": {"version": "1"}, "/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}},
        {"/v1/status": {"protocol": 7}},
    ],
    ids=["nothing", "TRL", "SGLang", "a later covey"],
)
def test_another_server_is_neither(ask: Callable[..., ServerFacts], answers: Answers) -> None:
    found = ask(answers)
    assert found.fault == "other" and found.said


def test_a_directory_that_is_not_there_is_none(ask: Callable[..., ServerFacts]) -> None:
    found = ask(IN_DEVELOPER_MODE, rollout_weights_directory="nowhere")
    assert found.vllm is not None and found.vllm.directory == ""
