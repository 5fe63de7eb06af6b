"""What docs/clusters.md has for Slurm and Kubernetes: scripts that a shell reads, objects of the right kinds,
and commands of covey without a wrong word."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.config import parse, resolve
from covey.plan.check_launch import Machines, asked_machines, asked_processes
from covey.types import Severity
from docs.test_documents import Block, blocks, commands, text_of

PAGE = "docs/clusters.md"


def written(suffix: str) -> dict[str, Block]:
    return {b.value: b for b in blocks(text_of(PAGE)) if b.mark == "write" and b.value.endswith(suffix)}


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container of an object of Kubernetes."""
    if isinstance(value, dict):
        yield from value.get("containers", [])
        for inner in value.values():
            yield from containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


def words_of_covey(words: list[str]) -> list[str]:
    """What a command says to `covey train`, whoever starts it."""
    at = words.index("covey")
    assert words[at + 1] == "train", words
    return words[at + 2 :]


def every_command() -> list[list[str]]:
    shell = [b for b in blocks(text_of(PAGE)) if b.language == "bash"]
    found = [c.words for b in shell for c in commands(b) if "covey" in c.words]
    for block in written(".yaml").values():
        found += [c["command"] for part in yaml.safe_load_all(block.text) for c in containers(part)]
    return found


@pytest.mark.parametrize("words", every_command(), ids=shlex.join)
def test_every_command_has_the_right_words(words: list[str], tmp_path: Path) -> None:
    own = words_of_covey(words)
    # A file of its own in the place of one that is not here.
    config = tmp_path / "config.yaml"
    config.write_text("model: quickstart\ndataset: [quickstart]\nreward_funcs: [accuracy]\n")
    own = [str(config) if word.endswith("config.yaml") else word for word in own]
    parsed = parse(own)
    found = resolve(parsed.typed, 1, parsed.problems).problems
    assert [p.seen for p in found if p.severity is Severity.ERROR] == []


def test_the_scripts_are_of_a_shell() -> None:
    scripts = written(".sbatch")
    assert len(scripts) == 2
    for block in scripts.values():
        assert block.text.startswith("#!/bin/bash\n#SBATCH ")
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_objects_are_of_their_kinds() -> None:
    objects = [part for block in written(".yaml").values() for part in yaml.safe_load_all(block.text)]
    assert [(o["apiVersion"], o["kind"]) for o in objects] == [
        ("kubeflow.org/v1", "PyTorchJob"),
        ("batch/v1", "Job"),
        ("v1", "Service"),
    ]
    job, service = objects[1:]
    (container,) = containers(job)
    environment = {e["name"]: str(e.get("value", "1")) for e in container["env"]}
    expected = Machines(count=2, number=1, address="covey-0.covey", port=29500)
    assert asked_machines(environment) == (expected, [])
    assert asked_processes(environment) == (8, [])
    assert job["spec"]["completions"] == 2
    # The address is that of the first pod, by the name of the service.
    assert environment["MASTER_ADDR"].split(".") == [
        f"{job['metadata']['name']}-0", service["metadata"]["name"],
    ]  # fmt: skip
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
