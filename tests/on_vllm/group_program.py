"""What each of two ranks does that are one vLLM together; writes what it saw to the file that it is given.

The first rank asks for completions. The ranks fail, stop and drift at different times, and meet in the run's
collectives in between.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from covey.activity import Stopped
from covey.comm import Comm, GroupComm, neighbours
from covey.data.text import load_codec
from covey.errors import GuardStop
from covey.models.load import load_policy
from covey.models.lora import plain_weights
from covey.quickstart import task
from covey.rollout.vllm import library
from covey.rollout.vllm.engine import VllmEngine
from covey.rollout.vllm.group import GroupEngine
from covey.types import Completion, GenerationRequest
from support.engines import Plain, plain, sampled
from support.vllm_learner import Learner, prompts, request_of, settings

# What a run that was killed leaves in shared memory, under the name that vLLM gives by itself.
LEFT = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")


def start(comm: Comm, name: str) -> GroupEngine:
    given = settings(tensor_parallel=2, by_torchrun=True, group_name=name)
    tokenizer = load_codec(task.MODEL_DIR).tokenizer
    return GroupEngine(VllmEngine(given, comm=comm, tokenizer=tokenizer), comm)


def requests_of(rank: int) -> list[GenerationRequest]:
    """Those of the first rank, of which a stop string ends some; another one has none."""
    return [] if rank else [request_of(p, i, stop_strings=("k><think>",)) for i, p in enumerate(prompts())]


def largest_gap(
    learner: Learner, asked: list[GenerationRequest], given: Sequence[Completion | Plain]
) -> float:
    return max((learner.gap(*pair) for pair in zip(asked, given, strict=True)), default=0.0)


def gathered(learner: Learner) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that all ranks gather together, one at a time."""
    for name, tensor in learner.weights():
        whole = tensor / 2
        dist.all_reduce(whole)
        yield name, whole


