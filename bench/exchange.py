"""Print what the exchange of a rollout takes: `python bench/exchange.py`.

Eight gloo processes with a million tokens each: bytes sent, seconds and memory of the slowest rank, for the
records, the assignment, the rows that move and a quantile; and the same rollout as JSON to every rank, as
lists of numbers, at a part of its size, because that takes gigabytes. Then 64 ranks as threads of one process
with 10 million tokens together, over a communicator that counts bytes. Both hold the exchange to what it
promises: at most 100 bytes a row and 8 a part of the reward to each rank, each row that moves once to its own
rank, tokens of others opened by nobody, the slowest rank at most 1.1 times the mean. Some two minutes on two
cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from covey.batching.assignment import UNEVEN, assign
from covey.batching.quantile import exact_quantile
from covey.comm import Comm, GroupComm
from covey.rollout.exchange import exchange
from covey.rollout.moving import move
from covey.types import TokenSequence
from support.rollout_shares import NUM_PARTS, MadeRollout, made_rollout, on_counting_ranks

SIBLINGS, MEAN_LENGTH = 16, 1000
_MB = 1e6


def main() -> int:
    """Run both, or one process of the first, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8, help="gloo processes (8)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of each process (1,000,000)")
    parser.add_argument("--ranks", type=int, default=64, help="ranks that are threads (64)")
    parser.add_argument(
        "--json", type=float, default=0.25, help="part of the tokens that goes as JSON (0.25)"
    )
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        one_process(Path(arguments.folder), arguments.tokens, arguments.json)
        return 0
    processes(arguments.processes, arguments.tokens, arguments.json)
    threads(arguments.ranks, 10_000_000 * arguments.tokens // 1_000_000)
    return 0


def rollout(num_tokens: int, world: int) -> MadeRollout:
    """Rows of about 1,000 tokens, in groups of 16; ranks own consecutive episodes, some more than others."""
    num_groups = max(world, num_tokens // (SIBLINGS * MEAN_LENGTH))
    num_episodes = num_groups * SIBLINGS
    bounds = np.cumsum(np.linspace(0.8, 1.2, world)) / world * num_episodes

    def owner(episode: int) -> int:
        return min(world - 1, int(np.searchsorted(bounds, episode, side="right")))

    return made_rollout(num_groups, SIBLINGS, owner, mean_length=MEAN_LENGTH)


def steps(
    comm: Comm, made: MadeRollout, measured: Callable[[str, Callable[[], Any]], Any]
) -> tuple[np.ndarray, dict[int, TokenSequence]]:
    """What a rank does of a rollout, and what is held of it: its ranks and this one's rows."""
    held = made.held(comm.rank)
    share = made.share(comm.rank)
    num_episodes = int(made.summaries.rows["episode"].max()) + 1
    everyone = measured("records to all", lambda: exchange(share, num_episodes, comm))
    rows = everyone.rows
    dealt = measured(
        "assignment",
        lambda: assign(rows["length"], made.group_R, made.owner_R, comm.world, rows["prompt_length"]),
    )
    assert dealt.unevenness <= UNEVEN, dealt.unevenness
    known = [everyone.known(number) for number in range(len(rows))]
    mine = measured("rows that move", lambda: move(held, known, made.owner_R, dealt.rank_of_R, comm))
    assert list(mine) == dealt.rows_of(comm.rank)
    assert set(held.num_read.values()) == {1} and len(held.num_read) == len(share.rows)
    values = torch.from_numpy(np.concatenate([row.logprobs for row in mine.values()]))
    measured("quantile of a value a token", lambda: exact_quantile(values, 0.2, comm))
    return dealt.rank_of_R, mine


def expected_bytes(made: MadeRollout, rank_of: np.ndarray, world: int) -> tuple[np.ndarray, np.ndarray]:
    """What may be sent at most from each rank to each: of records, and of rows."""
    owner = made.summaries.rows["owner"]
    records = np.bincount(owner, minlength=world) * (100 + 8 * NUM_PARTS)
    rows = np.zeros((world, world), np.int64)
    for number, row in enumerate(made.tokens):
        source, target = int(owner[number]), int(rank_of[number])
        if source != target:
            num_bits, runs = row.length, len(row.versions)
            rows[source, target] += 17 + 4 * (num_bits + row.num_trained) + -(-num_bits // 8) + 12 * runs
    # Of each pair the number of rows, and the last byte of the mask.
    return records, rows + np.where(rows > 0, 8, 0)


def threads(world: int, num_tokens: int) -> None:
    """Count what 64 ranks send, in one process."""
    made = rollout(num_tokens, world)
    total = int(made.summaries.rows["length"].sum())
    started = time.perf_counter()
    results, shared = on_counting_ranks(world, lambda comm: steps(comm, made, lambda _, call: call()))
    took_s = time.perf_counter() - started
    for result in results:
        if isinstance(result, BaseException):
            raise result
    rank_of = results[0][0]
    assert all((own == rank_of).all() for own, _ in results)
    assert sorted(n for _, mine in results for n in mine) == list(range(len(made.tokens)))
    records, rows = expected_bytes(made, rank_of, world)
    sent, swapped = shared.sent["gather_tensors"], shared.sent["swap_tensors"]
    assert (sent <= records[:, None]).all() and (swapped <= rows).all()
    assert (swapped[rows > 0] > 0.99 * rows[rows > 0]).all()
    lengths = made.summaries.rows["length"]
    loads = np.bincount(rank_of, weights=lengths, minlength=world)
    before = np.bincount(made.summaries.rows["owner"], weights=lengths, minlength=world)
    moved = rank_of != made.summaries.rows["owner"]
    write(
        f"\n{world} ranks in one process, {total:,} tokens in {len(lengths):,} rows, {took_s:.1f} s for all\n"
        f"  records: {sent.sum(1).max() / (world - 1) / _MB:.3f} MB at most from a rank to each other one, "
        f"{sent.sum(0).max() / _MB:.2f} MB at most into one rank; {sent.sum(0).max() / len(lengths):.1f} "
        "bytes a row\n"
        f"  rows: {moved.mean():.0%} of them move, {swapped.sum() / _MB:.0f} MB in all, at most "
        f"{swapped.sum(1).max() / _MB:.1f} MB out of a rank and {swapped.sum(0).max() / _MB:.1f} MB into "
        f"one; {swapped.sum() / lengths[moved].sum():.1f} bytes a token\n"
        f"  tokens of the slowest rank: {loads.max() / loads.mean():.3f} of the mean, "
        f"{before.max() / before.mean():.3f} with every row at its owner\n"
        f"  sums of the quantile: {shared.sent['sum_tensor'].max() / 1e3:.0f} kB from a rank to each\n"
        f"  other: {shared.sent['gather_json'].max()} bytes from a rank to each\n"
    )


def processes(world: int, num_tokens: int, part: float) -> None:
    """Run gloo processes and print what they measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder]
        command += ["--tokens", str(num_tokens), "--json", str(part)]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        place |= {"OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(world)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"exit codes {codes}")
        found = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(world)]
    write(f"{world} gloo processes, {found[0]['tokens']:,} tokens in {found[0]['rows']:,} rows\n")
    write(f"  {'':<42}{'MB into a rank':>16}{'seconds':>9}{'MB of memory':>14}\n")
    for name in found[0]["measured"]:
        each = [of_rank["measured"][name] for of_rank in found]
        mb, seconds, memory = (max(column) for column in zip(*each, strict=True))
        write(f"  {name:<42}{mb:>16.2f}{seconds:>9.2f}{memory:>14.0f}\n")


def one_process(folder: Path, num_tokens: int, part: float) -> None:
    """One of the gloo processes: measure each step, then the JSON of a part of the rollout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = GroupComm()
    made = rollout(num_tokens * comm.world, comm.world)
    measured: dict[str, tuple[float, float, float]] = {}
    received = Received(comm)

    def measure(name: str, call: Callable[[], Any]) -> Any:
        dist.barrier()
        before_bytes, before = received.num_bytes, memory_now()
        forget_peak()
        started = time.perf_counter()
        result = call()
        took_s = time.perf_counter() - started
        mb = (received.num_bytes - before_bytes) / _MB
        measured[name] = (mb, took_s, (memory_peak() - before) / _MB)
        return result

    rank_of, _ = steps(received, made, measure)
    records, rows = expected_bytes(made, rank_of, comm.world)
    others = np.arange(comm.world) != comm.rank
    assert received.by_call["gather_tensors"] <= records[others].sum()
    assert received.by_call["swap_tensors"] <= rows[:, comm.rank].sum()
    own = np.flatnonzero(made.summaries.rows["owner"] == comm.rank)
    some = [as_json(made, number) for number in own[: max(1, int(len(own) * part))].tolist()]
    measure(f"as JSON to every rank, {part:.0%} of the rows", lambda: received.gather_json(some))
    told = {
        "tokens": int(made.summaries.rows["length"].sum()),
        "rows": len(made.tokens),
        "measured": measured,
    }
    (folder / str(comm.rank)).write_text(json.dumps(told))
    dist.destroy_process_group()


class Received(GroupComm):
    """Counts what arrives from other ranks."""

    def __init__(self, comm: GroupComm) -> None:
        super().__init__(comm.activity)
        self.by_call: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.by_call.values())

    def _count(self, name: str, sizes: Sequence[int]) -> None:
        others = sum(size for rank, size in enumerate(sizes) if rank != self.rank)
        self.by_call[name] = self.by_call.get(name, 0) + others

    def gather_tensors(self, own: torch.Tensor) -> list[torch.Tensor]:
        found = super().gather_tensors(own)
        self._count("gather_tensors", [tensor.nbytes for tensor in found])
        return found

    def swap_tensors(self, to_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = super().swap_tensors(to_rank)
        self._count("swap_tensors", [tensor.nbytes for tensor in found])
        return found

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count("sum_tensor", [tensor.nbytes] * self.world)
        return super().sum_tensor(tensor)

    def gather_json(self, value: Any) -> list[Any]:
        found = super().gather_json(value)
        # Each is padded to the longest.
        longest = max(super().gather_json(len(json.dumps(value))))
        self._count("gather_json", [longest] * self.world)
        return found


def as_json(made: MadeRollout, number: int) -> dict[str, Any]:
    """A row in the form of a rollout file."""
    row, episode = made.tokens[number], int(made.summaries.rows["episode"][number])
    return {
        "group": episode // SIBLINGS,
        "sibling": episode % SIBLINGS,
        "prompt_ids": row.prompt_ids.tolist(),
        "completion_ids": row.completion_ids.tolist(),
        "trained_mask": row.is_trained[row.prompt_length :].astype(int).tolist(),
        "sampler_logprobs": row.logprobs.tolist(),
        "versions": [version for version, count in row.versions for _ in range(count)],
    }


def memory_now() -> int:
    """Bytes of this process that lie in memory."""
    return _status("VmRSS")


def memory_peak() -> int:
    """The most of them since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Begin a new peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def write(text: str) -> None:
    """Print a part of the tables at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
