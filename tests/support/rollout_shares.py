"""Rollouts as ranks have them for the exchange: made-up rows, the share of each rank, ranks that are threads
of one process and count what they send."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from covey.activity import Activity
from covey.rollout.exchange import SUMMARY, StepRewards, Summaries
from covey.types import KeptSets, SequenceSummary, TokenSequence

NUM_PARTS = 3


@dataclass(frozen=True)
class MadeRollout:
    """Rows of a rollout in the order of episodes: their records, with owners, and their tokens."""

    summaries: Summaries
    tokens: tuple[TokenSequence, ...]
    siblings: int

    def share(self, rank: int, order: Sequence[int] = ()) -> Summaries:
        """The records of what a rank owns, or of these rows."""
        all_rows = self.summaries.rows
        own = list(order) or np.flatnonzero(all_rows["owner"] == rank).tolist()
        numbers = {old: new for new, old in enumerate(own)}
        rows = all_rows[own]
        # Who owns a row is what the exchange finds out.
        rows["owner"] = -1
        return Summaries(
            rows=rows,
            parts_RK=self.summaries.parts_RK[own],
            statuses_RK=self.summaries.statuses_RK[own],
            steps={numbers[n]: s for n, s in self.summaries.steps.items() if n in numbers},
        )

    @property
    def known(self) -> list[SequenceSummary]:
        """What every rank knows of the rows."""
        return [self.summaries.known(number) for number in range(len(self.tokens))]

    @property
    def owner_R(self) -> NDArray[np.int64]:
        """The rank that has each row."""
        return self.summaries.rows["owner"].astype(np.int64)

    @property
    def group_R(self) -> NDArray[np.int64]:
        """The number of each row's group."""
        return self.summaries.rows["episode"].astype(np.int64) // self.siblings

    def held(self, rank: int) -> Own:
        """The tokens that a rank owns; to read others fails."""
        return Own(self, rank)


class Own(Mapping[int, TokenSequence]):
    """The rows of a rollout as one rank holds them: its own alone. Counts how often each is read."""

    def __init__(self, rollout: MadeRollout, rank: int) -> None:
        self.rollout, self.rank = rollout, rank
        self.num_read: dict[int, int] = {}

    def __getitem__(self, number: int) -> TokenSequence:
        owner, row = self.rollout.summaries.rows[number]["owner"], self.rollout.tokens[number]
        if owner != self.rank or not row.length:
            raise AssertionError(f"rank {self.rank} opens row {number}, which is rank {owner}'s")
        self.num_read[number] = self.num_read.get(number, 0) + 1
        return row

    def __contains__(self, number: object) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a rank looks through all rows")

    def __len__(self) -> int:
        return len(self.rollout.tokens)


def made_rollout(
    num_groups: int,
    siblings: int,
    owners: Callable[[int], int],
    *,
    mean_length: int = 30,
    several: float = 0.0,
    failed: float = 0.0,
    steps: float = 0.0,
    vocab: int = 0,
    seed: int = 0,
) -> MadeRollout:
    """A rollout whose lengths vary like those of a model. `owners` gives the rank of an episode; `several`,
    `failed` and `steps` are the shares of episodes with two or three sequences, without one, and with step
    rewards. With a `vocab` tokens have kept sets, most of them small, some of half the vocabulary."""
    draw = np.random.default_rng(seed)
    records, tokens, parts, step_rewards = [], [], [], {}
    for episode in range(num_groups * siblings):
        group = episode // siblings
        num_rows = int(draw.integers(2, 4)) if draw.random() < several else 1
        is_failed = draw.random() < failed
        for row in range(num_rows):
            made = _no_tokens() if is_failed else _tokens(draw, group, mean_length)
            if vocab and made.length:
                made = _with_sets(draw, made, vocab)
            record = np.zeros((), SUMMARY)
            record["episode"], record["row"], record["owner"] = episode, row, owners(episode)
            for name in SequenceSummary.__dataclass_fields__:
                if name not in ("num_unknown", "is_repetitive"):
                    record[name] = getattr(made, name)
            record["num_unknown"], record["is_repetitive"] = episode % 3, episode % 5 == 0
            record["outcome"], record["parsed_by"] = is_failed, episode % 3 - 1
            record["has_steps"] = draw.random() < steps
            if record["has_steps"]:
                step_rewards[len(records)] = _steps(draw)
            records.append(record)
            tokens.append(made)
            parts.append(draw.normal(size=NUM_PARTS))
    parts_RK = np.array(parts).reshape(len(records), NUM_PARTS)
    parts_RK[draw.random(parts_RK.shape) < 0.2] = np.nan
    statuses = draw.integers(0, 4, parts_RK.shape).astype(np.int8)
    rows = np.array(records, SUMMARY)
    summaries = Summaries(rows=rows, parts_RK=parts_RK, statuses_RK=statuses, steps=step_rewards)
    return MadeRollout(summaries, tuple(tokens), siblings)


