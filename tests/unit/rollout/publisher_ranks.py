"""What a publisher does in two processes; started by test_publisher.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from covey.comm import Comm
from covey.errors import CoveyError, GuardStop
from covey.learner.backends.ddp import DDPBackend
from covey.learner.canary import learners_view
from covey.rollout.canary import Bound, Canary, canary_requests
from covey.rollout.publisher import Publisher
from covey.training.process import ranks
from support.engines import CopyEngine, Fleet
from support.models import VOCAB, policy_of
from support.steps import OPTIMIZER

FP32 = torch.float32


class _BreaksOff(CopyEngine):
    """Fails after its third tensor, the first rank's alone."""

    def publish(self, named_weights, version):
        if self.sends:
            for _ in range(3):
                next(named_weights)
            raise ConnectionResetError("the server is gone")
        return super().publish(named_weights, version)


def _publisher(engine: CopyEngine, backend: DDPBackend, comm: Comm) -> Publisher:
    view = learners_view(backend, comm.activity.advance)
    canary = Canary(requests=canary_requests(VOCAB), view=view, bound=Bound(FP32, FP32))
    return Publisher(backend, engine, comm, canary=canary)


def _shared(comm: Comm, backend: DDPBackend) -> str:
    """Servers that ranks share: the first one publishes to all of them, and every rank knows the gap."""
    members = {"a": CopyEngine(backend.policy), "b": CopyEngine(backend.policy)}
    engine = Fleet(members) if comm.rank == 0 else CopyEngine(backend.policy, is_shared=True, sends=False)
    publisher = _publisher(engine, backend, comm)
    with torch.no_grad():
        for parameter in backend.policy.parameters():
            parameter.mul_(1.01)
    with publisher.serve(3), publisher.serve(3):
        pass
    assert publisher.last is not None and publisher.last.canary_gap is not None
    assert (publisher.last.num_bytes > 0) == (comm.rank == 0)
    assert all(e.num_publishes == (comm.rank == 0) for e in members.values())
    return f"{publisher.last.canary_gap > 0}"


class _OfBoth(CopyEngine):
    """Counts what it is asked for."""

    num_asked = 0

    def submit(self, request):
        self.num_asked += 1
        return super().submit(request)


def _one_engine(comm: Comm, backend: DDPBackend) -> str:
    """Both ranks are one engine: each is sent the weights, the first one asks for the canary, and every rank
    knows the gap."""
    engine = _OfBoth(backend.policy)
    engine.capabilities = replace(engine.capabilities, num_ranks=2)
    publisher = _publisher(engine, backend, comm)
    with torch.no_grad():
        for parameter in backend.policy.parameters():
            parameter.mul_(1.01)
    with publisher.serve(3):
        pass
    assert publisher.last is not None and publisher.last.canary_gap is not None
    assert publisher.last.num_bytes > 0 and engine.num_publishes == 1
    return f"{engine.num_asked} asked for, {publisher.last.canary_gap > 0}"


def _raised(comm: Comm, backend: DDPBackend, engine: CopyEngine) -> str:
    try:
        with _publisher(engine, backend, comm).serve(1):
            return "served"
    except GuardStop as stop:
        return stop.finding.seen
    except (CoveyError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}"


def _one_of_two_servers(comm: Comm, backend: DDPBackend) -> str:
    """One of two servers keeps old weights: every rank says which."""
    members = {"a": CopyEngine(backend.policy), "b": CopyEngine(backend.policy)}
    members["b"].take = lambda name, weight: None
    with torch.no_grad():
        for parameter in backend.policy.parameters():
            parameter.mul_(1.01)
    engine = Fleet(members) if comm.rank == 0 else CopyEngine(backend.policy, is_shared=True, sends=False)
    return _raised(comm, backend, engine)


def _breaks_off(comm: Comm, backend: DDPBackend) -> str:
    """A connection that breaks is raised where it was, and the other rank is told."""
    return _raised(comm, backend, _BreaksOff(backend.policy, is_shared=True, sends=comm.rank == 0))


FOUND = (_shared, _one_engine, _one_of_two_servers, _breaks_off)


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    with ranks(2) as comm:
        backend = DDPBackend(policy_of("llama"), OPTIMIZER)
        said = {f.__name__: f(comm, backend) for f in FOUND}
        (work / f"{comm.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
