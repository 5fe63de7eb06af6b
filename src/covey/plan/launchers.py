"""What launchers other than torchrun say of a process, in the variables of torchrun.

Everything else in covey reads RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
torchrun and `accelerate launch` set all of them. `deepspeed` calls one of them LOCAL_SIZE; `srun` and
`mpirun` have names of their own, and no address of rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What each rank of a run has to know."""

DEFAULT_PORT = 29500
"""torchrun's port of rank 0 where nobody types one."""

# Step numbers from here on are those of batch scripts and interactive shells, which are no tasks of srun.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
# Ports that the system gives to nobody by itself (ip_local_port_range begins at 32,768).
_FIRST_PORT, _NUM_PORTS = 12000, 20000
# The names of rank, ranks, local rank and local ranks: Open MPI's, and those of MPICH and Intel MPI.
_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def adopted(environment: Mapping[str, str], parent: int) -> dict[str, str]:
    """Return the variables of torchrun that another launcher has said in its own names; `parent` is the
    number of this process's parent, which all ranks of a machine have in common."""
    if any(environment.get(name, "").strip() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _of_deepspeed(environment)
    found = _of_slurm(environment) or _of_mpi(environment, parent)
    return {name: value for name, value in found.items() if not environment.get(name, "").strip()}


def is_of_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks of `srun`."""
    step = whole_number(environment.get("SLURM_STEP_ID", ""))
    is_task = step is not None and step < _FIRST_RESERVED_STEP
    numbers = [whole_number(environment.get(name, "")) for name in ("SLURM_PROCID", "SLURM_LOCALID")]
    return is_task and None not in numbers and (_slurm_tasks(environment) or 1) > 1


def first_host(nodes: str) -> str:
    """Return the first name of Slurm's list of hosts: `gpu[03-05,9],login1` begins with gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    name = first[0] if first is not None else ""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


def tasks_on(counts: str, node: int) -> int | None:
    """Return the tasks of a node by Slurm's list of them: `4(x2),3` is 4, 4, 3."""
    each: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return None
        each += [int(match[1])] * int(match[2] or 1)
    return each[node] if node < len(each) else None


def whole_number(text: str) -> int | None:
    """Return the number that a text writes in digits; None of any other text."""
    return int(text) if text.strip().isascii() and text.strip().isdigit() else None


def _of_deepspeed(environment: Mapping[str, str]) -> dict[str, str]:
    size = environment.get("LOCAL_SIZE", "").strip()
    are_set = all(environment.get(name, "").strip() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if not size or not are_set or environment.get("LOCAL_WORLD_SIZE", "").strip():
        return {}
    return {"LOCAL_WORLD_SIZE": size}


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    if not is_of_slurm(environment):
        return {}
    node = whole_number(environment.get("SLURM_NODEID", "")) or 0
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    local = tasks_on(counts, node) or whole_number(environment.get("SLURM_NTASKS_PER_NODE", ""))
    tasks = _slurm_tasks(environment)
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = whole_number(environment.get("SLURM_JOB_ID", "")) or 0
    step = whole_number(environment.get("SLURM_STEP_ID", "")) or 0
    found = {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": "" if local is None else str(local),
        "MASTER_ADDR": "127.0.0.1" if local == tasks else first_host(hosts),
        # Two steps of one job may run at a time.
        "MASTER_PORT": str(_port(job + 101 * step)),
    }
    return {name: value for name, value in found.items() if value}


def _slurm_tasks(environment: Mapping[str, str]) -> int | None:
    return whole_number(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", ""))


def _of_mpi(environment: Mapping[str, str], parent: int) -> dict[str, str]:
    for names in _MPI:
        numbers = [whole_number(environment.get(name, "")) for name in names]
        if None in numbers or (numbers[1] or 1) < 2:
            continue
        rank, world, local_rank, local_world = map(str, numbers)
        found = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_world,
        }
        if local_world == world:
            return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port(parent))}
        # The address of another machine is known to whoever starts mpirun.
        return {**found, "MASTER_PORT": str(DEFAULT_PORT)}
    return {}


def _port(number: int) -> int:
    return _FIRST_PORT + number % _NUM_PORTS
