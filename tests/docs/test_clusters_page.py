"""What docs/clusters.md has for Slurm and Kubernetes: scripts that a shell reads, objects of the right kinds,
and commands of covey without a wrong word."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.checks.launch import Machines, asked_machines, asked_processes
from covey.config import parse, resolve
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
    return [word for word in words[at + 2 :] if word != "&"]


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


STANDINS = {
    # What the tasks of the job end with, at once or after a signal of Slurm.
    "srun": "#!/bin/bash\ntrap 'exit 1' TERM\n"
    'if [ -n "$COVEY_TEST_WAITS" ]; then echo $$ > running; while true; do sleep 0.05; done; fi\n'
    'exit "$COVEY_TEST_CODE"\n',
    # Without --batch or --full it signals the steps, and not the script.
    "scancel": '#!/bin/bash\necho scancel "$@" >> said\nkill -TERM "$(cat running)"\n',
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo node1; else echo scontrol "$@" >> said; fi\n',
}


def start_script(name: str, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start a script of the page as Slurm does, with stand-ins for its commands."""
    for command, text in STANDINS.items():
        path = folder / command
        path.write_text(text)
        path.chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}
    own |= {"SLURM_CPUS_PER_TASK": "12", **environment}
    text = written(".sbatch")[name].text
    return subprocess.Popen(["bash", "-c", text], cwd=folder, env={**os.environ, **own})


def said(folder: Path) -> list[str]:
    path = folder / "said"
    return path.read_text().splitlines() if path.is_file() else []


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_a_job_that_has_saved_is_requeued(code: int, tmp_path: Path) -> None:
    script = start_script("job.sbatch", tmp_path, COVEY_TEST_CODE=str(code))
    assert script.wait(timeout=30) == code
    assert said(tmp_path) == (["scontrol requeue 7"] if code == 143 else [])


def test_a_script_passes_its_signal_on(tmp_path: Path) -> None:
    """torchrun ends with 1 for a signal as for a failure: the script knows which it was."""
    script = start_script("restarts.sbatch", tmp_path, COVEY_TEST_CODE="1")
    assert script.wait(timeout=30) == 1 and said(tmp_path) == []
    script = start_script("restarts.sbatch", tmp_path, COVEY_TEST_WAITS="1")
    until = time.monotonic() + 30
    while not (tmp_path / "running").is_file() or not (tmp_path / "running").read_text():
        assert script.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    script.terminate()
    assert script.wait(timeout=30) == 1
    assert said(tmp_path) == ["scancel --signal=TERM 7", "scontrol requeue 7"]


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
    # A policy on failures is taken with pods alone that are never started again in place.
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] > 30
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"] == [[2]]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container["name"]
    }
    # The address is that of the first pod, by the name of the service.
    assert environment["MASTER_ADDR"].split(".") == [
        f"{job['metadata']['name']}-0", service["metadata"]["name"],
    ]  # fmt: skip
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
