"""What a launcher has said in environment variables: how many processes a run has, and which one this is.

torchrun gives each process its own RANK, LOCAL_RANK and LOCAL_WORLD_SIZE beside a common WORLD_SIZE and the
address of rank 0. Clusters set some of the same names for their pods, and a run that believed them would wait
for processes that nobody starts.
"""

from __future__ import annotations

from collections.abc import Mapping

from covey.plan.problem import problem
from covey.types import Fix, Problem

ASKED_PROCESSES = "NPROC_PER_NODE"
"""ms-swift starts so many processes."""

_LEAST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
_OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Who says how many machines there are: commands of ms-swift, and torchrun's own variable.
_MACHINES = ("NNODES", "PET_NNODES")
_TORCHRUN = "`torchrun --nproc_per_node N -m covey train ...`, or `covey train ... --nproc_per_node N`"


def launch_problems(environment: Mapping[str, str]) -> list[Problem]:
    """Return what is wrong with the variables of a launcher; nothing where there is none."""
    return [*_ranks(environment), *_machines(environment)]


def asked_processes(environment: Mapping[str, str]) -> tuple[int | None, list[Problem]]:
    """Return the number of processes that NPROC_PER_NODE asks for, and what is wrong with it."""
    text = environment.get(ASKED_PROCESSES, "").strip()
    if not text:
        return None, []
    number = _number(text)
    if number is not None and number >= 1:
        return number, []
    seen = f"The environment variable {ASKED_PROCESSES} is {text!r}; it takes a whole number from 1 on."
    leave = Fix(text=f"`unset {ASKED_PROCESSES}`, and for several processes --nproc_per_node N")
    return None, [problem("E370", "nproc_per_node", seen, "", leave)]


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one that a launcher started, with all that it has to know."""
    return _number(environment.get("WORLD_SIZE", "")) is not None and all(
        environment.get(name) for name in _OF_A_RANK
    )


def num_ranks(environment: Mapping[str, str]) -> int:
    """Return the processes of the run that a launcher has started; 1 where none has, or where what it says
    is wrong."""
    if not is_launched(environment) or launch_problems(environment):
        return 1
    return int(environment["WORLD_SIZE"])


def _ranks(environment: Mapping[str, str]) -> list[Problem]:
    typed = {name: environment[name].strip() for name in _LEAST if environment.get(name, "").strip()}
    if typed.get("WORLD_SIZE") in (None, "1"):
        # One process needs no address; what a cluster says of it may stay.
        typed = {name: typed[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in typed}
    numbers = {name: _number(text) for name, text in typed.items()}
    for name, number in numbers.items():
        if number is None or number < _LEAST[name]:
            rule = f"it takes a whole number from {_LEAST[name]} on"
            return [_wrong(name, typed[name], rule, environment)]
    world, rank, local = (numbers.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if world is None and (rank or local):
        name = "RANK" if rank else "LOCAL_RANK"
        rule = "WORLD_SIZE, the number of processes, is not set beside it"
        return [_wrong(name, typed[name], rule, environment)]
    missing = [name for name in _OF_A_RANK if not environment.get(name, "").strip()]
    if world is not None and world > 1 and missing:
        return [_incomplete(world, missing, environment)]
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        at, count = numbers.get(name), numbers.get(of)
        if at is not None and count is not None and at >= count:
            rule = f"{of} is {count}, so it goes from 0 to {count - 1}"
            return [_wrong(name, typed[name], rule, environment)]
    return []


def _machines(environment: Mapping[str, str]) -> list[Problem]:
    for name in _MACHINES:
        text = environment.get(name, "").strip()
        # torchrun takes a range, least:most.
        number = _number(text.rpartition(":")[2])
        if text and (number is None or number < 1):
            seen = f"The environment variable {name} is {text!r}; it takes the number of machines."
            return [problem("E370", name, seen, "", Fix(text=f"for one machine: `unset {name}`"))]
        if number is not None and number > 1:
            return [_several([name], f"The environment variable {name} is {text}")]
    world, local = (_number(environment.get(name, "")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world is not None and local and is_launched(environment) and world > local:
        seen = f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE is {local}"
        return [_several(["WORLD_SIZE", *_set_beside(environment)], seen)]
    return []


def _number(text: str) -> int | None:
    return int(text) if text.strip().isascii() and text.strip().isdigit() else None


def _set_beside(environment: Mapping[str, str]) -> list[str]:
    """What has to go with WORLD_SIZE for a process of its own."""
    return [name for name in _OF_A_RANK if "MASTER" not in name and environment.get(name)]


def _alone(environment: Mapping[str, str]) -> str:
    names = ["WORLD_SIZE"] if environment.get("WORLD_SIZE") else []
    return f"`unset {' '.join([*names, *_set_beside(environment)])}`"


def _wrong(name: str, text: str, rule: str, environment: Mapping[str, str]) -> Problem:
    return problem(
        "E370",
        name,
        f"The environment variable {name} is {text!r}; {rule}.",
        "",
        Fix(text=f"for one process: {_alone(environment)}, then the same command"),
        Fix(text=f"for several processes: {_TORCHRUN}"),
    )


def _incomplete(world: int, missing: list[str], environment: Mapping[str, str]) -> Problem:
    cause = "A cluster that sets WORLD_SIZE to the number of its pods, such as a PyTorchJob of Kubernetes."
    return problem(
        "E370",
        "WORLD_SIZE",
        f"The environment variable WORLD_SIZE is {world}, and {_listed(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not set.",
        cause if "LOCAL_RANK" in missing else "",
        Fix(text=f"for a run in this process alone: {_alone(environment)}, then the same command"),
        Fix(text=f"for several processes on this machine: the same, and then {_TORCHRUN}"),
    )


def _several(names: list[str], seen: str) -> Problem:
    unset = Fix(text=f"a run on one machine: `unset {' '.join(names)}`, and --nproc_per_node N for its GPUs")
    return problem("E371", names[0], f"{seen}: a run over several machines.", "", unset)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
