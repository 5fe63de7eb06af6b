"""From the entries of `tools` to what runs them: worker processes, or this one for functions of a program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from covey.environments.calls import Call, Loop, Outcome, Pending
from covey.environments.protocol import Schema, ToolFault, ToolHost
from covey.environments.schema import BadArguments, Unusable, schema_of
from covey.environments.tool import Limits, Tool, failed, result_of
from covey.environments.tool_pool import ToolPool, repeated_names
from covey.rewards.targets import callable_name, target_of, target_of_callable
from covey.texts import tr
from covey.types import CallFailure, ToolCall, ToolResult

Entry = str | Callable[..., object]


class LiveTools:
    """Calls functions of this program that no worker can import, sync ones in a thread a call, async ones on
    one loop. A call that is late is left alone: nothing can end it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tools: dict[str, Tool] = {}
        self._schemas: dict[str, Schema] = {}
        self._pending: Pending[ToolResult] = Pending()
        self._loop = Loop()

    @property
    def schemas(self) -> Mapping[str, Schema]:
        """The tools by name."""
        return self._schemas

    def add(self, function: Callable[..., object]) -> str | ToolFault:
        """Take in a function, whose name is returned."""
        try:
            schema = schema_of(function)
        except Unusable as error:
            return replace(error.fault, entry=callable_name(function))
        tool = Tool.of(function)
        self._tools.setdefault(tool.name, tool)
        self._schemas.setdefault(tool.name, schema)
        return tool.name

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        """Start a call."""
        tool = self._tools[call.name]
        ending = failed(call.name, CallFailure.ENDED, "it was not finished, because the run is ending")
        tell = self._pending.add(done, ending)
        try:
            function = partial(tool.function, **tool.signature.fit(call.arguments))
        except BadArguments as error:
            tell(failed(call.name, CallFailure.ARGUMENTS, str(error)))
            return

        def ended(outcome: Outcome) -> None:
            tell(result_of(call.name, outcome, self._limits.max_result_chars))

        begun = Call(self._limits.timeout_s, ended, self._loop)
        threading.Thread(target=begun.run, args=(function,), daemon=True).start()

    def close(self) -> None:
        """Answer the calls that run."""
        self._pending.close()


class JoinedTools:
    """Joins tools of several hosts; `hosts` has the host of each tool, in the order of the entries."""

    def __init__(self, hosts: Mapping[str, ToolHost], all_hosts: Sequence[ToolHost]) -> None:
        self._hosts = hosts
        self._all_hosts = all_hosts

    @property
    def schemas(self) -> Mapping[str, Schema]:
        """The tools by name, in the order in which they were given."""
        return {name: host.schemas[name] for name, host in self._hosts.items()}

    def call(self, call: ToolCall, done: Callable[[ToolResult], None]) -> None:
        """Start a call."""
        self._hosts[call.name].call(call, done)

    def close(self) -> None:
        """End all processes."""
        for host in self._all_hosts:
            host.close()


def start_tools(
    entries: Sequence[Entry],
    *,
    workers: int,
    timeout_s: float,
    memory_gb: float | None,
    max_result_chars: int,
    load_limit_s: float = 60.0,
) -> tuple[ToolHost, list[ToolFault]]:
    """Return what runs these functions, and all that is wrong with them; with a fault, the host can only be
    closed. Entries are `FILE.py:name`, `package.module:name`, or Python callables."""
    limits = Limits(timeout_s=timeout_s, max_result_chars=max_result_chars)
    pool, live = ToolPool.of(workers, limits, memory_gb, load_limit_s), LiveTools(limits)
    hosts: list[tuple[str, str, ToolHost]] = []
    faults: list[ToolFault] = []
    for entry in entries:
        label = entry if isinstance(entry, str) else callable_name(entry)
        target = target_of(entry) if isinstance(entry, str) else target_of_callable(entry)
        host: ToolHost = pool
        if target is None:
            words = tr("{entry} is neither FILE.py:name nor package.module:name", entry=label)
            named: str | ToolFault = ToolFault(entry=label, kind="missing", words=words)
        elif isinstance(target, str):
            assert not isinstance(entry, str)
            named, host = live.add(entry), live
        else:
            named = pool.load(target)
        if isinstance(named, ToolFault):
            faults.append(named)
        else:
            hosts.append((label, named, host))
    faults += repeated_names([label for label, _, _ in hosts], [name for _, name, _ in hosts])
    return JoinedTools({name: host for _, name, host in hosts}, (pool, live)), faults
