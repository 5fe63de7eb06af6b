"""Holds the facts that checks read of the machine, the launch, the output directory and earlier runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from covey.types import Problem

# "ended" is a run that left no checkpoint to go on from.
OutputDirState = Literal["free", "run", "ended", "not_empty", "not_writable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFacts:
    """The Ray that ranks are started in: its address, or None where the run starts its own on this machine;
    `fault` says why it cannot be used, or is empty."""

    address: str | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFacts:
    """What was found where a resume was asked for.

    `problem` says why it is no checkpoint to go on from, or is None; `step` is the checkpoint's; `skipped`
    says of each newer one why it is passed over, `newest` names one that was likely meant. `is_elsewhere` is
    where it does not lie in output_dir. `config_changes` are the options that differ from those of the
    stopped run as (name, old value, new value), where its config.yaml can be read (`is_compared`);
    `pass_rates` is the digest of what was measured then, `reference` that of the adapter that the reference
    had. `foreign` is what a checkpoint of another trainer holds. `steps_of_rollout` are the steps taken of
    the rollout that it stands in, 0 between two. `reward_texts` are the digests of reward functions as they
    were, as in RewardFacts. `lost` says what the stopped run had recorded and its directory does not hold.
    """

    path: str
    problem: str | None = None
    step: int | None = None
    skipped: tuple[str, ...] = ()
    newest: str = ""
    is_elsewhere: bool = False
    is_compared: bool = True
    config_changes: tuple[tuple[str, Any, Any], ...] = ()
    pass_rates: str | None = None
    reference: str | None = None
    foreign: Literal["", "model", "adapter"] = ""
    steps_of_rollout: int = 0
    reward_texts: tuple[tuple[str, str], ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOwner:
    """The process that writes to a run directory now; a number or a word that nobody knows is 0 or "".

    pid      its number
    host     the name of its machine
    since    when it took the directory
    sign_s   seconds since its last sign
    path     the file that says so
    is_here  whether it is certain to run on this machine
    """

    pid: int = 0
    host: str = ""
    since: str = ""
    sign_s: float = 0.0
    path: str = ""
    is_here: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """Holds the facts of how the run is started.

    num_processes       training processes over all machines
    num_processes_here  those of this machine; None where they are all of them
    is_rank             whether this is one of several processes that a launcher has started
    objects             names of the live objects that the program has given
    ray                 the Ray that the ranks are started in; None where it is not looked for
    layout_problems     what of the layout could not be read
    """

    num_processes: int = 1
    num_processes_here: int | None = None
    is_rank: bool = False
    objects: tuple[str, ...] = ()
    ray: RayFacts | None = None
    layout_problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Holds the facts of the machine.

    cuda               whether training uses CUDA
    npu                environment variable that picks Ascend NPUs
    asks_for_cpu       whether accelerate was told to use the CPU
    nproc_available    GPUs with CUDA, else cores of this machine
    has_bfloat16       whether the training device computes in bfloat16
    free_memory_bytes  memory that is free: of the smallest GPU, else of the machine for all processes
    missing_packages   (option, what has to be installed) for libraries that are not there
    versions           (package, version) of the libraries that the run rests on
    """

    cuda: bool | None = None
    npu: str = ""
    asks_for_cpu: bool = False
    nproc_available: int | None = None
    has_bfloat16: bool | None = None
    free_memory_bytes: int | None = None
    missing_packages: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFacts:
    """Holds the facts of output_dir, and of the run that is resumed or replayed.

    state             what the directory holds
    fault             why it cannot be written, or ""
    owner             the process that writes there now, where there is one
    records_problem   why the records there cannot be gone on with, as (path, words)
    in_the_way        (path, words) of what stands there under a name that the run will need
    resume            what was found where a resume was asked for
    replay_problem    why the recorded rollouts cannot be replayed
    checkpoint_bytes  size of one checkpoint with everything a resume needs
    model_bytes       size of one that is reduced to the model
    free_bytes        free space on its disk
    """

    state: OutputDirState | None = None
    fault: str = ""
    owner: RunOwner | None = None
    records_problem: tuple[str, str] | None = None
    in_the_way: tuple[tuple[str, str], ...] = ()
    resume: ResumeFacts | None = None
    replay_problem: str | None = None
    checkpoint_bytes: int | None = None
    model_bytes: int | None = None
    free_bytes: int | None = None
