"""What is refused of rollout servers, by what they say of themselves."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from covey.checks.judge import checks
from covey.config.argv import read_words
from covey.config.resolve import from_dict
from covey.options.verbs import RolloutOptions
from covey.plan.facts import Facts, ServerFacts, VllmServeFacts
from covey.plan.server_line import start_line
from covey.types import Problem, Severity
from support.checks import BASE, SIZES, changed, facts, found

ADDRESS = "http://127.0.0.1:8000"
SERVED: dict[str, Any] = {"rollout_servers": [ADDRESS], "rollout_token_file": "a.token"}
RUN = changed(
    facts(), model={"type": "qwen2", "num_parameters": 9, "embedding_rows": 320}, prompts={"longest": 100}
)
GOOD = ServerFacts(
    address=ADDRESS,
    model="m",
    model_type="qwen2",
    num_parameters=9,
    vocab=320,
    max_len=2048,
    dtype="float32",
)


def codes(server: ServerFacts, **options: Any) -> list[str]:
    given = changed(RUN, servers={"asked": (server,)})
    problems = found(given, **{**SERVED, "torch_dtype": "float32", "max_completion_length": 16, **options})
    return [p.code for p in problems if p.severity is Severity.ERROR and p.code.startswith("E42")]


def test_a_server_of_the_same_model_is_taken() -> None:
    assert codes(GOOD) == []
    assert codes(replace(GOOD, max_len=0), max_completion_length=10**6) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fault": "silent", "said": "Connection refused"}, "E420"),
        ({"fault": "token", "said": "401"}, "E421"),
        ({"fault": "address", "said": "it is none"}, "E427"),
        ({"fault": "other", "said": "404"}, "E428"),
        ({"model_type": "llama"}, "E422"),
        ({"num_parameters": 10}, "E422"),
        ({"vocab": 321}, "E422"),
        ({"dtype": "bfloat16"}, "E422"),
        ({"max_len": 115}, "E423"),
        ({"run": "runs/other"}, "E424"),
    ],
)
def test_another_one_is_refused(change: dict[str, Any], code: str) -> None:
    assert codes(replace(GOOD, **change)) == [code]


SCHEDULER = {"multi_turn_scheduler": "gym_scheduler", "max_turns": 3, "use_gym_env": True}


def test_a_run_names_the_scheduler_of_its_server() -> None:
    server = replace(GOOD, scheduler=SCHEDULER)
    given = changed(RUN, servers={"asked": (server,)})
    options = {**SERVED, "torch_dtype": "float32", "max_completion_length": 16}
    (refused,) = [p for p in found(given, **options) if p.code == "E436"]
    assert "--max_turns 3" in refused.seen and refused.fixes[0].edits == SCHEDULER
    (other,) = [p for p in found(given, **options, **{**SCHEDULER, "max_turns": 4}) if p.code == "E436"]
    assert other.fixes[0].edits["max_turns"] == 3
    assert not [p for p in found(given, **options, **SCHEDULER) if p.code == "E436"]
    # Without a scheduler of its own a server samples for that of the run.
    alone = changed(RUN, servers={"asked": (GOOD,)})
    assert not [p for p in found(alone, **options, **SCHEDULER) if p.code == "E436"]


def prepared(mean: str) -> str:
    return f"patch_size 14, image_mean {mean}, resample 3"


def test_a_server_takes_images_where_prompts_have_some_and_prepares_them_as_the_run_does() -> None:
    seeing = changed(RUN, model={"image_processor": prepared("0.5")}, prompts={"has_images": True})
    text = changed(RUN, model={"image_processor": prepared("0.5")}, prompts={"has_images": False})

    def problems(run: Facts, server: ServerFacts) -> list[Problem]:
        given = changed(run, servers={"asked": (server,)})
        options = {**SERVED, "torch_dtype": "float32", "max_completion_length": 16}
        return [p for p in found(given, **options) if p.code == "E422"]

    same, other = replace(GOOD, images=prepared("0.5")), replace(GOOD, images=prepared("0.4"))
    assert problems(seeing, same) == problems(text, same) == problems(text, GOOD) == []
    (problem,) = problems(seeing, GOOD)
    assert "takes no images, but prompts of the run have images" in problem.seen
    for run in (seeing, text):
        (problem,) = problems(run, other)
        assert "image processor image_mean 0.4 (the run: image_mean 0.5)" in problem.seen
    (problem,) = problems(seeing, THEIRS)
    assert "only token ids" in problem.cause


def test_the_last_position_counts() -> None:
    assert codes(replace(GOOD, max_len=116)) == []
    assert codes(replace(GOOD, max_len=116), max_completion_length=17) == ["E423"]


def test_without_a_token_nothing_else_is_said() -> None:
    given = changed(RUN, servers={"asked": None})
    assert [p.code for p in found(given, rollout_servers=[ADDRESS]) if p.code.startswith("E42")] == ["E421"]
    told = changed(given, servers={"token_problem": "a.token: No such file or directory"})
    (problem,) = [p for p in found(told, **SERVED) if p.code == "E421"]
    assert "No such file" in problem.seen


def test_several_servers_share_a_token() -> None:
    """The file that the refusing server printed would be refused by the other one."""
    other = replace(GOOD, address="http://127.0.0.1:8001", fault="token", said="401")
    options = {**SERVED, "rollout_servers": [ADDRESS, other.address]}
    (problem,) = [
        p for p in found(changed(RUN, servers={"asked": (GOOD, other)}), **options) if p.code == "E421"
    ]
    assert [fix.text for fix in problem.fixes if "--token_file a.token" in fix.text]
    assert not any("--rollout_token_file FILE" in fix.text for fix in problem.fixes)


def test_an_address_is_named_once_and_a_packed_base_is_refused() -> None:
    assert codes(GOOD, rollout_servers=[ADDRESS, ADDRESS]) == ["E427"]
    assert codes(GOOD, tuner_type="lora", quant_bits="4") == ["E422"]


@pytest.mark.parametrize(
    ("typed", "servers"),
    [
        ({}, []),
        ({"vllm_server_base_url": "http://a:1/"}, ["http://a:1"]),
        ({"vllm_server_host": "a"}, ["http://a:8000"]),
        ({"vllm_server_port": 8001}, ["http://127.0.0.1:8001"]),
        ({"vllm_server_host": ["0.0.0.0"], "vllm_server_port": [8001, 8002]}, ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]),
        ({"vllm_server_host": ["a", "b"], "vllm_server_port": [1, 2]}, ["http://a:1", "http://b:2"]),
        ({"vllm_server_host": ["a", "b"], "vllm_server_port": 7}, ["http://a:7", "http://b:7"]),
        ({"vllm_server_host": "::1", "vllm_server_port": 7}, ["http://[::1]:7"]),
        ({"rollout_servers": ["http://c:1"], "vllm_server_host": "a"}, ["http://c:1"]),
    ],
)  # fmt: skip
def test_names_of_trl_and_ms_swift_mean_the_same(typed: dict[str, Any], servers: list[str]) -> None:
    assert from_dict({**BASE, **typed}).config.rollout_servers == servers


def rollout_options(line: str) -> RolloutOptions:
    """What a printed line says, read as `covey rollout` reads it."""
    words = shlex.split(line)
    assert words[:2] == ["covey", "rollout"]
    return read_words("rollout", words[2:], RolloutOptions, most=0)[0]


VLLM: dict[str, Any] = {
    **{"use_vllm": True, "vllm_mode": "server", "vllm_max_model_len": 2048, "vllm_max_num_seqs": 64},
    **{"vllm_gpu_memory_utilization": 0.8, "vllm_enforce_eager": True},
    "vllm_engine_kwargs": {"block_size": 16, "name": "it's"},
}


def test_the_line_that_starts_a_server_can_be_typed_and_has_the_options_of_vllm() -> None:
    config = from_dict({**BASE, **VLLM, "torch_dtype": "bfloat16"}).config
    options = rollout_options(start_line(config, "http://127.0.0.1:8007"))
    assert (options.engine, options.port, options.dtype) == ("vllm", 8007, "bfloat16")
    assert options.model == config.model and options.host == "127.0.0.1"
    assert (options.vllm_max_model_len, options.max_rows) == (2048, 64)
    assert (options.vllm_gpu_memory_utilization, options.vllm_enforce_eager) == (0.8, True)
    assert options.vllm_engine_kwargs == VLLM["vllm_engine_kwargs"]
    plain = from_dict(BASE).config
    assert start_line(plain, "http://127.0.0.1:1") == f"covey rollout --model {plain.model} --port 1"
    assert rollout_options(start_line(plain, "http://10.0.0.5:1")).host == "10.0.0.5"


def test_a_server_that_does_not_answer_is_started_by_the_line_that_is_printed() -> None:
    silent = replace(GOOD, fault="silent", said="Connection refused")
    (problem,) = [
        p for p in found(changed(RUN, servers={"asked": (silent,)}), **SERVED, **VLLM) if p.code == "E420"
    ]
    line = problem.fixes[0].text.split("`")[1]
    assert rollout_options(line).vllm_max_model_len == 2048


def test_options_of_the_server_are_said_with_the_line_that_takes_them() -> None:
    resolved = from_dict({**BASE, **SERVED, **VLLM})
    problems = checks(resolved.config, changed(RUN, servers={"asked": (GOOD,)}), typed=resolved.typed_names)
    said = {p.option: p for p in problems if p.code == "W108"}
    assert {"vllm_max_model_len", "vllm_gpu_memory_utilization", "vllm_enforce_eager"} <= said.keys()
    line = said["vllm_max_model_len"].fixes[0].text.split("`")[1]
    assert rollout_options(line).vllm_max_model_len == 2048 and rollout_options(line).engine == "vllm"


SERVES = VllmServeFacts(
    version="0.32.0",
    open_routes=("/collective_rpc", "/pause"),
    takes_weights=True,
    logprobs="processed_logprobs",
    max_num_seqs=64,
    directory="/dev/shm",
)
THEIRS = ServerFacts(address=ADDRESS, model="m", max_len=2048, dtype="float32", vllm=SERVES)
TIED = changed(RUN, model={"sizes": replace(SIZES, tied=True)})


def of_theirs(given: Facts = RUN, /, server: ServerFacts = THEIRS, **changes: Any) -> list[Problem]:
    own = replace(server, vllm=replace(SERVES, **changes))
    options = {"torch_dtype": "float32", "max_completion_length": 16, "rollout_servers": [ADDRESS]}
    return [
        p for p in found(changed(given, servers={"asked": (own,)}), **options) if p.code[:3] in ("E42", "W18")
    ]


def test_the_open_routes_of_a_server_of_vllm_are_named_once_and_it_is_used_without_a_token() -> None:
    (said,) = of_theirs()
    assert said.code == "W181" and "/collective_rpc, /pause answer without a token" in said.seen
    options = rollout_options(said.fixes[0].text.split("`")[1])
    assert (options.engine, options.port, options.vllm_max_model_len) == ("vllm", 8000, 2048)
    assert of_theirs(open_routes=()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"takes_weights": False}, "no routes that replace its weights"),
        ({"logprobs": "raw_logprobs"}, "returns raw_logprobs"),
        ({"quantization": "fp8"}, "quantizes its weights"),
        ({"directory": ""}, "rollout_weights_directory is not set"),
    ],
)
def test_a_server_of_vllm_that_cannot_be_used_is_refused(change: dict[str, Any], words: str) -> None:
    (refused,) = [p for p in of_theirs(**change) if p.code != "W181"]
    assert refused.code == "E429" and words in refused.seen and "0.32.0" in refused.seen


def test_a_tied_head_on_a_cpu_has_to_be_untied_there() -> None:
    assert [p.code for p in of_theirs(TIED)] == ["W181"]
    (refused, _) = of_theirs(TIED, on_cpu=True)
    assert refused.code == "E429" and "tie_word_embeddings" in refused.fixes[1].text
    assert [p.code for p in of_theirs(TIED, on_cpu=True, unties_head=True)] == ["W181"]
    untied = changed(TIED, model={"sizes": replace(SIZES, tied=False)})
    assert [p.code for p in of_theirs(untied, on_cpu=True)] == ["W181"]


def test_what_a_server_of_vllm_says_is_compared() -> None:
    assert next(p.code for p in of_theirs(server=replace(THEIRS, dtype="bfloat16"))) == "E422"
    assert next(p.code for p in of_theirs(server=replace(THEIRS, max_len=100))) == "E423"


def test_a_server_of_another_tool_is_refused_by_name() -> None:
    other = ServerFacts(address=ADDRESS, fault="other", said="it refused with 404")
    for options in (SERVED, {"rollout_servers": [ADDRESS]}):
        (refused,) = [
            p for p in found(changed(RUN, servers={"asked": (other,)}), **options) if p.code[:3] == "E42"
        ]
        assert refused.code == "E428" and ADDRESS in refused.seen and "404" in refused.seen


def test_what_is_said_of_process_groups() -> None:
    """Only where the port is typed: of servers on a network, and of those that take none."""

    def said(server: ServerFacts, **options: Any) -> list[str]:
        given = {**SERVED, "rollout_servers": [server.address], **options}
        problems = found(changed(RUN, servers={"asked": (server,)}), **given)
        return [p.code for p in problems if p.code in ("W182", "W183")]

    own = replace(GOOD, group_device="cpu")
    away = replace(own, address="https://node2:8000")
    port = {"vllm_server_group_port": 51216}
    assert said(away) == said(GOOD) == said(own, **port) == []
    assert said(away, **port) == ["W182"]
    assert said(GOOD, **port) == ["W183"]
    assert from_dict({**BASE, **SERVED, "vllm_group_port": 6000}, 1).config.vllm_server_group_port == 6000
