"""Ranks find each other in a store that earlier ones have used, and tell what they have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from covey.meeting import RAISED, Meeting
from covey.training import machines
from covey.training.link import Met, NotThere, meet
from covey.training.machines import Machines, over_machines
from support.verbs import rank_variables


@pytest.fixture
def agent() -> dist.TCPStore:
    """The store that torchrun's agent keeps."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def of_rank(rank: int, world: int, agent: dist.TCPStore) -> dict[str, str]:
    own = {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**rank_variables(rank, world), **own}


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """What these return, or raise, as threads that run at a time."""
    found: list[Any] = [None] * len(work)

    def run(number: int) -> None:
        try:
            found[number] = work[number]()
        except Exception as error:  # noqa: BLE001  the test looks at it
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def comes(rank: int, agent: dist.TCPStore, world: int = 3, limit_s: float = 20) -> Callable[[], Met]:
    return lambda: meet(of_rank(rank, world, agent), limit_s, host=f"host{rank}", machine=f"m{rank}")


def test_ranks_meet_under_a_name_of_their_own(agent: dist.TCPStore) -> None:
    first = at_once(*(comes(rank, agent) for rank in range(3)))
    assert len({met.name for met in first}) == 1
    assert first[0].hosts == first[2].hosts == ["host0", "host1", "host2"]
    again = at_once(*(comes(rank, agent) for rank in reversed(range(3))))
    assert len({met.name for met in again}) == 1 and again[0].name != first[0].name
    # What one start leaves, the next does not find.
    first[0].store.set("failed", "x")
    assert not again[1].store.check(["failed"])


def test_what_a_start_left_that_never_began_is_not_believed(agent: dist.TCPStore) -> None:
    """Two of three come and end; the next three meet each other, and none of those."""
    early = at_once(comes(0, agent, limit_s=0.5), comes(1, agent, limit_s=0.5))
    assert [type(error) for error in early] == [NotThere, NotThere]
    assert str(early[0]) == "rank 2 did not arrive"
    late = at_once(comes(2, agent), comes(0, agent), comes(1, agent))
    assert len({met.name for met in late}) == 1


def test_a_rank_that_is_replaced_before_all_have_come(agent: dist.TCPStore) -> None:
    def after_another() -> Met:
        with pytest.raises(NotThere):
            comes(1, agent, limit_s=0.4)()
        return comes(1, agent)()

    def later() -> Met:
        time.sleep(0.8)
        return comes(2, agent)()

    found = at_once(comes(0, agent), after_another, later)
    assert len({met.name for met in found}) == 1, found


@pytest.mark.parametrize(
    ("here", "world", "is_over"), [("1", "2", True), ("2", "2", False), ("", "2", False), ("x", "2", False)]
)
def test_where_there_are_several_machines(here: str, world: str, is_over: bool) -> None:
    assert over_machines({"LOCAL_WORLD_SIZE": here, "WORLD_SIZE": world}) == is_over


@pytest.fixture
def two(
    agent: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Machines, Machines]]:
    """Two machines with a rank each, which have met."""
    monkeypatch.setattr(machines, "_EVERY_S", 0.05)
    monkeypatch.setattr(machines, "_ANSWER_S", 0.2)
    found = at_once(*(comes(rank, agent, world=2) for rank in range(2)))
    both = []
    for rank, met in enumerate(found):
        place = Meeting(tmp_path / f"ranks-{rank}", rank, 2)
        place.come()
        monkeypatch.setattr("covey.training.link.meet", lambda *args, met=met, **named: met)
        both.append(Machines(place, host=f"host{rank}"))
        both[-1].start()
        assert both[-1].ready.wait(5)
    yield both[0], both[1]
    for of in both:
        of.leave()


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_happens_on_one_machine_is_known_on_the_other(two: tuple[Machines, Machines]) -> None:
    one, other = two
    assert one.leads and other.leads and one.elsewhere == [1]
    other.place.put(RAISED, "2")
    until(lambda: one.raised == {1: 2})
    one.mirror()
    assert one.place.word(1, RAISED) == "2"
    one.place.signal.write_text("15")
    until(lambda: other.signal == 15)
    other.mirror()
    assert other.place.read_signal() == 15


def test_the_first_to_fail_is_the_same_for_all(two: tuple[Machines, Machines]) -> None:
    one, other = two
    assert other.fail_first("F133", "gone", 1)
    assert not one.fail_first("F131", "connection closed", 1)
    assert one.failed is not None and (one.failed.rank, one.failed.host) == (1, "host1")


def test_a_machine_without_a_sign_is_known_and_one_that_has_left_is_not_missed(
    two: tuple[Machines, Machines],
) -> None:
    one, other = two
    time.sleep(0.3)
    assert not [silent for silent in one.silent() if silent.seconds > 0.25]
    other._stop.set()
    until(lambda: [s.ranks for s in one.silent() if s.seconds > 0.5] == [[1]])
    one.leave()
    assert json.loads(one.met.store.get("machine/0"))["left"]  # type: ignore[union-attr]