def ranks_agree() -> bool:
    """Whether the run's collectives are in step."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item() == 3.0


def raised(act: Any) -> dict[str, str]:
    try:
        act()
    except (Exception, Stopped) as error:  # noqa: BLE001 - the test looks at it
        code = error.finding.code if isinstance(error, GuardStop) else ""
        return {"type": type(error).__name__, "words": str(error), "code": code}
    return {"type": "", "words": "", "code": ""}


def samples(engine: GroupEngine, learner: Learner, comm: Comm) -> dict[str, Any]:
    """Requests of the first rank, some of them while the others run, and of two long ones one that is
    ended."""
    asked = requests_of(comm.rank)
    torch.manual_seed(comm.rank)
    torch.rand(7 * comm.rank)
    numbers = [engine.submit(request) for request in asked[:2]]
    long = [] if comm.rank else [request_of([5, 6, 7], 90 + i, max_new_tokens=60) for i in range(2)]
    ends = [engine.submit(request) for request in long]
    found = {}
    for completion in engine.results():
        found[completion.request_id] = plain(completion)
        if len(numbers) == 2:
            numbers += [engine.submit(request) for request in asked[2:]]
            engine.abort([ends[1], 12345])
    given = [found[number] for number in numbers]
    return {
        "tokens": [list(completion.token_ids) for completion in given],
        "logprobs": [list(completion.logprobs) for completion in given],
        "gap": largest_gap(learner, asked, given),
        "ended": [
            [found[number].finish.value, len(found[number].token_ids), learner.gap(request, found[number])]
            for request, number in zip(long, ends, strict=True)
        ],
        "unasked": sorted(found.keys() - {*numbers, *ends}),
    }


def publishes(engine: GroupEngine, learner: Learner, comm: Comm) -> dict[str, Any]:
    """Other weights, then ones that the second rank cannot take, then others. Without weights all ranks
    refuse what the first one asks for."""
    asked = requests_of(comm.rank)
    found: dict[str, Any] = {}
    for version in (1, 2):
        other = learner.changed(version)
        receipt = engine.publish(gathered(other), version)
        found[f"agrees {version}"] = other.agrees_with(receipt)
        found[f"unread {version}"] = sorted(receipt.unread)
        found[f"gap {version}"] = largest_gap(other, asked, sampled(engine, asked))
    worker = engine._own._llm.llm_engine.model_executor.driver_worker.worker
    load = worker.covey_load

    def breaks(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in range(3):
            next(weights)
        raise ValueError("no room left")

    worker.covey_load = breaks if comm.rank else load
    found["failed"] = raised(lambda: engine.publish(gathered(learner), 3))
    found["in step"] = ranks_agree()
    found["weights"] = raised(lambda: sampled(engine, asked[:1]))
    worker.covey_load = load
    found["agrees 4"] = learner.agrees_with(engine.publish(gathered(learner), 4))
    found["gap 4"] = largest_gap(learner, asked, sampled(engine, asked))
    return found


def stops(engine: GroupEngine, learner: Learner, comm: Comm) -> dict[str, Any]:
    """A signal that reaches the second rank alone, after it has stepped ten times."""
    activity, given, num_steps = comm.activity, 0, 0
    step = engine._own.step

    def count() -> list[Completion]:
        nonlocal num_steps
        num_steps += 1
        activity.is_asked_to_stop = bool(comm.rank) and num_steps >= 10
        return step()

    def sample() -> None:
        nonlocal given
        for i in () if comm.rank else range(4):
            engine.submit(request_of([5, 6, 7 + i], i, max_new_tokens=200 if i else 4))
        with activity.stoppable_between_steps():
            for _ in engine.results():
                given += 1

    engine._own.step = count
    found = {"raised": raised(sample), "given": given, "steps": num_steps}
    engine._own.step = step
    activity.is_asked_to_stop = bool(comm.rank)
    # An evaluation goes on to its end.
    asked = requests_of(comm.rank)
    found["gap"] = largest_gap(learner, asked, sampled(engine, asked))
    activity.is_asked_to_stop = False
    found["in step"] = ranks_agree()
    return found


@contextmanager
def drifting(comm: Comm) -> Iterator[None]:
    """Within it the second rank draws with other seeds."""
    own = library.seed_of
    library.seed_of = lambda key: own(key) + comm.rank
    yield
    library.seed_of = own


def ends(engine: GroupEngine, learner: Learner, comm: Comm) -> dict[str, Any]:
    """The end of one vLLM, and another one after it."""
    engine.close()
    found: dict[str, Any] = {"after close": ranks_agree()}
    del engine
    gc.collect()
    found["after collection"] = ranks_agree()
    again = start(comm, "second")
    asked = requests_of(comm.rank)
    found["agrees"] = learner.agrees_with(again.publish(learner.weights(), 0))
    found["gap"] = largest_gap(learner, asked, sampled(again, asked))
    with drifting(comm):
        found["drifted"] = raised(lambda: sampled(again, asked))
    again._own.close()
    found["at the end"] = ranks_agree()
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = neighbours(GroupComm(), 2)
    policy = load_policy(task.MODEL_DIR, device=torch.device("cpu"), disable_dropout=True)
    learner = Learner(policy.eval(), {n: t.detach().clone() for n, t in plain_weights(policy)})
    if comm.rank == 0:
        LEFT.touch()
    try:
        engine = start(comm, f"covey-test-{os.environ['MASTER_PORT']}")
    finally:
        if comm.rank == 0:
            LEFT.unlink(missing_ok=True)
    found: dict[str, Any] = {"agrees": learner.agrees_with(engine.publish(learner.weights(), 0))}
    for part in (samples, publishes, stops):
        found[part.__name__] = part(engine, learner, comm)
    found["shared"] = sorted(path.name for path in Path("/dev/shm").glob("*covey-test-*"))
    found["mapped"] = "covey-test-" in Path("/proc/self/maps").read_text()
    found["ends"] = ends(engine, learner, comm)
    Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
