"""An adapter that vLLM is to apply itself: when it does, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from covey.checks.judge import checks
from covey.config.resolve import from_dict
from covey.plan.facts import ServerFacts
from covey.plan.memory_vllm import largest_adapter_rank
from covey.plan.server_line import start_line
from support.checks import BASE, changed, config, facts

LORA: dict[str, Any] = {"use_vllm": True, "tuner_type": "lora"}
HERE = facts(machine={"cuda": False})


def said(given: Any = HERE, **options: Any) -> list[tuple[str, str]]:
    """Code and option of each problem with LoRA in vLLM."""
    problems = checks(config(**options), given, typed=tuple(options))
    names = ("vllm_enable_lora", "vllm_max_lora_rank")
    return [(p.code, p.option) for p in problems if p.code == "E434" or p.option in names]


@pytest.mark.parametrize(
    ("options", "applied"),
    [
        ({}, False),
        ({"tuner_type": "lora"}, True),
        ({"tuner_type": "lora", "lora_rank": 512}, True),
        ({"tuner_type": "lora", "lora_rank": 513}, False),
        ({"tuner_type": "lora", "use_dora": True}, False),
        ({"tuner_type": "lora", "modules_to_save": ["norm"]}, False),
        ({"tuner_type": "lora", "vllm_enable_lora": False}, False),
    ],
)
def test_when_vllm_applies_the_adapter(options: dict[str, Any], applied: bool) -> None:
    found = from_dict({**BASE, **options}).config
    assert found.vllm_enable_lora is applied
    assert largest_adapter_rank(found) == (found.lora_rank if applied else 0)
    assert found.use_vllm is ("vllm_enable_lora" in options)


def test_nothing_stands_against_the_plain_one() -> None:
    assert said(**LORA) == [] and said(**LORA, vllm_enable_lora=True, vllm_max_lora_rank=64) == []
    assert said(**LORA, vllm_enable_lora=False, use_dora=True, lora_rank=1000) == []
    assert said(**LORA, use_dora=True) == said(**LORA, lora_rank=1000) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_dora": True}, ("E434", "vllm_enable_lora")),
        ({"modules_to_save": ["norm"]}, ("E434", "vllm_enable_lora")),
        ({"lora_rank": 513}, ("E434", "vllm_enable_lora")),
        ({"lora_rank": 16, "vllm_max_lora_rank": 8}, ("E434", "vllm_max_lora_rank")),
        ({"tuner_type": "full"}, ("W108", "vllm_enable_lora")),
        ({"vllm_enable_lora": False, "vllm_max_lora_rank": 32}, ("W108", "vllm_max_lora_rank")),
    ],
)
def test_what_stands_against_it(options: dict[str, Any], expected: tuple[str, str]) -> None:
    assert said(**{**LORA, "vllm_enable_lora": True, **options}) == [expected]


def test_servers() -> None:
    """Where it is not typed the adapter is added for a server that applies none."""
    given: dict[str, Any] = {**LORA, "vllm_mode": "server", "lora_rank": 16}
    given |= {"rollout_servers": ["http://127.0.0.1:8000"], "rollout_token_file": "a.token"}

    def with_room(rank: int) -> Any:
        return changed(
            HERE, servers={"asked": (ServerFacts(address="http://127.0.0.1:8000", adapter_rank=rank),)}
        )

    for rank in (0, 8, 16):
        assert said(with_room(rank), **given) == []
        expected = [] if rank == 16 else [("E434", "vllm_enable_lora")]
        assert said(with_room(rank), **given, vllm_enable_lora=True) == expected


def test_the_line_that_starts_a_server_has_room_for_the_adapter() -> None:
    assert "--vllm_enable_lora true --vllm_max_lora_rank 32" in start_line(config(**LORA, lora_rank=32))
    assert "lora" not in start_line(config(**LORA, vllm_enable_lora=False))
    assert "lora" not in start_line(config(use_vllm=True))
