"""The rewards of a run, wherever their functions are: called side by side, gathered row by row."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os.path import abspath, expanduser
from types import TracebackType
from typing import Any

from covey.config.names import nearest
from covey.rewards.apart import ModelEntry, judge_reward, model_reward
from covey.rewards.builtin import JUDGE
from covey.rewards.own_worker import OwnWorker
from covey.rewards.pool import Pool, PoolPlan
from covey.rewards.protocol import (
    Environments,
    Form,
    Judged,
    JudgedRow,
    Judgement,
    Reward,
    RowWord,
    Scored,
    TrainerState,
)
from covey.rewards.resolve import Entry, ResolvedReward, names_of, resolve_reward
from covey.rewards.steps import STEP_SEPARATOR
from covey.texts import joined, plural, tr
from covey.types import Metric, RewardFault, ScorePart

_LOAD_LIMIT_S = 60.0


class RewardSet:
    """Rewards and the workers they run in; close it, or use it as a context manager.

    `faults` says what is wrong with entries and plugin files: a set that has any scores nothing. `notes` are
    sentences for the user. `tasks` names the rewards that score the rows of a task; a task that is not among
    them is scored by all. `beside` are those that read the environments of episodes.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        pool: Pool | None = None,
        apart: Mapping[str, OwnWorker] | None = None,
        faults: Sequence[RewardFault] = (),
        notes: Iterable[str] = (),
        tasks: Mapping[str, Collection[str]] | None = None,
        beside: Collection[str] = (),
    ) -> None:
        self._rewards = tuple(rewards)
        self._pool = pool
        self._apart = dict(apart or {})
        self.names = tuple(r.name for r in rewards)
        self.faults = tuple(faults)
        self.notes = tuple(notes)
        self.tasks = dict(tasks or {})
        self.beside = tuple(beside)

    @classmethod
    def start(
        cls,
        entries: Sequence[Entry | ModelEntry],
        *,
        plugins: Sequence[str] = (),
        workers: int = 1,
        timeout_s: float = 60.0,
        completion_form: Form | None = None,
        prompt_is_messages: bool = False,
        step_separator: str = STEP_SEPARATOR,
        options: Mapping[str, Any] | None = None,
        load_limit_s: float = _LOAD_LIMIT_S,
        environments: Environments | None = None,
    ) -> RewardSet:
        """Find every entry's function, in a worker where it is a user's, or where the `environments` are that
        it reads.

        `options` are the run's, for ms-swift classes whose constructor takes `args`; a file that takes longer
        than `load_limit_s` to import is a fault.
        """
        _refuse_in_a_worker()
        plan = PoolPlan(
            plugins=tuple(abspath(expanduser(p)) for p in plugins),
            options=dict(options or {}),
            workers=workers,
            timeout_s=timeout_s,
            load_limit_s=load_limit_s,
        )
        pool = Pool(plan)
        try:
            orms, faults = pool.run_plugins() if plugins else ((), ())
            results = [_resolve(e, pool, orms, environments) for e in entries] if not faults else []
        except BaseException:
            pool.close()
            raise
        resolved = [f for f in results if isinstance(f, ResolvedReward)]
        names = names_of([(f.plain, f.source) for f in resolved])
        rewards = [
            f.reward(
                name, completion_form, prompt_is_messages=prompt_is_messages, step_separator=step_separator
            )
            for f, name in zip(resolved, names, strict=True)
        ]
        return cls(
            rewards,
            pool=pool,
            apart={n: f.worker for n, f in zip(names, resolved, strict=True) if f.worker is not None},
            faults=(*faults, *(f for f in results if isinstance(f, RewardFault)), *_twice(entries)),
            notes=dict.fromkeys(f.note for f in resolved if f.note),
            beside=[name for name, f in zip(names, resolved, strict=True) if f.is_beside],
        )

    def of_tasks(self, tasks: Mapping[str, Collection[str]]) -> RewardSet:
        """The same rewards and workers, each called on the rows of its tasks alone; names of metrics by
        task."""
        return RewardSet(
            self._rewards,
            pool=self._pool,
            apart=self._apart,
            faults=self.faults,
            notes=self.notes,
            tasks=tasks,
            beside=self.beside,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers of the workers that run now."""
        own = [pid for worker in self._apart.values() for pid in worker.pids]
        return (*(self._pool.pids if self._pool is not None else ()), *own)

    @property
    def apart(self) -> tuple[str, ...]:
        """The names of those that have a worker of their own: models, and the judge."""
        return tuple(self._apart)

    def without(self, names: Sequence[str]) -> RewardSet:
        """The others, in the same processes; closing it ends none."""
        return RewardSet([r for r in self._rewards if r.name not in names], tasks=self.tasks)

    def missing(self, columns: Sequence[str]) -> list[RewardFault]:
        """A fault for every reward that demands what neither covey nor these columns of the data give."""
        return [
            RewardFault(reward=r.name, kind="signature", words=_lack(lacking, columns), lacking=lacking)
            for r in self._rewards
            if (lacking := r.lacks(columns))
        ]

    def named(self, columns: Sequence[str]) -> list[tuple[str, ...]]:
        """Those of these columns that each reward names among its arguments."""
        return [r.named(columns) for r in self._rewards]

    def score(self, rows: Sequence[Scored], state: TrainerState) -> Judged:
        """Every reward's result for every row, in the order of the rows."""
        return self.begin(rows, state)()

    def begin(self, rows: Sequence[Scored], state: TrainerState) -> Callable[[], Judged]:
        """Have the workers start; the function that comes back waits for them."""
        assert not self.faults, self.faults
        asked = [[n for n, row in enumerate(rows) if self._asks(r, row)] for r in self._rewards]
        begun = {
            i: r.begin([rows[n] for n in numbers], state)
            for i, (r, numbers) in enumerate(zip(self._rewards, asked, strict=True))
            if numbers
        }

        def judged() -> Judged:
            # Those of this process work while the workers do.
            order = sorted(begun, key=lambda i: not self._rewards[i].is_here)
            done = {i: begun[i]() for i in order}
            judgements = [
                _spread(done.get(i), reward.name, asked[i], len(rows))
                for i, reward in enumerate(self._rewards)
            ]
            judged_rows = tuple(self._row(i, judgements) for i in range(len(rows)))
            return Judged(rows=judged_rows, metrics=_metrics(judgements))

        return judged

    def close(self) -> None:
        """End the workers."""
        for closing in (self._pool, *self._apart.values()):
            if closing is not None:
                closing.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asks(self, reward: Reward, row: Scored) -> bool:
        """Whether a reward scores a row."""
        return reward.name in self.tasks.get(row.prompt.task, self.names)

    def _row(self, i: int, judgements: Sequence[Judgement]) -> JudgedRow:
        extras: dict[str, Any] = {}
        for name, judgement in zip(self.names, judgements, strict=True):
            for column, value in judgement.rows[i].extras.items():
                # Two rewards may note under one name; neither is lost.
                extras[f"{name}.{column}" if column in extras else column] = value
        return JudgedRow(
            parts=tuple(j.rows[i].part for j in judgements),
            extras=extras,
            causes=tuple(j.rows[i].cause for j in judgements),
        )


def _spread(judgement: Judgement | None, name: str, asked: Sequence[int], count: int) -> Judgement:
    """A reward's results for the rows that it was asked about, as one result for each of all `count` rows."""
    if judgement is not None and len(asked) == count:
        return judgement
    words = [RowWord(part=ScorePart(name=name, value=None), extras={})] * count
    for n, word in zip(asked, judgement.rows if judgement is not None else (), strict=True):
        words[n] = word
    return Judgement(rows=tuple(words), metrics=judgement.metrics if judgement is not None else {})


def _resolve(
    entry: Entry | ModelEntry, pool: Pool, orms: Sequence[str], environments: Environments | None
) -> ResolvedReward | RewardFault:
    if isinstance(entry, ModelEntry):
        return model_reward(entry, pool.plan.timeout_s)
    if entry == JUDGE and entry not in orms:
        return judge_reward(pool.plan.options)
    return resolve_reward(entry, pool, orms, environments)


def _metrics(judgements: Sequence[Judgement]) -> dict[str, Metric]:
    values: dict[str, list[float]] = {}
    for judgement in judgements:
        for name, noted in judgement.metrics.items():
            values.setdefault(name, []).extend(noted)
    return {name: Metric(value=sum(v) / len(v), count=len(v)) for name, v in values.items()}


def _twice(entries: Sequence[Entry | ModelEntry]) -> list[RewardFault]:
    again = [e for i, e in enumerate(entries) if e in entries[:i]]
    words = tr("is named twice; to count a reward more, give it a larger weight")
    return [
        RewardFault(reward=str(e), kind="twice", words=tr("{e} {words}", e=e, words=words), subject=str(e))
        for e in again
    ]


def _lack(lacking: Sequence[str], columns: Sequence[str]) -> str:
    near = nearest(lacking[0], list(columns))
    hint = (
        tr("the nearest is {near}", near=near)
        if near
        else tr("the columns are {columns}", columns=joined(", ", columns) or tr("none"))
    )
    arguments = joined(tr(" and "), lacking)
    return plural(
        len(lacking),
        "needs the argument {arguments}, but no column of the data has this name ({hint}), and covey does "
        "not provide it",
        "needs the arguments {arguments}, but no columns of the data have these names ({hint}), and covey "
        "does not provide them",
        arguments=arguments,
        hint=hint,
    )


def _refuse_in_a_worker() -> None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name in ("covey.rewards.worker", "covey.environments.worker"):
        raise RuntimeError(
            tr(
                "importing a file that defines a reward started a run; move the code that starts it under "
                'if __name__ == "__main__":'
            )
        )
