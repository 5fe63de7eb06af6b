"""What a launcher's variables say: a run's own, a cluster's, and those that do not fit each other."""

from __future__ import annotations

import re

import pytest

from covey.checks.launch import (
    Machines,
    asked_machines,
    asked_processes,
    command_problems,
    is_launched,
    launch_problems,
    num_ranks,
    processes_here,
)
from support.verbs import rank_variables

MACHINES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1"}
POD = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        (rank_variables(0, 1), 1),
        (rank_variables(1, 2), 2),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1),
        # Kubernetes writes so where a service is called master.
        ({"MASTER_PORT": "tcp://10.0.0.1:23456", "NNODES": "1", "PET_NNODES": "1:1"}, 1),
        ({"LOCAL_RANK": "0", "RANK": "0", "NNODES": ""}, 1),
        # Two machines of two, and what was asked of the process that started them.
        ({**rank_variables(1, 4), "LOCAL_WORLD_SIZE": "2", **MACHINES}, 4),
        # What a cluster says of its pods, beside what it says of the machines.
        ({**MACHINES, "WORLD_SIZE": "2", "RANK": "1"}, 1),
    ],
)
def test_what_fits(environment: dict[str, str], ranks: int) -> None:
    assert launch_problems(environment) == []
    assert num_ranks(environment) == ranks
    assert is_launched(environment) == ("LOCAL_WORLD_SIZE" in environment)


def without(name: str) -> dict[str, str]:
    return {n: v for n, v in rank_variables(1, 2).items() if n != name}


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        (POD, ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE", "RANK", "MASTER_PORT"]),
        (without("LOCAL_WORLD_SIZE"), ["LOCAL_WORLD_SIZE"]),
        (without("MASTER_PORT"), ["MASTER_PORT"]),
        (without("WORLD_SIZE"), ["WORLD_SIZE", "RANK"]),
        ({"LOCAL_RANK": "3"}, ["WORLD_SIZE", "LOCAL_RANK"]),
        *[
            ({**rank_variables(0, 2), name: value}, [name, value])
            for name, value in {
                "WORLD_SIZE": "two", "RANK": "x", "LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "0",
                "MASTER_PORT": "a",
            }.items()
        ],
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE"]),
        ({**rank_variables(0, 2), "RANK": "2"}, ["RANK", "WORLD_SIZE"]),
        ({**rank_variables(0, 2), "LOCAL_RANK": "2"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({"NNODES": "2"}, ["NNODES", "NODE_RANK", "MASTER_ADDR"]),
        ({"NNODES": "2", "NODE_RANK": "0"}, ["NNODES", "MASTER_ADDR"]),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, ["NODE_RANK", "2"]),
        ({**MACHINES, "MASTER_PORT": "tcp://10.0.0.1:80"}, ["MASTER_PORT"]),
        ({"PET_NNODES": "1:4"}, ["PET_NNODES", "1:4"]),
        ({"NNODES": "all"}, ["NNODES"]),
        ({**rank_variables(0, 2), "LOCAL_WORLD_SIZE": "4"}, ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(environment: dict[str, str], names: list[str]) -> None:
    (found,) = launch_problems(environment)
    assert found.code == "E370"
    assert all(name in found.seen for name in names)
    assert num_ranks(environment) == 1
    # What a way out unsets makes a run of one process.
    (unset,) = re.findall(r"`unset ([A-Z_ ]+)`", " ".join(fix.text for fix in found.fixes))
    assert launch_problems({n: v for n, v in environment.items() if n not in unset.split()}) == []


@pytest.mark.parametrize(("text", "number"), [("", None), ("4", 4), (" 1 ", 1)])
def test_how_many_processes_ms_swift_is_asked_for(text: str, number: int | None) -> None:
    assert asked_processes({"NPROC_PER_NODE": text}) == (number, [])


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5", "gpu"])
def test_a_number_of_processes_that_is_none(text: str) -> None:
    number, (found,) = asked_processes({"NPROC_PER_NODE": text})
    assert number is None
    assert (found.code, found.option) == ("E370", "nproc_per_node")
    assert "NPROC_PER_NODE" in found.seen and text in found.seen


@pytest.mark.parametrize("prefix", ["", "PET_"])
def test_the_machines_that_are_asked_for(prefix: str) -> None:
    asked = {f"{prefix}{name}": value for name, value in {**MACHINES, "MASTER_PORT": "29511"}.items()}
    assert asked_machines(asked) == (Machines(count=2, number=1, address="node1", port=29511), [])
    assert asked_machines({**asked, f"{prefix}NNODES": "2:2"})[0].count == 2
    assert processes_here(asked, 8) == 4
    # torchrun has started this process; its parent was asked.
    assert asked_machines({**asked, **rank_variables(0, 2)}) == (Machines(), [])


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}


def test_ray_chooses_the_machines() -> None:
    """Each of two commands would ask Ray for the processes of both machines."""
    (found,) = command_problems(MACHINES, {"launcher": "ray"})
    assert (found.code, found.option) == ("E370", "launcher") and "NNODES is 2" in found.seen
    (unset,) = re.findall(r"`unset ([A-Z_ ]+)`", found.fixes[0].text)
    left = {name: value for name, value in MACHINES.items() if name not in unset.split()}
    assert command_problems(left, {"launcher": "ray"}) == []
    assert command_problems(MACHINES, dict(found.fixes[1].edits)) == []


def test_tasks_of_srun_start_nobody() -> None:
    tasks = {**SRUN, **rank_variables(0, 2), "LOCAL_WORLD_SIZE": "1"}
    (found,) = command_problems(tasks, {"nproc_per_node": 8})
    assert found.code == "E370" and "--ntasks-per-node=8" in found.fixes[0].text
    assert command_problems(tasks, {"nproc_per_node": 1}) == command_problems(tasks, {}) == []
    assert command_problems(rank_variables(0, 2), {"nproc_per_node": 8}) == []
