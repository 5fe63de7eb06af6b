"""The actors of a run, in a Ray that is there or in one that is started for it.

This module alone imports Ray. All that goes to an actor and comes from it is JSON as bytes; what Ray pickles
among its own processes is its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from covey.cli.listening import processes_below
from covey.cli.ray_rank import RankProcess
from covey.errors import ConfigError
from covey.plan.check_ray import too_few, unusable
from covey.plan.facts import RayFacts
from covey.types import Fix

# The least that Ray takes; nothing of a run goes through it.
_STORE_BYTES = 80 << 20
# The path of a socket has at most 107 letters, of which Ray needs 65.
_LONGEST_FOLDER = 40
_POLL_S = 0.2
_SAID_S = 10.0
_ANSWER_S = 120.0
_END_S = 10.0


class ActorGone(Exception):
    """An actor, or the machine that it was on, is not there any more."""


@dataclass(slots=True)
class Actor:
    """One actor, and the address of the machine that it is on."""

    handle: Any
    address: str

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Call a method and return its answer; ActorGone where there is nobody to answer."""
        import ray

        try:
            answer = ray.get(self._call(method, values), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            raise ActorGone(_first_line(error)) from error
        return dict(json.loads(answer))

    def tell(self, method: str, **values: Any) -> None:
        """Call a method without waiting for its answer; whoever follows the rank finds out where there is
        nobody."""
        self._call(method, values)

    def _call(self, method: str, values: Mapping[str, Any]) -> Any:
        return getattr(self.handle, method).remote(json.dumps(values).encode())


@dataclass(slots=True)
class Cluster:
    """A Ray that this process is connected to; `address` is None where it was started for this run."""

    address: str | None
    version: str
    kind: str
    own_address: str

    @contextmanager
    def placed(self, num_ranks: int, wait: Callable[[str], bool]) -> Iterator[list[Actor]]:
        """One actor for each rank, on as few machines as can be; they end with the context.

        `wait` is told what is missing while Ray has not given it yet, and says whether to give up.
        """
        import ray
        from ray.util.placement_group import placement_group, placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        there = int(ray.cluster_resources().get(self.kind, 0))
        if there < num_ranks:
            raise ConfigError([too_few(num_ranks, there, self.kind, self.address or self.own_address)])
        bundle = {"CPU": 1, **({"GPU": 1} if self.kind == "GPU" else {})}
        group = placement_group([bundle] * num_ranks, strategy="PACK")
        actors: list[Actor] = []
        try:
            if not self._is_given(group, wait):
                yield []
                return
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            places = placement_group_table(group)["bundles_to_node_id"]
            kind = ray.remote(RankProcess)
            for index in range(num_ranks):
                strategy = PlacementGroupSchedulingStrategy(group, index)
                handle = kind.options(  # type: ignore[attr-defined]
                    num_cpus=1,
                    num_gpus=bundle.get("GPU", 0),
                    # One call follows the rank while others give it signals.
                    max_concurrency=4,
                    max_restarts=0,
                    scheduling_strategy=strategy,
                ).remote()
                actors.append(Actor(handle, nodes.get(places[index], self.own_address)))
            yield actors
        finally:
            # Ray gives the rest back when this process lets go of it.
            for actor in actors:
                ray.kill(actor.handle)

    def _is_given(self, group: Any, wait: Callable[[str], bool]) -> bool:
        """Whether Ray has reserved what the ranks need."""
        import ray

        began, is_said = time.monotonic(), False
        while not group.wait(_POLL_S):
            words = ""
            if not is_said and time.monotonic() - began > _SAID_S:
                free = int(ray.available_resources().get(self.kind, 0))
                words = f"Ray has {free} free {self.kind}s; others hold the rest. Ctrl-C ends the wait."
                is_said = True
            if wait(words):
                return False
        return True


class Following:
    """What the ranks write, and how they end, as it comes."""

    def __init__(self, actors: list[Actor]) -> None:
        self._actors = actors
        self._pending = {actor.handle.follow.remote(): rank for rank, actor in enumerate(actors)}

    def news(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Pairs of a rank and what `RankProcess.follow` says of it; None where its actor is gone."""
        import ray

        if not self._pending:
            time.sleep(_POLL_S)
            return
        done, _ = ray.wait(list(self._pending), timeout=_POLL_S)
        for reference in done:
            rank = self._pending.pop(reference)
            try:
                news = json.loads(ray.get(reference))
            except ray.exceptions.RayError:
                yield rank, None
                continue
            if news["code"] is None:
                self._pending[self._actors[rank].handle.follow.remote()] = rank
            yield rank, news


@contextmanager
def connected(found: RayFacts, num_ranks: int) -> Iterator[Cluster]:
    """A Ray to start the ranks in: the one that was found, or one that ends with the context.

    ConfigError (E388) where Ray does not let this process in.
    """
    if found.address is None:
        with _folder() as folder, _started(folder, num_ranks) as cluster:
            yield cluster
        return
    import ray

    try:
        # For one that it finds itself Ray takes the token of this user.
        named = os.environ.get("RAY_ADDRESS") or "auto"
        ray.init(address=named, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([_refused(found.address, error)]) from error
    try:
        yield _cluster(found.address)
    finally:
        # It waits for ever for a cluster that is gone.
        shutdown = threading.Thread(target=ray.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(_END_S)


@contextmanager
def _started(folder: str, num_ranks: int) -> Iterator[Cluster]:
    """A Ray on this machine alone, which answers nobody without the token of this run."""
    # Ray reads them when it is imported; its own processes get them from here.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    try:
        try:
            ray.init(
                address="local",
                # torchrun starts as many processes as it is asked for too.
                num_cpus=max(num_ranks, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
        # Ray raises plain exceptions too.
        except Exception as error:
            raise ConfigError([unusable(f"Ray could not be started: {_first_line(error)}", "")]) from error
        yield _cluster(None)
    finally:
        ray.shutdown()
        _end_below()


def _end_below() -> None:
    """Wait for what Ray has started here, and end what does not end."""
    until = time.monotonic() + _END_S
    while (left := processes_below(os.getpid())) and time.monotonic() < until:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _cluster(address: str | None) -> Cluster:
    import ray

    kind = "GPU" if ray.cluster_resources().get("GPU", 0) >= 1 else "CPU"
    return Cluster(address, ray.__version__, kind, ray.util.get_node_ip_address())


@contextmanager
def _folder() -> Iterator[str]:
    """A folder for the files and sockets of a Ray; it is gone after it."""
    short = tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONGEST_FOLDER - 15 else "/tmp"
    folder = tempfile.mkdtemp(prefix="covey-ray-", dir=short)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused(address: str, error: Exception) -> Any:
    versions = Fix(
        text="Ray and Python have to be of the same versions as in the cluster: `pip install ray==VERSION`"
    )
    token = Fix(text="a cluster with a token: put `RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...` in front of covey")
    return unusable(f"The Ray at {address} refuses: {_first_line(error)}", "", versions, token)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:400]
