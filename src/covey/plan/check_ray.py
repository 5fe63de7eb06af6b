"""What is wrong with the Ray that a run would start its ranks in."""

from __future__ import annotations

from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.plan.shape import counted
from covey.types import Fix, Problem

_WITHOUT = Fix(text="without Ray, on this machine", edits={"launcher": "torchrun"})
_OWN = Fix(text="a Ray of the run's own on this machine: put `RAY_ADDRESS=local` in front of the command")


def ray_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return why the Ray that was found cannot be used, or not with these options."""
    ray = facts.ray
    if ray is None:
        return []
    if config.max_restarts:
        seen = f"max_restarts is {config.max_restarts} and launcher is ray, which starts no rank again."
        none = Fix(
            text="no restarts; a run that ended goes on with --resume_from_checkpoint auto",
            edits={"max_restarts": 0},
        )
        return [problem("E106", "max_restarts", seen, "", none, _WITHOUT)]
    if not ray.fault:
        return []
    give = Fix(text="give the address that `ray start --head` printed: RAY_ADDRESS=HOST:6379")
    return [unusable(f"RAY_ADDRESS is {ray.address}: {ray.fault}.", give, _OWN)]


def unusable(seen: str, *fixes: Fix, cause: str = "") -> Problem:
    """The problem of a Ray in which the run cannot start."""
    return problem("E388", "launcher", seen, cause, *fixes, _WITHOUT)


def too_few(asked: int, there: int, kind: str, address: str) -> Problem:
    """The problem of a cluster that has fewer GPUs or CPUs than the run has ranks, free or not."""
    seen = (
        f"nproc_per_node is {asked}, each rank takes one {kind}, and the Ray at {address} has "
        f"{counted(there, kind)} in all."
    )
    fewer = [Fix(text="as many ranks as there are", edits={"nproc_per_node": there})] if there else []
    more = Fix(text="start Ray on another machine too: `ray start --address=HOST:6379`")
    return problem("E389", "nproc_per_node", seen, "", *fewer, more)
