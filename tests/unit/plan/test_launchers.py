"""What srun, mpirun and deepspeed say of a process, in torchrun's names."""

from __future__ import annotations

import pytest

from covey.checks.launch import is_launched, launch_problems
from covey.plan.launchers import adopted, first_host, is_of_slurm, tasks_on
from support.verbs import rank_variables

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[02-04]",
}


def test_a_task_of_srun() -> None:
    found = adopted(SLURM, 1)
    port = int(found.pop("MASTER_PORT"))
    assert 1024 < port < 32768
    assert found == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "gpu03",
    }  # fmt: skip
    assert is_launched({**SLURM, **adopted(SLURM, 1)}) and launch_problems(adopted(SLURM, 1)) == []
    # All tasks of a step find the same port, and those of another step another one.
    assert adopted({**SLURM, "SLURM_PROCID": "0"}, 2)["MASTER_PORT"] == str(port)
    assert adopted({**SLURM, "SLURM_STEP_ID": "1"}, 1)["MASTER_PORT"] != str(port)


def test_what_is_set_already_stays() -> None:
    found = adopted({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}, 1)
    assert "MASTER_ADDR" not in found and "MASTER_PORT" not in found
    # torchrun inside a job.
    assert adopted({**SLURM, **rank_variables(0, 2)}, 1) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": ""},  # the batch script
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_ID": "4294967290"},  # a shell of salloc
        {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": ""},
    ],
    ids=str,
)
def test_a_process_in_a_job_that_is_no_task_of_several(change: dict[str, str]) -> None:
    environment = {**SLURM, **change}
    assert not is_of_slurm(environment) and adopted(environment, 1) == {}


def test_tasks_of_one_machine_need_no_network() -> None:
    here = {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    assert adopted({**SLURM, **here}, 1)["MASTER_ADDR"] == "127.0.0.1"


def test_an_older_slurm() -> None:
    """Without the variables of a step those of the job count."""
    old = {n: v for n, v in SLURM.items() if not n.startswith("SLURM_STEP_") or n == "SLURM_STEP_ID"}
    found = adopted({**old, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, 1)
    assert (found["LOCAL_WORLD_SIZE"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("4", "8", "gpu02")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],login1", "gpu03"),
        ("node1", "node1"),
        ("a,b", "a"),
        ("r[1-2]n[07-08].cluster", "r1n07.cluster"),
        ("", ""),
    ],
)
def test_the_first_of_a_list_of_hosts(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_the_tasks_of_each_node() -> None:
    assert [tasks_on("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert tasks_on("many", 0) is None


OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@pytest.mark.parametrize(("names", "way"), [(OPEN_MPI, "-x MASTER_ADDR"), (MPICH, "unset")])
def test_a_process_of_mpirun(names: tuple[str, ...], way: str) -> None:
    alone = dict(zip(names, ("1", "2", "1", "2"), strict=True))
    found = {**alone, **adopted(alone, 4242)}
    assert is_launched(found) and launch_problems(found) == [] and found["MASTER_ADDR"] == "127.0.0.1"
    spread = {**alone, names[2]: "0", names[3]: "1"}
    (missing,) = launch_problems({**spread, **adopted(spread, 4242)})
    assert missing.code == "E370" and way in missing.fixes[0].text
    named = {**spread, "MASTER_ADDR": "node1"}
    assert is_launched({**named, **adopted(named, 4242)})


def test_a_process_of_deepspeed() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    said = {name: rank_variables(1, 2)[name] for name in names}
    said |= {"LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    assert adopted(said, 1) == {"LOCAL_WORLD_SIZE": "2"}
    # A cluster's word of its pods is not believed.
    assert adopted({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, 1) == {}
