"""`python exchange_run.py FAULT WHERE RANK WORDS…`: `covey` in one rank of a run, with a fault planted in one
of them: it reports or sends something else than it has sampled, or is gone while ranks tell each other of it.

The fault comes in the fourth rollout, or in the evaluation after the second step.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from covey.activity import Activity
from covey.cli.main import main
from covey.comm import Comm, GroupComm
from covey.learner import annotate
from covey.rollout import assembly, collect
from covey.rollout.assembly import RankShare
from covey.rollout.exchange import Summaries
from covey.types import KeptSets, Outcome, ScoredGroup, TokenSequence

# The steps taken when the fault comes, and the phases that it may come in.
_ROLLOUT = 3, ("reward", "annotate")
TIMES = {
    **dict.fromkeys(("rollout", "selection", "filters"), _ROLLOUT),
    "evaluation": (2, ("evaluate",)),
}
AWAY = "the sandbox of this rank is away"


def picked(own: Summaries, numbers: list[int], **changes: int) -> Summaries:
    """The records of these rows, of which the last one is changed."""
    rows = own.rows[numbers]
    for name, value in changes.items():
        rows[name][-1] = value
    return Summaries(rows=rows, parts_RK=own.parts_RK[numbers], statuses_RK=own.statuses_RK[numbers])


def unknown(own: Summaries, num_episodes: int) -> Summaries:
    """The last record is of an episode that there is not."""
    return picked(own, list(range(len(own.rows))), episode=num_episodes + 1)


def twice(own: Summaries, num_episodes: int) -> Summaries:
    """The episodes of this rank, and one of the first rank."""
    return picked(own, [*range(len(own.rows)), 0], episode=1)


def missing(own: Summaries, num_episodes: int) -> Summaries:
    """All episodes but the last."""
    return picked(own, list(range(len(own.rows) - 1)))


REPORTS: Mapping[str, Callable[[Summaries, int], Summaries]] = {
    "unknown": unknown,
    "twice": twice,
    "missing": missing,
}


def lost(own: RankShare) -> RankShare:
    """Two of the episodes are lost to a service that this rank alone needs."""
    episodes = [
        replace(e, outcome=Outcome.INFRASTRUCTURE, sequences=(), text="", failure=AWAY) if place < 2 else e
        for place, e in enumerate(own.episodes)
    ]
    return replace(own, episodes=episodes)


def is_due(activity: Activity, where: str) -> bool:
    """Whether it is time for the fault."""
    step, phases = TIMES[where]
    return activity.step == step and activity.moment.phase in phases


def report(change: Callable[[Summaries, int], Summaries], where: str) -> None:
    """This rank reports something else."""
    real = assembly.exchange

    def exchange(own: Summaries, num_episodes: int, comm: Comm) -> Summaries:
        reported = change(own, num_episodes) if is_due(comm.activity, where) else own
        return real(reported, num_episodes, comm)

    assembly.exchange = exchange


def collect_otherwise(change: Callable[[RankShare], RankShare], where: str) -> None:
    """Something happens to what this rank collects."""
    real = collect.assemble

    def assemble(slots: Any, own: RankShare, codec: Any, plan: Any, comm: Comm) -> list[ScoredGroup]:
        return real(slots, change(own) if is_due(comm.activity, where) else own, codec, plan, comm)

    collect.assemble = assemble


def at_the_move(happen: Callable[..., Mapping[int, TokenSequence]], where: str) -> None:
    """What happens to the rows of this rank just before they move."""
    real = annotate.move

    def move(
        held: Mapping[int, TokenSequence], known: Any, owner: Any, rank_of: Any, comm: Comm, media: Any
    ) -> Any:
        if is_due(comm.activity, where):
            held = happen(held, np.flatnonzero((owner == comm.rank) & (rank_of != comm.rank)).tolist())
        return real(held, known, owner, rank_of, comm, media)

    annotate.move = move


def other_rows(held: Mapping[int, TokenSequence], leaving: list[int]) -> Mapping[int, TokenSequence]:
    """The rows that leave have other tokens."""
    assert leaving, "no row leaves this rank"
    return {
        number: replace(row, token_ids=row.token_ids ^ 1) if number in leaving else row
        for number, row in held.items()
    }


def without_token(row: TokenSequence) -> TokenSequence:
    """The row, whose first kept set lacks the token that was drawn from it."""
    assert row.kept is not None
    first, *others = (set(ids.tolist()) for ids in row.kept)
    changed = first - {int(row.trained_ids[0])} | {int(row.trained_ids[0]) ^ 1}
    return replace(row, kept=KeptSets.of([changed, *others], row.kept.vocab))


def a_set_less(row: TokenSequence) -> TokenSequence:
    """The row without its last kept set."""
    assert row.kept is not None
    return replace(row, kept=row.kept.part(0, len(row.kept) - 1))


def other_sets(
    change: Callable[[TokenSequence], TokenSequence],
) -> Callable[..., Mapping[int, TokenSequence]]:
    """The rows that leave have other kept sets."""

    def happen(held: Mapping[int, TokenSequence], leaving: list[int]) -> Mapping[int, TokenSequence]:
        assert leaving, "no row leaves this rank"
        return {number: change(row) if number in leaving else row for number, row in held.items()}

    return happen


def recorded(change: Callable[[TokenSequence], TokenSequence]) -> Callable[[RankShare], RankShare]:
    """The engine of this rank records other kept sets."""

    def happen(own: RankShare) -> RankShare:
        changed = [replace(e, sequences=tuple(map(change, e.tokens))) for e in own.episodes]
        return replace(own, episodes=changed)

    return happen


SETS = {"a set without its token": without_token, "a set less": a_set_less}


def leave_in(collective: str, leave: Callable[[], None], where: str) -> None:
    """Be gone in a collective, behind its sizes."""
    real = GroupComm._send_and_receive

    def send(self: GroupComm, *tensors: Any) -> None:
        if self.activity.moment.collective == collective and is_due(self.activity, where):
            leave()
        real(self, *tensors)

    GroupComm._send_and_receive = send  # type: ignore[method-assign]


def killed(*rows: Any) -> Any:
    """SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def exited() -> None:
    """As if it had done everything."""
    os._exit(0)


def plant(fault: str, where: str) -> None:
    """Plant the fault in this process."""
    if fault in REPORTS:
        report(REPORTS[fault], where)
    elif fault == "lost":
        collect_otherwise(lost, where)
    elif fault == "other rows":
        at_the_move(other_rows, where)
    elif fault in SETS:
        at_the_move(other_sets(SETS[fault]), where)
    elif fault.startswith("recorded "):
        collect_otherwise(recorded(SETS[fault.removeprefix("recorded ")]), where)
    elif fault == "killed before the move":
        at_the_move(killed, where)
    elif fault == "killed in the exchange":
        leave_in("gather_tensors", killed, where)
    elif fault == "exits in the exchange":
        leave_in("gather_tensors", exited, where)
    elif fault == "killed in the move":
        leave_in("swap_tensors", killed, where)
    else:
        assert fault == "none", fault


if __name__ == "__main__":
    fault, where, rank = sys.argv[1:4]
    if os.environ["RANK"] == rank:
        plant(fault, where)
    sys.exit(main(sys.argv[4:]))
