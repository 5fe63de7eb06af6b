"""What one of several gloo processes does with tensors of different sizes; started by test_comm.py."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from covey.comm import GroupComm


def gathered(comm: GroupComm) -> None:
    """Sizes differ, some are 0, and one rank may have all."""
    torch.manual_seed(0)
    for dtype in (torch.uint8, torch.int32, torch.float64):
        for sizes in ([0] * comm.world, range(comm.world), [0, 9, *[0] * (comm.world - 2)]):
            for columns in ((), (3,), (1,)):
                shapes = [(n, *columns) for n in sizes]
                parts = [torch.randint(99, shape).to(dtype) for shape in shapes]
                own = parts[comm.rank]
                # Every other element of a larger tensor: what is sent need not lie side by side.
                spread = torch.stack([own, own], dim=-1)[..., 0]
                found = comm.gather_tensors(spread)
                assert all(a.dtype == b.dtype and a.equal(b) for a, b in zip(found, parts, strict=True))
    try:
        comm.gather_tensors(torch.zeros(2, 3 + comm.rank % 2))
    except AssertionError as error:
        assert "rows of different widths" in str(error)
    else:
        raise AssertionError("widths differ")


def swapped(comm: GroupComm) -> None:
    """Each pair has its own size; many exchanges one after the other do not mix."""
    for turn in range(30):

        def between(source: int, target: int, turn: int = turn) -> torch.Tensor:
            size = (source * 5 + target * 3 + turn) % 4 * (1 if turn % 3 else 50_000)
            return torch.full((size,), source * 16 + target, dtype=torch.uint8)

        found = comm.swap_tensors([between(comm.rank, target) for target in range(comm.world)])
        expected = [between(source, comm.rank) for source in range(comm.world)]
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    assert comm.activity.moment.collective == ""


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    gathered(GroupComm())
    swapped(GroupComm())
    dist.destroy_process_group()
