"""How the ranks of a run find each other: through the store that torch keeps at the address of rank 0.

Where torchrun has started them its agent keeps the store, through every restart; else rank 0 does. So a
store may hold what an earlier start left, and a count of restarts cannot tell the starts apart, since the
agent of each machine counts its own. Therefore each rank says hello with a random number. Rank 0 writes the
numbers of all ranks into an invitation with a random name, and each rank that finds its own number there
answers. Once all have answered they begin, and use the store under that name.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from covey.texts import joined, tr

_POLL_S = 0.05
_PREFIX = "covey"


class NotThere(Exception):
    """Ranks that have not come; the words name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The ranks of a run that have found each other: the store that they share, under a prefix that only they
    use, and the host of each rank, with a name for its machine that is no other's."""

    name: str
    store: dist.Store
    hosts: Sequence[str]
    machines: Sequence[str]
    # Of rank 0, where no agent keeps the store: it lives as long as this object.
    server: dist.TCPStore | None


def meet(
    environment: Mapping[str, str],
    limit_s: float,
    *,
    host: str = "",
    machine: str = "",
    goes_on: Callable[[], bool] = lambda: True,
) -> Met:
    """Find the other ranks. Collective.

    NotThere names those that do not come within the limit, and OSError or RuntimeError says why the store
    cannot be reached. `goes_on` is asked while it waits; where it says no, NotThere is raised.
    """
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    keeps_store = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    server = _store(environment, limit_s, is_master=True) if keeps_store else None
    client = _store(environment, limit_s)
    table = _Table(dist.PrefixStore(_PREFIX, client), rank, world, time.monotonic() + limit_s, goes_on)
    own = {"number": secrets.token_hex(8), "host": host, "machine": machine}
    name, hellos = table.invite(own) if rank == 0 else table.accept(own)
    return Met(
        name=name,
        store=dist.PrefixStore(f"{_PREFIX}/{name}", client),
        hosts=[hello["host"] for hello in hellos],
        machines=[hello["machine"] for hello in hellos],
        server=server,
    )


def store_of_group(met: Met, environment: Mapping[str, str], limit_s: float) -> dist.Store:
    """Return a store for the process group over a connection of its own: while the group waits in it, others
    use the first one."""
    return dist.PrefixStore(f"{_PREFIX}/{met.name}/group", _store(environment, limit_s))


def _store(environment: Mapping[str, str], limit_s: float, *, is_master: bool = False) -> dist.TCPStore:
    return dist.TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=is_master,
        wait_for_workers=False,
        multi_tenant=is_master,
        timeout=timedelta(seconds=limit_s),
    )


def route_to_others(environment: Mapping[str, str]) -> str | None:
    """Return the network interface by which rank 0 is reached, where there are several machines; None where
    torch may choose, or nobody can say.

    gloo takes the address that this machine's name stands for, which on many is one of the machine alone.
    """
    if environment.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only says from which address it would.
            probe.connect((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(256, b"\0")
                try:
                    # SIOCGIFADDR: the address of an interface.
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)
                except OSError:
                    continue
                if answer[20:24] == own:
                    return name
    except (ImportError, OSError, AttributeError):
        return None
    return None


@dataclass(frozen=True, slots=True)
class _Table:
    """What the ranks write down for each other until they begin."""

    store: dist.Store
    rank: int
    world: int
    end: float
    goes_on: Callable[[], bool]

    def invite(self, own: Mapping[str, str]) -> tuple[str, list[Any]]:
        """Rank 0: invite whoever says hello, again for each new hello, until all of one invitation have
        answered."""
        self._say_hello(own)
        names = [f"hello/{rank}" for rank in range(self.world)]
        invited: list[Any] = []
        name = ""
        while True:
            if self.store.check(names):
                hellos = [json.loads(text) for text in self.store.multi_get(names)]
                if hellos != invited:
                    invited, name = hellos, secrets.token_hex(8)
                    self.store.set("invitation", json.dumps([name, hellos]))
                answers = [f"{name}/{rank}" for rank in range(1, self.world)]
                if self.store.check(answers):
                    self.store.set(f"{name}/begin", "")
                    return name, hellos
            self._wait(names)

    def accept(self, own: Mapping[str, str]) -> tuple[str, list[Any]]:
        """Another rank: answer each invitation that knows its number, until one of them begins."""
        self._say_hello(own)
        while True:
            if self.store.check(["invitation"]):
                name, hellos = json.loads(self.store.get("invitation"))
                if len(hellos) == self.world and hellos[self.rank] == own:
                    self.store.set(f"{name}/{self.rank}", "")
                    if self.store.check([f"{name}/begin"]):
                        return str(name), hellos
            self._wait(["hello/0", "invitation"])

    def _say_hello(self, own: Mapping[str, str]) -> None:
        self.store.set(f"hello/{self.rank}", json.dumps(own))

    def _wait(self, names: Sequence[str]) -> None:
        if self.goes_on() and time.monotonic() < self.end:
            time.sleep(_POLL_S)
            return
        there = [name for name in names if self.store.check([name])]
        silent = [name.removeprefix("hello/") for name in names if name not in there]
        ranks = [name for name in silent if name.isdigit()]
        raise NotThere(
            tr("rank {ranks} did not arrive", ranks=joined(", ", ranks))
            if ranks
            else tr("the ranks did not all answer")
        )
