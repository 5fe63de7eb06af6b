"""Two machines on one: network namespaces with a cable between them, each with a host name of its own.

They share the disk, as the machines of a cluster share a file system. Whoever may not make namespaces cannot
rehearse a run over machines: the tests that need them are skipped then, and say so.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.plan.launchers import RANK_NAMES
from support.needs import need

# CLONE_NEWNET of sched.h.
_NETWORK = 0x40000000


@dataclass(frozen=True)
class Machine:
    """A network namespace, the name of its host, its address, and its end of the cable."""

    namespace: str
    host: str
    address: str
    device: str

    def link(self, state: str) -> None:
        """Set its end of the cable `up` or `down`."""
        _ip("-n", self.namespace, "link", "set", self.device, state)

    def answers(self, other: Machine, *, does: bool) -> None:
        """Whether what it sends to another machine arrives; what does not is lost without a word."""
        _ip("-n", self.namespace, "route", "del" if does else "add", "blackhole", other.address)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and those that it starts, use the network of this machine."""
        with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{self.namespace}") as other:
            _enter(other.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def start(
        self, words: Sequence[str], folder: Path, said: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command there; what it says goes to a file."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "sh", "-c"]
        inside += ['hostname "$0" && exec "$@"', self.host, *words]
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with said.open("wb") as file:
            return subprocess.Popen(
                inside,
                cwd=folder,
                env={**plain_environment(), **own, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other; they are gone afterwards."""
    need("two machines")
    names = [f"covey-{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"cv{os.getpid()}{letter}"[-15:] for letter in "ab"]
    found = tuple(
        Machine(name, f"node{n}", f"10.231.7.{n}", end)
        for n, (name, end) in enumerate(zip(names, ends, strict=True), start=1)
    )
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(*f"link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}".split())
        for machine in found:
            _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            machine.link("up")
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
        yield found[0], found[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def wait_for(
    started: Sequence[subprocess.Popen[bytes]], said: Sequence[Path], limit_s: float
) -> tuple[list[int], list[str], list[float]]:
    """The exit code of each, what it said, and when it ended."""
    end = time.monotonic() + limit_s
    ended = [0.0] * len(started)
    try:
        while any(ended_at == 0.0 for ended_at in ended):
            for number, process in enumerate(started):
                if ended[number] == 0.0 and process.poll() is not None:
                    ended[number] = time.monotonic()
            if time.monotonic() > end:
                texts = "\n".join(path.read_text(errors="replace")[-3000:] for path in said)
                pytest.fail(f"not ended after {limit_s:.0f} s: {ended}\n{texts}")
            time.sleep(0.05)
    finally:
        for process in started:
            # torchrun gives each rank a session of its own, and a rank ends with it.
            process.kill()
            process.wait()
    return [p.returncode for p in started], [path.read_text(errors="replace") for path in said], ended


def torchrun(number: int, first: Machine, *words: str) -> list[str]:
    """The command of an agent that starts one rank, on the machine of this number of two."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"),
        *("--node_rank", str(number), "--master_addr", first.address, "--master_port", "29517", *words),
    ]


def plain_environment() -> dict[str, str]:
    """The environment without a word of a launcher or of the tests' own processes."""
    left_out = (*RANK_NAMES, "NNODES")
    return {n: v for n, v in os.environ.items() if n not in left_out and not n.startswith("COVEY_")}


def _enter(namespace: int) -> None:
    """`setns`, which Python has from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _NETWORK):
        pytest.fail(f"setns: {os.strerror(ctypes.get_errno())}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"ip {' '.join(words)}: {done.stderr.strip()}")
