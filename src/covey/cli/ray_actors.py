"""The actors of a run, in a Ray that is there or in one that is started for it.

This module alone imports Ray. What covey gives to an actor, and what it gets back, is JSON as bytes; Ray
itself pickles what its own processes tell each other.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from covey.checks.ray.judge import too_few, unusable
from covey.cli.listening import processes_below
from covey.cli.ray_rank import RankProcess
from covey.errors import ConfigError
from covey.plan.facts import RayFacts
from covey.texts import counted, tr
from covey.texts.language import spoken
from covey.types import Fix, Problem

# The least that Ray takes; nothing of a run goes through it.
_STORE_BYTES = 80 << 20
# The path of a socket has at most 107 letters, of which Ray needs 65 and the name of its folder 15.
_LONGEST_PARENT = 25
_POLL_S = 0.2
# After so long a wait for GPUs that others hold it is said what is waited for.
_PATIENCE_S = 10.0
_ANSWER_S = 120.0
_END_S = 10.0


class ActorGone(Exception):
    """An actor did not start, or is not there any more."""


@dataclass(slots=True)
class Actor:
    """One actor, and the address of the machine that it is on."""

    handle: Any
    address: str

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Call a method and return its answer; ActorGone where there is none."""
        import ray

        try:
            answer = ray.get(self._call(method, values), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            raise ActorGone(_first_line(error)) from error
        return dict(json.loads(answer))

    def tell(self, method: str, **values: Any) -> None:
        """Call a method without waiting for its answer; that an actor is gone is found by Following."""
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
    def placed(self, num_ranks: int, received: Sequence[int]) -> Iterator[list[Actor]]:
        """One actor for each rank, on as few machines as can be; they end with the context.

        No actor where a signal was received before Ray had room for them; ConfigError (E389) where it never
        has.
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
            if not self._is_reserved(group, received):
                yield []
                return
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            places = placement_group_table(group)["bundles_to_node_id"]
            kind = ray.remote(RankProcess)
            for index in range(num_ranks):
                handle = kind.options(  # type: ignore[attr-defined]
                    num_cpus=1,
                    num_gpus=bundle.get("GPU", 0),
                    # One call follows the rank while others give it signals.
                    max_concurrency=4,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                ).remote()
                actors.append(Actor(handle, nodes.get(places[index], self.own_address)))
            yield actors
        finally:
            # Ray gives the rest back when this process lets go of it.
            for actor in actors:
                ray.kill(actor.handle)

    def _is_reserved(self, group: Any, received: Sequence[int]) -> bool:
        """Wait until Ray has reserved what the ranks need; False where a signal came before."""
        import ray

        until, is_said = time.monotonic() + _PATIENCE_S, False
        while not group.wait(_POLL_S):
            if received:
                return False
            if not is_said and time.monotonic() > until:
                is_said = True
                free = counted(int(ray.available_resources().get(self.kind, 0)), self.kind)
                words = tr(
                    "Ray has only {free} free; other jobs use the rest. Waiting; press Ctrl-C to stop.",
                    free=free,
                )
                sys.stderr.write(spoken(tr("covey: {words}\n", words=words)))
        return True


class Following:
    """What the ranks write, and how they end, as it comes."""

    def __init__(self, actors: list[Actor]) -> None:
        self._actors = actors
        self._pending = {actor.handle.follow.remote(): rank for rank, actor in enumerate(actors)}

    def news(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Pairs of a rank and what `RankProcess.follow` says of it; None where its actor is gone."""
        import ray

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
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONGEST_PARENT else "/tmp"
        with (
            tempfile.TemporaryDirectory(
                prefix="covey-ray-", dir=parent, ignore_cleanup_errors=True
            ) as folder,
            _started(folder, num_ranks) as cluster,
        ):
            yield cluster
        return
    import ray

    try:
        # With "auto" Ray takes the token that this user has stored.
        named = os.environ.get("RAY_ADDRESS") or "auto"
        ray.init(address=named, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError([_refused(found.address, error)]) from error
    try:
        yield _cluster(found.address)
    finally:
        # For a cluster that is gone it waits for ever.
        shutdown = threading.Thread(target=ray.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(_END_S)


@contextmanager
def _started(folder: str, num_ranks: int) -> Iterator[Cluster]:
    """A Ray on this machine alone, which answers nobody without the token of this run."""
    # Ray reads them when it is imported, and its processes inherit them.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    try:
        try:
            ray.init(
                address="local",
                # One for each actor; Ray starts so many workers at once.
                num_cpus=num_ranks,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
        # Ray raises plain exceptions too.
        except Exception as error:
            raise ConfigError(
                [unusable(tr("Ray could not be started: {first_line}", first_line=_first_line(error)))]
            ) from error
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


def _refused(address: str, error: Exception) -> Problem:
    versions = Fix(text="install the cluster's versions of Ray and Python: `pip install ray==VERSION`")
    token = Fix(
        text=tr(
            "if the cluster requires a token: put `RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...` in front of covey"
        )
    )
    return unusable(
        tr(
            "Ray at {address} refuses the connection: {first_line}",
            address=address,
            first_line=_first_line(error),
        ),
        versions,
        token,
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:400]