def _tokens(draw: np.random.Generator, group: int, mean_length: int) -> TokenSequence:
    prompt = 5 + group % 4
    length = prompt + 1 + int(mean_length * np.exp(draw.normal(-0.2, 0.6)))
    is_trained = draw.random(length) < 0.9
    is_trained[:prompt], is_trained[-1] = False, True
    num_trained = int(is_trained.sum())
    first = num_trained // 2 if draw.random() < 0.3 else 0
    runs = [(7, num_trained)] if first == 0 else [(6, first), (7, num_trained - first)]
    return TokenSequence.behind(
        prompt,
        token_ids=draw.integers(0, 2**31 - 1, length, dtype=np.int32),
        is_trained=is_trained,
        logprobs=draw.normal(size=num_trained).astype(np.float32),
        versions=tuple(runs),
    )


def _with_sets(draw: np.random.Generator, row: TokenSequence, vocab: int) -> TokenSequence:
    row = replace(row, token_ids=row.token_ids % vocab)
    sizes = np.where(draw.random(row.num_trained) < 0.9, 3, vocab // 2)
    sets = [
        {token, *draw.integers(0, vocab, size).tolist()}
        for token, size in zip(row.trained_ids.tolist(), sizes.tolist(), strict=True)
    ]
    return replace(row, kept=KeptSets.of(sets, vocab))


def _no_tokens() -> TokenSequence:
    return TokenSequence.behind(0, token_ids=(), is_trained=(), logprobs=(), versions=())


def _steps(draw: np.random.Generator) -> StepRewards:
    num = int(draw.integers(0, 4))
    ends = np.sort(draw.integers(1, 9, num)).astype(np.int32)
    return StepRewards(ends=ends, values=(draw.normal(size=num), None, np.zeros(0))[:NUM_PARTS])


def same_summaries(ours: Summaries, theirs: Summaries) -> bool:
    """Whether two are the same to the bit; NaN is itself."""
    columns = ((ours.rows, theirs.rows), (ours.parts_RK, theirs.parts_RK))
    steps = [
        {
            n: (s.ends.tobytes(), *(None if v is None else v.tobytes() for v in s.values))
            for n, s in of.items()
        }
        for of in (ours.steps, theirs.steps)
    ]
    return (
        all(a.tobytes() == b.tobytes() for a, b in (*columns, (ours.statuses_RK, theirs.statuses_RK)))
        and steps[0] == steps[1]
        and ours.words == theirs.words
    )


class CountingComm:
    """One of several ranks that are threads; counts the bytes that each rank sends to each other one."""

    first_rank = 0

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.world, self.activity = rank, shared.world, Activity()
        self._shared = shared

    def begin(self, phase: str, *, num_micro: int = 0, num_tokens: int = 0) -> None:
        self.activity.enter(phase)

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._all("sum", list(values), 8 * len(values)), strict=True)]

    def max(self, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self._all("max", list(values), 8 * len(values)), strict=True)]

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all("sum_tensor", tensor, tensor.nbytes)).sum(0)

    def gather_json(self, value: Any) -> list[Any]:
        text = json.dumps(value)
        return [json.loads(told) for told in self._all("gather_json", text, len(text))]

    def gather_tensors(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._all("gather_tensors", own, own.nbytes)]

    def swap_tensors(self, to_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert all(tensor.dtype is torch.uint8 for tensor in to_rank)
        sizes = [tensor.nbytes for tensor in to_rank]
        return [given[self.rank].clone() for given in self._all("swap_tensors", list(to_rank), sizes)]

    def _all(self, name: str, value: Any, sizes: int | list[int]) -> list[Any]:
        sent = self._shared.sent.setdefault(name, np.zeros((self.world, self.world), np.int64))
        sent[self.rank] += np.full(self.world, sizes) * (np.arange(self.world) != self.rank)
        self._shared.slots[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.slots)
        self._shared.barrier.wait()
        return values


class Shared:
    """What the threads share: `sent` has the bytes from each rank to each, by collective."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.slots: list[Any] = [None] * world
        self.barrier = threading.Barrier(world, timeout=120)
        self.sent: dict[str, NDArray[np.int64]] = {}


def on_counting_ranks(world: int, work: Callable[[CountingComm], Any]) -> tuple[list[Any], Shared]:
    """What `work` returns on each rank, or the exception that it raises there; and what was sent."""
    shared = Shared(world)
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(CountingComm(rank, shared))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, shared
