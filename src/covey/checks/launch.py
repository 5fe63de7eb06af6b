"""What a launcher has said in environment variables: how many processes a run has, on how many machines, and
which one this is.

torchrun gives each process its own RANK, LOCAL_RANK and LOCAL_WORLD_SIZE beside a common WORLD_SIZE and the
address of rank 0. Clusters set some of the same names for their pods, and a run that believed them would wait
for processes that nobody starts. NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as ms-swift reads them, ask
covey to start this machine's processes itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from covey.plan.launchers import DEFAULT_PORT, is_of_slurm, whole_number
from covey.plan.problem import problem
from covey.texts import joined, plural, tr
from covey.types import Fix, Problem

ASKED_PROCESSES = "NPROC_PER_NODE"
"""ms-swift starts so many processes."""

_LEAST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
_OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What goes from 0 to a number, and that number's name.
_COUNTED = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
# torchrun reads each of its options from a variable of this name, and a PyTorchJob of Kubernetes sets them.
_OF_TORCHRUN = "PET_"
_TORCHRUN = tr("`torchrun --nproc_per_node N -m covey train ...`, or `covey train ... --nproc_per_node N`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of a run whose processes covey is asked to start, each on its own: how many there are,
    which one this is, and where the first one is."""

    count: int = 1
    number: int = 0
    address: str = ""
    port: int = DEFAULT_PORT


def launch_problems(environment: Mapping[str, str]) -> list[Problem]:
    """Return what is wrong with the variables of a launcher; nothing where there is none."""
    if is_launched(environment):
        return _ranks(environment)
    machines, problems = asked_machines(environment)
    if machines.count > 1 and not environment.get("LOCAL_RANK", "").strip():
        # What a cluster says of its pods stands beside it, and torchrun says it anew for each process.
        return problems
    return problems or _ranks(environment)


def asked_processes(environment: Mapping[str, str]) -> tuple[int | None, list[Problem]]:
    """Return the number of processes that NPROC_PER_NODE asks for, and what is wrong with it."""
    text = environment.get(ASKED_PROCESSES, "").strip()
    if not text:
        return None, []
    number = whole_number(text)
    if number is not None and number >= 1:
        return number, []
    seen = tr(
        "The environment variable {asked_processes} is {text!r}; it must be a whole number, 1 or more.",
        asked_processes=ASKED_PROCESSES,
        text=text,
    )
    leave = Fix(
        text=tr(
            "`unset {asked_processes}`, and for several processes --nproc_per_node N",
            asked_processes=ASKED_PROCESSES,
        )
    )
    return None, [problem("E370", "nproc_per_node", seen, "", leave)]


def asked_machines(environment: Mapping[str, str]) -> tuple[Machines, list[Problem]]:
    """Return the machines that NNODES asks for, and what is wrong with what stands beside it; one machine
    where a launcher has started this process, as it has asked already."""
    name, text = _told(environment, "NNODES")
    if not text or is_launched(environment):
        return Machines(), []
    # torchrun takes a range, least:most.
    least, _, most = text.rpartition(":")
    count = whole_number(most)
    if count is None or count < 1 or least not in ("", most):
        seen = tr(
            "The environment variable {name} is {text!r}; it must be the number of machines.",
            name=name,
            text=text,
        )
        return Machines(), [problem("E370", name, seen, "", _one_machine(environment))]
    if count == 1:
        return Machines(), []
    number_name, number_text = _told(environment, "NODE_RANK")
    address = _told(environment, "MASTER_ADDR")[1]
    port_name, port_text = _told(environment, "MASTER_PORT")
    missing = [n for n, t in (("NODE_RANK", number_text), ("MASTER_ADDR", address)) if not t]
    if missing:
        seen = tr(
            "The environment variable {name} is {text}, but {are_not_set}.",
            name=name,
            text=text,
            are_not_set=_are_not_set(missing),
        )
        return Machines(), [problem("E370", name, seen, "", _all_machines(count), _one_machine(environment))]
    number, port = whole_number(number_text), whole_number(port_text or str(DEFAULT_PORT))
    if number is None or number >= count:
        rule = tr("{name} is {count}, so it must be from 0 to {last}", name=name, count=count, last=count - 1)
        seen = tr(
            "The environment variable {number_name} is {number_text!r}; {rule}.",
            number_name=number_name,
            number_text=number_text,
            rule=rule,
        )
    elif port is None or not 0 < port < 2**16:
        seen = tr(
            "The environment variable {port_name} is {port_text!r}; it must be a port number.",
            port_name=port_name,
            port_text=port_text,
        )
    else:
        return Machines(count=count, number=number, address=address, port=port), []
    return Machines(), [problem("E370", name, seen, "", _all_machines(count), _one_machine(environment))]


