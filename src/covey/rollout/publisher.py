"""What stands between the weights of a run and the engine that samples from them.

An engine that holds a copy is sent the weights of a version, says what it holds then, and samples the canary,
before anything is sampled from it. What fails on one rank is raised on all of them, so none waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from covey.comm import Comm, failing_together
from covey.errors import RunFailed
from covey.rollout.canary import Canary, Comparison, sample_canary
from covey.rollout.engine import Engine, NamedWeights, SharedEngine
from covey.rollout.receipts import Sent, check_canary, check_receipt, check_sampled_by
from covey.texts import tr
from covey.types import Completion

if TYPE_CHECKING:
    import torch

    from covey.models.lora import AdapterAlone


class Owner(Protocol):
    """What owns the weights."""

    def rollout_view(self) -> AbstractContextManager[object]:
        """Whole weights for an engine of this process, for a time. Collective."""
        ...

    def weights(self, dtype: torch.dtype | None = None) -> NamedWeights:
        """Whole weights, one at a time. Collective."""
        ...

    @property
    def adapter_alone(self) -> AdapterAlone | None:
        """Its adapter, where an engine can apply it itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A publish that was checked: seconds with its checks, bytes sent, and the digest of all fingerprints.

    `canary_gap` is the largest |logprob - learner's| over the canary and all engines; None without one.
    """

    version: int
    digest: str
    num_tensors: int
    num_bytes: int
    seconds: float
    canary_s: float
    canary_gap: float | None


class Publisher:
    """Has an engine sample from the weights of a version, and gives it them where it is behind.

    An engine that applies an adapter of the owner's rank is sent the base once, and then the adapter alone.

    `tied` are names of the model beside those of its weights: `{"lm_head.weight": "model.embed…weight"}`. An
    engine may hold such a tensor under both.
    """

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        comm: Comm,
        *,
        canary: Canary | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self._owner, self.engine, self._comm = owner, engine, comm
        self._canary, self._tied = canary, dict(tied or {})
        self._version: int | None = None
        self._before: Sent | None = None
        self._base: Sent | None = None
        self.last: Published | None = None
        """What was published last."""
        self._published: list[Published] = []

    @contextmanager
    def serve(self, version: int) -> Iterator[Engine]:
        """The engine, whose every token carries `version`; no step may be taken within. Collective.

        Raises GuardStop on every rank where the engine does not hold the weights or does not sample from
        them: F150 to F155.
        """
        if self.engine.capabilities.holds_weights:
            if self._version != version:
                self._publish(version)
            yield self.engine
            return
        with self._owner.rollout_view():
            if self._version != version or self.engine.capabilities.forgets:
                self._version = self.engine.publish(self._owner.weights(), version).version
            yield self.engine

    def rest(self) -> None:
        """Called when a rollout or an evaluation is over, as `Engine.rest`: what forgets its weights then is
        behind."""
        self.engine.rest()
        if self.engine.capabilities.forgets:
            self._version = None

    def taken(self) -> list[Published]:
        """What was published since the last call."""
        found, self._published = self._published, []
        return found

    def _publish(self, version: int) -> None:
        activity, phase = self._comm.activity, self._comm.activity.moment.phase
        activity.enter("publish")
        started = time.perf_counter()
        self._version = None
        sent = self._send(version)
        sampled_from = time.perf_counter()
        gap = None if self._canary is None else self._run_canary(self._canary, version)
        self._share_members()
        ended = time.perf_counter()
        self._version, self._before = version, sent
        self.last = Published(
            version=version,
            digest=sent.digest,
            num_tensors=len(sent.fingerprints),
            num_bytes=sent.num_bytes,
            seconds=ended - started,
            canary_s=ended - sampled_from,
            canary_gap=gap,
        )
        self._published.append(self.last)
        activity.enter(phase)

    def _send(self, version: int) -> Sent:
        """Every rank gathers each tensor, and the engine takes it; then its receipt is held to what was
        sent."""
        engine, sent = self.engine, Sent(version=version)
        weights = self._weights(sent)

        def send() -> None:
            try:
                receipt = engine.publish(weights, version)
            finally:
                # What the engine has not asked for: the other ranks gather it, too.
                for _ in weights:
                    pass
            for name, own in (receipt.members or {"": receipt}).items() if self._is_sender else ():
                check_receipt(self._who(name), own, sent, self._before, self._tied)

        self._on_all_ranks(send)
        return sent

    def _share_members(self) -> None:
        """Have every rank use the members that the first rank has, which sends and samples the canary."""
        if self.engine.capabilities.is_shared and self._comm.world > 1:
            members = self._comm.gather_json(list(self.engine.members))[0]
            cast(SharedEngine, self.engine).use_members(members)

    def _weights(self, sent: Sent) -> NamedWeights:
        """What the engine lacks of a version. Collective."""
        most, dtype = self.engine.capabilities.adapter_rank, self.engine.capabilities.dtype
        adapter = self._owner.adapter_alone if most else None
        if adapter is None or adapter.rank > most:
            return self._counted(self._owner.weights(dtype), sent)
        if not self._is_base_held(adapter):
            return self._base_and_matrices(adapter, sent)
        assert self._base is not None
        sent.fingerprints.update(self._base.fingerprints)
        return self._counted(adapter.matrices(dtype), sent)

    def _is_base_held(self, adapter: AdapterAlone) -> bool:
        """Whether every engine holds the adapter's base, from before or from another run. Collective."""
        held = self.engine.held_base() if self._is_sender else None
        if "" in self._comm.gather_json(held):
            return False
        if self._base is None:
            self._base = Sent(version=-1)
            for _ in self._counted(adapter.base(self.engine.capabilities.dtype), self._base):
                pass
        return all(self._comm.gather_json(held is None or held == self._base.digest))

    def _base_and_matrices(self, adapter: AdapterAlone, sent: Sent) -> NamedWeights:
        dtype = self.engine.capabilities.dtype
        yield from self._counted(adapter.base(dtype), sent)
        self._base = Sent(version=sent.version, fingerprints=dict(sent.fingerprints))
        yield from self._counted(adapter.matrices(dtype), sent)

    @property
    def _is_sender(self) -> bool:
        """Whether this rank's engine is given the weights."""
        return self._comm.rank == 0 or not self.engine.capabilities.is_shared

    def _counted(self, weights: NamedWeights, sent: Sent) -> NamedWeights:
        for name, weight in weights:
            if self._is_sender:
                sent.add(name, weight)
            self._comm.activity.advance()
            yield name, weight

    def _who(self, member: str) -> str:
        """An engine in words, by the name that it has among others."""
        if member:
            return tr("server {member}", member=member)
        is_alone = self._comm.world == 1 or self.engine.capabilities.is_shared
        return tr("the engine") if is_alone else tr("the engine of rank {rank}", rank=self._comm.rank)

    def _run_canary(self, canary: Canary, version: int) -> float:
        """Sample the canary from every engine, and hold it to the learner; returns the largest gap."""
        sampled: dict[str, list[Completion]] = {}
        # The other ranks of an engine compute with the one that asks it.
        asked = canary.requests if self.engine.capabilities.is_asked_by(self._comm.rank) else ()

        def sample() -> None:
            engines = self.engine.members or {"": self.engine}
            lost: RunFailed | None = None
            for name, engine in engines.items() if self._is_sender else ():
                try:
                    own = sample_canary(engine, asked)
                except RunFailed as error:
                    # It took the weights and is gone: it is asked for nothing more, and the others go on.
                    lost = error
                    continue
                check_sampled_by(self._who(name), {v for c in own for v, _ in c.versions}, version)
                if own:
                    sampled[name] = own
            if lost is not None and not sampled:
                raise lost

        self._on_all_ranks(sample)
        comparison = Comparison(canary, list(sampled.values()))
        gaps = [0.0]

        def judge() -> None:
            has_keys, bound = self.engine.capabilities.noise_keys, canary.bound
            for name, completions in sampled.items():
                found = comparison.of(completions, has_keys=has_keys, bound=bound.value)
                check_canary(self._who(name), found, bound, version)
                gaps.append(found.gap)

        self._on_all_ranks(judge)
        (gap,) = self._comm.max([max(gaps)])
        canary.bound.learn(gap)
        return gap

    def _on_all_ranks(self, act: Callable[[], None]) -> None:
        """Call `act` on every rank, and raise on all of them what it raises on one. `act` may call only
        collectives that fail on all ranks of an engine together."""
        with failing_together(self._comm):
            act()
