"""From the entries of `reward_funcs` to rewards: each is found, or a fault says why it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from covey.config.names import nearest
from covey.rewards.arguments import as_json
from covey.rewards.builtin import BUILT_IN, IN_WORKERS, JUDGE, built_in_name
from covey.rewards.callee import Callee, Wants
from covey.rewards.function_reward import Arguments, Ask, FunctionReward
from covey.rewards.loading import Unloadable, callee_of
from covey.rewards.own_worker import OwnWorker
from covey.rewards.pool import Pool, awaited
from covey.rewards.protocol import Environments, Form, TrainerState
from covey.rewards.steps import STEP_SEPARATOR
from covey.rewards.targets import Target, callable_name, target_of, target_of_callable
from covey.texts import joined, tr
from covey.types import GOLD_COLUMNS, RewardFault

Entry = str | Callable[..., Any]

# Of what a program has passed: a command has no process of its own that its functions could fill.
_IN_WORKERS = tr(
    "Functions of a file run in worker processes: lists and counters that they change, and what they send to "
    "wandb, stay there. log_extra and log_metric record values of a function."
)


# The argument of rewards that read environments.
_BESIDE = "environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedReward:
    """A function and how it is asked; `source` tells it from others called `plain` (None: it keeps that
    name), `calls` is into how many calls rows are cut, 0 for a function that works while it is waited for;
    `by_row` is whether each completion is a call of its own, with a time limit of its own; `worker` is a
    process that the reward has to itself, `arguments` what it is called with beside what it names;
    `is_beside` is whether it is called where the environments are."""

    plain: str
    source: str | None
    kind: Literal["built_in", "orm", "function"]
    wants: Wants
    ask: Ask
    calls: int
    note: str = ""
    by_row: bool = False
    worker: OwnWorker | None = None
    arguments: Arguments | None = None
    is_beside: bool = False

    def reward(
        self,
        name: str,
        form: Form | None,
        *,
        prompt_is_messages: bool = False,
        step_separator: str = STEP_SEPARATOR,
    ) -> FunctionReward:
        """The reward under this name; without a form, what TRL and ms-swift would give such a function."""
        default: Form = "messages" if prompt_is_messages and self.kind == "function" else "text"
        form = "text" if self.kind == "built_in" else form or default
        return FunctionReward(
            name,
            self.wants,
            self.ask,
            form=form,
            calls=self.calls,
            by_row=self.by_row,
            step_separator=step_separator,
            arguments=self.arguments,
        )


def resolve_reward(
    entry: Entry, pool: Pool, orms: Sequence[str], environments: Environments | None = None
) -> ResolvedReward | RewardFault:
    """What an entry stands for: a name that plugins put into `orms`, a built-in, or a function of a file or
    module. One that names the argument `environments` is called where these are."""
    found = _resolved(entry, pool, orms)
    if environments is None or isinstance(found, RewardFault) or _BESIDE not in found.wants.names:
        return found
    return _beside(entry, found, environments, pool.plan.timeout_s)


def _beside(
    entry: Entry, found: ResolvedReward, environments: Environments, limit_s: float
) -> ResolvedReward | RewardFault:
    """The same function, called with the environments of the episodes."""
    loaded = environments.load_reward(target_of(entry) if isinstance(entry, str) else entry)
    if isinstance(loaded, RewardFault):
        return loaded

    def ask(arguments: Mapping[str, Sequence[Any]], count: int, state: TrainerState) -> Any:
        given = {name: values for name, values in arguments.items() if name != _BESIDE}
        call = environments.call_reward(loaded.number, given, arguments[_BESIDE], state, limit_s)
        return partial(awaited, call)

    wants = replace(found.wants, demands=tuple(n for n in found.wants.demands if n != _BESIDE))
    return replace(found, wants=wants, ask=ask, calls=1, is_beside=True, note="")


def _resolved(entry: Entry, pool: Pool, orms: Sequence[str]) -> ResolvedReward | RewardFault:
    if not isinstance(entry, str):
        where = target_of_callable(entry)
        if isinstance(where, str):
            return _here(entry, where, pool)
        found = _in_worker(where, pool)
        return found if isinstance(found, RewardFault) else replace(found, note=_IN_WORKERS)
    if entry in orms:
        return _in_worker(Target(entry=entry, name=entry), pool)
    if built_in_name(entry) is not None:
        return built_in(entry, pool.plan.options)
    if entry in IN_WORKERS:
        return _built_in_in_worker(IN_WORKERS[entry], pool)
    target = target_of(entry)
    return _in_worker(target, pool) if target is not None else _unknown(entry, orms)


def built_in(entry: str, options: Mapping[str, Any]) -> ResolvedReward:
    """A built-in with its options of the run, in this process; another name is a KeyError, and so is an
    option that it needs and that is not there."""
    name = built_in_name(entry)
    if name is None:
        raise KeyError(entry)
    meant = BUILT_IN[name]
    demanded = Callee(meant.function).wants.demands
    given = {name: options[name] for name in meant.options if name in options or name in demanded}
    callee = Callee(partial(meant.function, **given))
    # A column never takes the place of an option, nor one of TRL's other columns that of its gold.
    hidden = {*meant.options, *GOLD_COLUMNS} - {*meant.golds}
    wants = replace(
        callee.wants,
        names=tuple(n for n in callee.wants.names if n not in hidden),
        demands=meant.golds if len(meant.golds) == 1 else (),
    )
    return ResolvedReward(
        plain=name, source=None, kind="built_in", wants=wants, ask=_ask_here(callee), calls=0
    )


def names_of(called: Sequence[tuple[str, str | None]]) -> tuple[str, ...]:
    """A name for each plain name and its source: its own, `source.name` where several share it, with a number
    where that is shared too."""
    counts = Counter(plain for plain, _ in called)
    names = [f"{source}.{plain}" if counts[plain] > 1 and source else plain for plain, source in called]
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    return tuple(n if k == 0 else f"{n}_{k + 1}" for n, k in zip(names, earlier, strict=True))


def _in_worker(target: Target, pool: Pool) -> ResolvedReward | RewardFault:
    loaded = pool.load(target)
    if isinstance(loaded, RewardFault):
        return loaded

    def ask(arguments: Mapping[str, Sequence[Any]], count: int, state: TrainerState) -> Any:
        return partial(awaited, pool.call(loaded.number, as_json(arguments), count, state))

    return ResolvedReward(
        plain=target.metric,
        source=target.source if target.module or target.file else None,
        kind="orm" if loaded.is_orm else "function",
        wants=loaded.wants,
        ask=ask,
        calls=pool.plan.workers,
    )


def _built_in_in_worker(target: Target, pool: Pool) -> ResolvedReward | RewardFault:
    resolved = _in_worker(target, pool)
    if isinstance(resolved, RewardFault):
        return resolved
    return replace(resolved, plain=target.entry, source=None, kind="built_in", by_row=True)


def _here(function: Callable[..., Any], why: str, pool: Pool) -> ResolvedReward | RewardFault:
    name = callable_name(function)
    try:
        callee, is_orm = callee_of(function, pool.plan.options)
    except Unloadable as fault:
        return fault.of(name)
    return ResolvedReward(
        plain=name,
        source=getattr(function, "__module__", None),
        kind="orm" if is_orm else "function",
        wants=callee.wants,
        ask=_ask_here(callee),
        calls=int(callee.is_async),
        note=tr("The reward {name} runs in this process, without a time limit: {why}.", name=name, why=why),
    )


def _ask_here(callee: Callee) -> Ask:
    """A sync function is called when it is waited for; an async one begins at once, beside all others."""
    if not callee.is_async:
        return lambda arguments, count, state: partial(callee.call, arguments, count, state)
    thread = ThreadPoolExecutor(1, "reward-here")
    return lambda *call: partial(awaited, thread.submit(callee.call, *call))


def _unknown(entry: str, orms: Sequence[str]) -> RewardFault:
    if entry.endswith(".py"):
        words = tr("{entry} is a file; name the function in it: {entry}:my_reward", entry=entry)
        return RewardFault(reward=entry, kind="unknown", words=words, cause="bare_file", subject=entry)
    names = sorted({*BUILT_IN, *IN_WORKERS, JUDGE, *orms})
    near = nearest(entry, names)
    hint = (
        tr("the nearest name is {near}", near=near)
        if near
        else tr("the rewards are {names}", names=joined(", ", names))
    )
    words = tr("there is no reward {entry}; {hint}", entry=entry, hint=hint)
    return RewardFault(reward=entry, kind="unknown", words=words, subject=entry, near=near or "")
