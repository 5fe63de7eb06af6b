"""Live objects in a run of several processes, each of which has made its own."""

from __future__ import annotations

from covey.comm import Comm
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.problem import problem
from covey.types import Fix


def refuse_other_objects(config: Config, comm: Comm) -> None:
    """ConfigError on every rank (E377) where the ranks have other models or rows. Collective."""
    named = {"model": [config.model], "dataset": config.dataset, "val_dataset": config.val_dataset}
    first, *others = comm.gather_json(named)
    problems = [
        problem(
            "E377",
            option,
            f"{option} of rank 0 is {' '.join(first[option])}, of rank {rank} {' '.join(other[option])}.",
            "Each rank runs the program, and made its own: from random numbers without a seed, or a part "
            "of the data.",
            Fix(text="make the same object on every rank; covey gives each rank its part of the work"),
        )
        for rank, other in enumerate(others, start=1)
        for option in first
        if other[option] != first[option]
    ]
    if problems:
        raise ConfigError(problems[:1])
