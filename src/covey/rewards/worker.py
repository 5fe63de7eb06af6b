"""The process that runs users' reward functions: `python -m covey.rewards.worker`, started by a pool.

A request is one JSON line on standard input, its reply one JSON line on standard output; each request also
has its time limit, `limit_s`:

    {"do": "open", "path": […], "plugins": ["p.py"], "options": {…}}
        {"orms": ["name"], "faults": [{"reward": "p.py", "kind": "import", "words": …, …}]}
    {"do": "load", "target": {…}}
        {"wants": {…}, "is_orm": false, "is_async": false}, or {"fault": {"kind": "missing", …}}
    {"do": "call", "reward": 0, "count": 8, "state": {…}, "arguments": {…}}
        a `covey.rewards.callee.Reply`

What the functions print goes to standard error, and nothing of theirs reads the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from covey.rewards.callee import Callee, packed_reply
from covey.rewards.loading import Loader, Unloadable
from covey.rewards.pipes import Pipes
from covey.rewards.protocol import TrainerState, packed_fault
from covey.rewards.targets import Target


class Worker:
    """Answers requests; the functions it has loaded are numbered in the order of their loading."""

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._callees: list[Callee] = []

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        match request["do"]:
            case "open":
                return self._open(request)
            case "load":
                return self._load(Target(**request["target"]))
            case _:
                callee = self._callees[request["reward"]]
                state = TrainerState(**request["state"])
                return packed_reply(callee.call(request["arguments"], request["count"], state))

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._loader = Loader(request["path"], request["options"])
        self._loader.open()
        faults = []
        for file in request["plugins"]:
            try:
                self._loader.run_plugin(file)
            except Unloadable as fault:
                faults.append(packed_fault(fault.of(file)))
        return {"orms": sorted(self._loader.orms()), "faults": faults}

    def _load(self, target: Target) -> dict[str, Any]:
        assert self._loader is not None
        try:
            callee, is_orm = self._loader.load(target)
        except Unloadable as fault:
            return {"fault": packed_fault(fault.of(target.entry))}
        self._callees.append(callee)
        return {"wants": asdict(callee.wants), "is_orm": is_orm, "is_async": callee.is_async}


def main() -> None:
    """Answer requests until the parent closes the pipe or is gone."""
    pipes, worker = Pipes.take(), Worker()
    for request in pipes.requests():
        pipes.answer(request, worker.answer)


if __name__ == "__main__":
    main()
