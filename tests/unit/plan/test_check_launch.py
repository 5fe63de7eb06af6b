"""What a launcher's variables say: a run's own, a cluster's, and those that do not fit each other."""

from __future__ import annotations

import re

import pytest

from covey.plan.check_launch import asked_processes, is_launched, launch_problems, num_ranks
from support.verbs import rank_variables

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
    ],
)
def test_what_fits(environment: dict[str, str], ranks: int) -> None:
    assert launch_problems(environment) == []
    assert num_ranks(environment) == ranks
    assert is_launched(environment) == ("LOCAL_WORLD_SIZE" in environment)


def without(name: str) -> dict[str, str]:
    return {n: v for n, v in rank_variables(1, 2).items() if n != name}


@pytest.mark.parametrize(
    ("environment", "code", "names"),
    [
        (POD, "E370", ["WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, "E370", ["WORLD_SIZE", "RANK", "MASTER_PORT"]),
        (without("LOCAL_WORLD_SIZE"), "E370", ["LOCAL_WORLD_SIZE"]),
        (without("MASTER_PORT"), "E370", ["MASTER_PORT"]),
        (without("WORLD_SIZE"), "E370", ["WORLD_SIZE", "RANK"]),
        ({"LOCAL_RANK": "3"}, "E370", ["WORLD_SIZE", "LOCAL_RANK"]),
        *[
            ({**rank_variables(0, 2), name: value}, "E370", [name, value])
            for name, value in {
                "WORLD_SIZE": "two", "RANK": "x", "LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "0",
                "MASTER_PORT": "a",
            }.items()
        ],
        ({"WORLD_SIZE": "0"}, "E370", ["WORLD_SIZE"]),
        ({**rank_variables(0, 2), "RANK": "2"}, "E370", ["RANK", "WORLD_SIZE"]),
        ({**rank_variables(0, 2), "LOCAL_RANK": "2"}, "E370", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        ({"NNODES": "2"}, "E371", ["NNODES"]),
        ({"PET_NNODES": "1:4"}, "E371", ["PET_NNODES"]),
        ({"NNODES": "all"}, "E370", ["NNODES"]),
        ({**rank_variables(0, 4), "LOCAL_WORLD_SIZE": "2"}, "E371", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(environment: dict[str, str], code: str, names: list[str]) -> None:
    (found,) = launch_problems(environment)
    assert found.code == code
    assert all(name in found.seen for name in names)
    assert num_ranks(environment) == 1
    # What the first way out unsets makes a run of one process.
    (unset,) = re.findall(r"`unset ([A-Z_ ]+)`", found.fixes[0].text)
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
