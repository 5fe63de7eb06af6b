"""What the checks need to know of the output directory and of earlier runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
    were, as in Facts. `lost` says what the stopped run had recorded and its directory does not hold.
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
