"""Finds faults in the Ray that a run would start its ranks in."""

from __future__ import annotations

from covey.checks.check import Check
from covey.checks.ray.codes import CODES
from covey.options.schema import Config
from covey.plan.facts import LaunchFacts
from covey.plan.problem import problem
from covey.texts import counted, tr
from covey.types import Fix, Problem

_WITHOUT = Fix(text=tr("without Ray, on this machine"), edits={"launcher": "torchrun"})
_OWN = Fix(
    text=tr(
        "start a separate Ray for this run on this machine: put `RAY_ADDRESS=local` in front of the command"
    )
)


def ray_problems(config: Config, launch: LaunchFacts) -> list[Problem]:
    """Return why the Ray that was found cannot be used, or not with these options."""
    ray = launch.ray
    if ray is None:
        return []
    if config.max_restarts:
        seen = tr(
            "max_restarts is {max_restarts}, but launcher is ray, which does not restart ranks.",
            max_restarts=config.max_restarts,
        )
        none = Fix(
            text=tr("set no restarts; resume a run that ended with --resume_from_checkpoint auto"),
            edits={"max_restarts": 0},
        )
        return [problem("E106", "max_restarts", seen, "", none, _WITHOUT)]
    if not ray.fault:
        return []
    give = Fix(text=tr("give the address that `ray start --head` printed: RAY_ADDRESS=HOST:6379"))
    return [
        unusable(tr("RAY_ADDRESS is {address}: {fault}.", address=ray.address, fault=ray.fault), give, _OWN)
    ]


def unusable(seen: str, *fixes: Fix, cause: str = "") -> Problem:
    """The problem of a Ray in which the run cannot start."""
    return problem("E388", "launcher", seen, cause, *fixes, _WITHOUT)


def too_few(asked: int, there: int, kind: str, address: str) -> Problem:
    """The problem of a cluster that has fewer GPUs or CPUs than the run has ranks, free or not."""
    seen = tr(
        "nproc_per_node is {asked} and each rank takes one {kind}, but the Ray cluster at "
        "{address} has only {counted}.",
        asked=asked,
        kind=kind,
        address=address,
        counted=counted(there, kind),
    )
    fewer = [Fix(text=tr("use as many ranks as there are"), edits={"nproc_per_node": there})] if there else []
    more = Fix(text=tr("start Ray on another machine too: `ray start --address=HOST:6379`"))
    return problem("E389", "nproc_per_node", seen, "", *fewer, more)


CHECK = Check(place=100, judge=lambda config, facts, _: ray_problems(config, facts.launch), codes=CODES)
