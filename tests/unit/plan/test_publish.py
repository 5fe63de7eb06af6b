"""What a publish takes, by the plan: against what a publisher sends, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.checks.batch import batch_plan
from covey.checks.survey import survey
from covey.config.resolve import from_dict
from covey.models.load import load_policy
from covey.models.lora import plain_weights
from covey.plan.facts import Facts, ServerFacts
from covey.plan.memory import memory_plan
from covey.plan.publish import publish_plan
from covey.plan.report import report_json, report_lines
from covey.quickstart.task import MODEL_DIR
from support.checks import SIZES, changed, config, facts

HERE, THERE = "http://127.0.0.1:8000", "https://node2:8000"
GPUS = "cuda GPU-1, cuda GPU-2"
ON_CPU = facts(
    machine={"cuda": False}, model={"sizes": SIZES, "num_parameters": 1000}, prompts={"longest": 10}
)


def served(*addresses: str, **changes: Any) -> Facts:
    """A run on servers of these addresses, as the facts have it."""
    known = tuple(ServerFacts(address=address, rows=64) for address in addresses)
    given = changed(changed(ON_CPU, servers={"asked": known}), **changes)
    return replace(given, layout=replace(given.layout, engine="server"))


def options(*addresses: str, **more: Any) -> Any:
    return config(rollout_servers=list(addresses), rollout_token_file="t", max_completion_length=6, **more)


ALONE: dict[str, Any] = {"tuner_type": "lora"}
MERGED = {**ALONE, "vllm_enable_lora": False}


@pytest.mark.parametrize("tuner", [{}, ALONE, MERGED])
def test_the_bytes_are_those_that_are_sent(tuner: dict[str, Any]) -> None:
    """A tied head goes once, and an adapter within the weights that it lies on."""
    resolved = from_dict(
        {
            **{"model": "quickstart", "dataset": "quickstart#8", "reward_funcs": ["accuracy"]},
            **{"use_vllm": True, "torch_dtype": "float32", "max_completion_length": 8, **tuner},
        },
        1,
    )
    with survey(resolved.config, 1) as found:
        plan = publish_plan(resolved.config, found.facts)
    policy = load_policy(MODEL_DIR, device=torch.device("cpu"), disable_dropout=True)
    sent = sum(t.numel() * t.element_size() for _, t in plain_weights(policy))
    assert plan is not None
    assert (plan.way, plan.dtype, plan.adds_adapter) == ("process", "float32", tuner == MERGED)
    # The built-in model with an adapter of rank 16 on every linear layer.
    expected = (sent, 622592) if tuner == ALONE else (0, sent)
    assert (plan.base_bytes, plan.num_bytes) == expected


def test_an_adapter_that_the_engine_applies_goes_alone() -> None:
    """To servers of which each has room for it; its base once."""
    lora = {"use_vllm": True, "vllm_mode": "server", "tuner_type": "lora", "lora_rank": 16}
    given = served(HERE, THERE, model={"sizes": replace(SIZES, adapter_parameters=50)})
    assert given.servers.asked is not None
    for rank in (8, 16):
        known = tuple(
            replace(s, adapter_rank=r) for s, r in zip(given.servers.asked, (16, rank), strict=True)
        )
        plan = publish_plan(options(HERE, THERE, **lora), changed(given, servers={"asked": known}))
        assert plan is not None
        found = plan.num_bytes, plan.base_bytes, plan.adds_adapter
        assert found == ((200, 4000, False) if rank == 16 else (4000, 0, True))
    assert plan is not None and plan.in_words()[0].startswith(
        "before each rollout 0.2 kB of the adapter (float32) are sent to each of http"
    )


def test_servers_that_nobody_has_named_are_over_a_network() -> None:
    """As one server at another address is, with a process group between GPUs of other machines."""
    named, unnamed = (
        publish_plan(options(*a), served(*a, servers={"asked": None}, machine={"cuda": True}))
        for a in ((THERE,), ())
    )
    assert named is not None and unnamed is not None
    assert unnamed == replace(named, engines=("each server",)) and unnamed.way == "network"
    assert unnamed.in_words()[0].endswith("are sent to each server")


def test_nothing_is_published_to_an_engine_on_the_weights_in_training() -> None:
    asked = config()
    assert publish_plan(asked, ON_CPU) is None
    assert "publish" not in report_json(asked, ON_CPU, batch_plan(asked, 1, 1000))
    replayed = options(HERE, replay_rollouts="runs/b")
    assert publish_plan(replayed, served(HERE)) is None
    assert publish_plan(options(HERE), changed(served(HERE), model={"sizes": None})) is None


def test_ways_and_seconds() -> None:
    """A network is shared by the servers behind it; what goes through files or within a machine is not."""
    big = {"model": {"sizes": replace(SIZES, parameters=10**9)}}

    def seconds(*addresses: str, **changes: Any) -> tuple[str, float]:
        plan = publish_plan(options(*addresses), served(*addresses, **big, **changes))
        assert plan is not None
        return plan.way, round(plan.seconds, 3)

    assert seconds(HERE) == ("loopback", 20.05)
    assert seconds(HERE, "http://localhost:1") == ("loopback", 20.05)
    assert seconds(HERE, THERE) == ("network", 20.05)
    many = [f"https://node{n}:8000" for n in range(10)]
    assert seconds(*many) == ("network", 32.05)
    shared = tuple(ServerFacts(address=HERE, rows=64, shares_files=True) for _ in range(2))
    assert seconds(HERE, servers={"asked": shared})[0] == "files"
    assert seconds(HERE, servers={"asked": None})[0] == "loopback"


def test_the_memory_of_an_engine_stands_beside_the_learners() -> None:
    """64 completions of 16 tokens and a block, 16 elements a token: on two servers half of them each."""
    given, asked = served(HERE, THERE), options(HERE, THERE, torch_dtype="float32")
    plan = publish_plan(asked, given)
    assert plan is not None
    assert (plan.weight_bytes, plan.side_by_side, plan.on_device) == (4000, 32, False)
    assert plan.cache_bytes == 32 * (16 + 128) * 2 * 2 * 1 * 4 * 4
    lines = report_lines(asked, given, batch_plan(asked, 1, 1000))
    shown = [line for line in lines if "in each server" in line]
    cache = f"{plan.cache_bytes / 1e3:.4g} kB of KV cache for 32 completions at a time"
    assert shown == [f"          beside it in each server: 4 kB of weights and up to {cache}"]
    at = next(number for number, line in enumerate(lines) if line.startswith("publish"))
    assert lines[at] == (
        f"publish   before each rollout 4 kB of the weights (float32) are sent to each of {HERE}, {THERE}"
    )
    assert "an estimate: over a network of 10 Gbit/s" in lines[at + 1]
    content = report_json(asked, given, batch_plan(asked, 1, 1000))["publish"]
    assert (content["num_bytes"], content["engines"]) == (4000, (HERE, THERE))
    # A server with fewer rows has fewer side by side, and its own number of processes shares them.
    few = publish_plan(asked, changed(given, servers={"asked": (ServerFacts(address=HERE, rows=4),)}))
    more = publish_plan(asked, changed(given, launch={"num_processes": 2}))
    assert few is not None and few.side_by_side == 4
    assert more is not None and more.side_by_side == 64


def test_what_servers_hold_is_not_in_the_learners_forecast() -> None:
    asked = options(HERE, torch_dtype="float32")
    phases = {p.name: p.parts for p in memory_plan(asked, served(HERE)).phases}
    alone = {p.name: p.parts for p in memory_plan(config(max_completion_length=6), ON_CPU).phases}
    assert "KV cache" in alone["rollout"] and "KV cache" not in phases["rollout"]
    assert phases["rollout"]["engine"] == 0


def test_a_process_group_is_named_where_a_publish_takes_long() -> None:
    """7 billion weights over HTTP, to servers of which each takes a group."""
    big = {"model": {"sizes": replace(SIZES, parameters=7 * 10**9)}}
    known = (ServerFacts(address=HERE, rows=64, group_device="cpu"),)

    def plan(servers: tuple[ServerFacts, ...] | None = known, **more: Any) -> Any:
        return publish_plan(options(HERE, **more), served(HERE, **big, servers={"asked": servers}))

    slow = plan()
    assert (slow.way, round(slow.seconds), round(slow.group_seconds)) == ("loopback", 140, 70)
    assert slow.in_words()[-1] == "about 70.0 s through a process group: --vllm_server_group_port 51216"
    quick = plan(vllm_server_group_port=5000)
    assert (quick.way, round(quick.seconds), quick.group_seconds) == ("gloo", 70, None)
    without = (replace(known[0], group_device=""),)
    assert plan(without).group_seconds is None
    assert plan(without, vllm_server_group_port=5000).way == "loopback"
    small = publish_plan(options(HERE), served(HERE, servers={"asked": known}))
    assert small is not None and small.group_seconds is None


@pytest.mark.parametrize(
    ("billions", "seconds"), [(7.0, {"": 70, "cpu": 35, GPUS: 3}), (70.5, {"": 705, "cpu": 353, GPUS: 28})]
)
def test_a_model_goes_once_to_the_workers_of_a_server(billions: float, seconds: dict[str, int]) -> None:
    """14 and 141 GB: over HTTP, and through a group that one worker or several of them join."""
    big = {
        "model": {"sizes": replace(SIZES, parameters=int(billions * 1e9))},
        "machine": {"cuda": True},
    }
    for device, expected in seconds.items():
        known = (ServerFacts(address=HERE, rows=64, group_device=device),)
        asked = options(HERE, torch_dtype="bfloat16", vllm_server_group_port=5000)
        plan = publish_plan(asked, served(HERE, **big, servers={"asked": known}))
        assert plan is not None
        assert (plan.num_bytes, round(plan.seconds)) == (int(2e9 * billions), expected)