def command_problems(environment: Mapping[str, str], typed: Mapping[str, object]) -> list[Problem]:
    """Return what a launcher and the options of a command say against each other; `typed` holds the values
    of the options that were given."""
    return [*_tasks_that_start_more(environment, typed), *_machines_of_ray(environment, typed)]


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether this process is one that a launcher started, with all that it has to know."""
    return whole_number(environment.get("WORLD_SIZE", "")) is not None and all(
        environment.get(name) for name in _OF_A_RANK
    )


def num_ranks(environment: Mapping[str, str]) -> int:
    """Return the processes of the run that a launcher has started; 1 where none has, or where what it says
    is wrong."""
    if not is_launched(environment) or launch_problems(environment):
        return 1
    return int(environment["WORLD_SIZE"])


def processes_here(environment: Mapping[str, str], num_processes: int) -> int:
    """Return how many of a run's processes are on this machine."""
    if num_ranks(environment) > 1:
        return int(environment["LOCAL_WORLD_SIZE"])
    return max(1, num_processes // asked_machines(environment)[0].count)


def _ranks(environment: Mapping[str, str]) -> list[Problem]:
    typed = {name: environment[name].strip() for name in _LEAST if environment.get(name, "").strip()}
    if typed.get("WORLD_SIZE") in (None, "1"):
        # One process needs no address; what a cluster says of it may stay.
        typed = {name: typed[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in typed}
    numbers = {name: whole_number(text) for name, text in typed.items()}
    for name, number in numbers.items():
        if number is None or number < _LEAST[name]:
            rule = tr("it must be a whole number, {least} or more", least=_LEAST[name])
            return [_wrong(name, typed[name], rule, environment)]
    world, rank, local = (numbers.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if world is None and (rank or local):
        name = "RANK" if rank else "LOCAL_RANK"
        rule = tr("WORLD_SIZE, the number of processes, must be set too")
        return [_wrong(name, typed[name], rule, environment)]
    missing = [name for name in _OF_A_RANK if not environment.get(name, "").strip()]
    if world is not None and world > 1 and missing:
        return [_incomplete(world, missing, environment)]
    for name, of in _COUNTED:
        at, count = numbers.get(name), numbers.get(of)
        if at is not None and count is not None and at >= count:
            rule = tr("{of} is {count}, so it must be from 0 to {last}", of=of, count=count, last=count - 1)
            return [_wrong(name, typed[name], rule, environment)]
    local_world = numbers.get("LOCAL_WORLD_SIZE")
    if world is not None and local_world is not None and local_world > world:
        rule = tr(
            "it cannot be larger than WORLD_SIZE, the total number of processes, which is {world}",
            world=world,
        )
        return [_wrong("LOCAL_WORLD_SIZE", typed["LOCAL_WORLD_SIZE"], rule, environment)]
    return []


def _tasks_that_start_more(environment: Mapping[str, str], typed: Mapping[str, object]) -> list[Problem]:
    asked, local = typed.get("nproc_per_node"), environment.get("LOCAL_WORLD_SIZE", "")
    if not is_of_slurm(environment) or not is_launched(environment) or str(asked) in ("None", "1", local):
        return []
    seen = tr(
        "srun has started {local} of the run's processes on this machine, but nproc_per_node is {asked}.",
        local=local,
        asked=asked,
    )
    return [
        problem(
            "E370",
            "nproc_per_node",
            seen,
            tr("Under srun each task is one process of the run and does not start others."),
            Fix(
                text=tr(
                    "let srun start all of them: srun --ntasks-per-node={asked} covey train ...", asked=asked
                )
            ),
            Fix(text=tr("leave out --nproc_per_node, and NPROC_PER_NODE")),
        )
    ]


def _machines_of_ray(environment: Mapping[str, str], typed: Mapping[str, object]) -> list[Problem]:
    count = asked_machines(environment)[0].count
    if typed.get("launcher") != "ray" or count == 1:
        return []
    seen = tr(
        "The environment variable NNODES is {count}, but launcher is ray, which chooses the machines itself.",
        count=count,
    )
    once = Fix(
        text=tr(
            "type the command on one machine only, after `unset NNODES NODE_RANK`; "
            "--nproc_per_node is then the total number of processes on all {count} machines",
            count=count,
        )
    )
    torchrun = Fix(text=tr("start the command on each machine, without Ray"), edits={"launcher": "torchrun"})
    return [problem("E370", "launcher", seen, "", once, torchrun)]


def _told(environment: Mapping[str, str], name: str) -> tuple[str, str]:
    """The name under which a variable of machines is set, and its text; torchrun's own comes second."""
    for candidate in (name, f"{_OF_TORCHRUN}{name}"):
        if environment.get(candidate, "").strip():
            return candidate, environment[candidate].strip()
    return name, ""


def _one_machine(environment: Mapping[str, str]) -> Fix:
    unset = _unset(environment, "NNODES", f"{_OF_TORCHRUN}NNODES")
    return Fix(text=tr("to train on this machine only: {unset}, then the same command", unset=unset))


def _all_machines(count: int) -> Fix:
    return Fix(
        text=tr(
            "to train on {count} machines: on each of them put NNODES={count} NODE_RANK=R "
            "MASTER_ADDR=HOST MASTER_PORT=29500 in front of the same command, where R numbers the "
            "machines from 0 and HOST is the first of them",
            count=count,
        )
    )


def _unset(environment: Mapping[str, str], *names: str) -> str:
    """The command that unsets these variables and those of a rank, as far as they are set."""
    candidates = (*names, "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return tr(
        "`unset {candidates}`",
        candidates=" ".join(name for name in candidates if environment.get(name, "").strip()),
    )


def _wrong(name: str, text: str, rule: str, environment: Mapping[str, str]) -> Problem:
    return problem(
        "E370",
        name,
        tr("The environment variable {name} is {text!r}; {rule}.", name=name, text=text, rule=rule),
        "",
        Fix(
            text=tr(
                "for one process: {unset}, then the same command", unset=_unset(environment, "WORLD_SIZE")
            )
        ),
        Fix(text=tr("for several processes: {torchrun}", torchrun=_TORCHRUN)),
    )


def _incomplete(world: int, missing: list[str], environment: Mapping[str, str]) -> Problem:
    unset = _unset(environment, "WORLD_SIZE")
    alone = Fix(text=tr("for a run in this process alone: {unset}, then the same command", unset=unset))
    seen = tr(
        "The environment variable WORLD_SIZE is {world}, but {are_not_set}.",
        world=world,
        are_not_set=_are_not_set(missing),
    )
    if "OMPI_COMM_WORLD_SIZE" in environment and missing == ["MASTER_ADDR"]:
        address = Fix(
            text=tr("name the machine of rank 0: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...")
        )
        return problem("E370", "MASTER_ADDR", seen, "", address, alone)
    cause = tr("Some clusters set WORLD_SIZE to the number of pods, for example a Kubernetes PyTorchJob.")
    return problem(
        "E370",
        "WORLD_SIZE",
        seen,
        cause if "LOCAL_RANK" in missing else "",
        alone,
        Fix(
            text=tr(
                "for several processes on this machine: unset the same variables, then {torchrun}",
                torchrun=_TORCHRUN,
            )
        ),
        Fix(text=tr("for several machines: docs/clusters.md has the commands (torchrun, Slurm, Kubernetes)")),
    )


def _are_not_set(names: Collection[str]) -> str:
    *most, last = names
    listed = tr("{most} and {last}", most=joined(", ", most), last=last) if most else last
    return plural(len(names), "{names} is not set", "{names} are not set", names=listed)
