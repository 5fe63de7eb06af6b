"""What one of several gloo processes does in the exchange; started by test_exchange.py.

`exchange_ranks.py CASE`: every case ends with exit code 0 where it went as it should.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from covey.batching.assignment import assign
from covey.batching.quantile import exact_quantile
from covey.comm import GroupComm, LocalComm
from covey.errors import GuardStop
from covey.rollout.exchange import exchange
from covey.rollout.moving import move
from covey.training.failure import is_of_another
from support.rollout_shares import MadeRollout, made_rollout, same_summaries

GROUPS, SIBLINGS = 12, 4


def rollout(world: int) -> MadeRollout:
    """Uneven shares: the first rank has most, the last but one none, and groups are spread over ranks."""

    def owner(episode: int) -> int:
        rank = int(world * ((episode * 0.618) % 1.0) ** 2)
        return 0 if rank == world - 2 else rank

    return made_rollout(
        GROUPS,
        SIBLINGS,
        owner,
        mean_length=200,
        several=0.3,
        failed=0.1,
        steps=0.2,
        vocab=300,
        seed=world,
    )


def same_as_one_process(comm: GroupComm) -> None:
    """Records, rows and a quantile, each to the bit what one process has."""
    made = rollout(comm.world)
    own = made.share(comm.rank)
    order = np.random.default_rng(comm.rank).permutation(
        np.flatnonzero(made.summaries.rows["owner"] == comm.rank)
    )
    shuffled = made.share(comm.rank, order.tolist()) if len(order) else own
    everyone = exchange(shuffled, GROUPS * SIBLINGS, comm)
    assert same_summaries(everyone, made.summaries)
    alone = exchange(made.share(0, range(len(made.tokens))), GROUPS * SIBLINGS, LocalComm())
    alone.rows["owner"] = everyone.rows["owner"]
    assert same_summaries(everyone, alone)
    rows = everyone.rows
    tokens = np.where(rows["episode"] % SIBLINGS == 1, 0, rows["length"])
    dealt = assign(tokens, made.group_R, made.owner_R, comm.world)
    rank_of = dealt.rank_of_R
    assert (rank_of != rows["owner"]).any() and dealt.unevenness < 1.25
    held = made.held(comm.rank)
    mine = move(held, made.known, made.owner_R, rank_of, comm)
    assert list(mine) == [n for n in dealt.rows_of(comm.rank) if rows["length"][n]]
    assert all(row == made.tokens[number] for number, row in mine.items())
    assert set(held.num_read.values()) <= {1}
    every = torch.from_numpy(np.concatenate([row.logprobs for row in made.tokens]))
    values = [torch.from_numpy(row.logprobs.copy()) for row in mine.values()]
    # Rows without tokens or weight are somewhere too: all tokens are in one rank's hands.
    own_values = torch.cat(values) if values else torch.zeros(0)
    for share in (0.01, 0.2, 0.999):
        assert exact_quantile(own_values, share, comm) == exact_quantile(every, share, LocalComm())


def named_on_all(comm: GroupComm) -> None:
    """A row that its owner lost, and one that it changed: every rank raises the same."""
    made = rollout(comm.world)
    everyone = exchange(made.share(comm.rank), GROUPS * SIBLINGS, comm)
    rows = everyone.rows
    rank_of = np.where(rows["length"] > 0, (rows["owner"] + 1) % comm.world, rows["owner"]).astype(np.int64)
    (first, *_) = np.flatnonzero((rows["owner"] == 0) & (rows["length"] > 0)).tolist()
    for code in ("F122", "F110"):
        held = {n: made.tokens[n] for n in np.flatnonzero(rows["owner"] == comm.rank).tolist()}
        if comm.rank == 0:
            taken = held.pop(first)
            if code == "F110":
                held[first] = replace(taken, token_ids=taken.token_ids ^ 1)
        try:
            move(held, made.known, made.owner_R, rank_of, comm)
        except GuardStop as stop:
            assert stop.finding.code == code
            told = comm.gather_json(str(stop.finding.seen))
            assert len(set(told)) == 1, told
        else:
            raise AssertionError("nothing was named")


def a_rank_leaves(comm: GroupComm) -> None:
    """The second rank ends between the sizes and the rows: the others get gloo's error, not a wait."""
    data = torch.zeros(4_000_000, dtype=torch.uint8)
    for collective in ("swap", "gather"):
        if comm.rank == 1 and collective == os.environ["LEAVES_IN"]:
            comm._gather_counts([data.numel()] * comm.world if collective == "swap" else [data.numel(), 1])
            os._exit(0)
        try:
            if collective == "swap":
                comm.swap_tensors([data] * comm.world)
            else:
                comm.gather_tensors(data)
        except RuntimeError as error:
            # What a run takes for the end of another rank, which it names then.
            assert is_of_another(error), error
            assert comm.activity.moment.collective == f"{collective}_tensors"
            return
    raise AssertionError("the end of a rank was not noticed")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    cases = {"same": same_as_one_process, "named": named_on_all, "leaves": a_rank_leaves}
    cases[sys.argv[1]](GroupComm())
    if sys.argv[1] != "leaves":
        dist.destroy_process_group()
