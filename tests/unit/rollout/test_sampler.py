"""The thread that samples shares while another one learns."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from covey.activity import Activity
from covey.data.text import TextCodec
from covey.rewards.protocol import Scored
from covey.rollout.ahead import Sampler
from covey.rollout.scripted import ScriptedEngine
from covey.rollout.shares import Share
from covey.rollout.slots import slots_of
from covey.types import Completion, Score, TurnId
from support.agents import plan_of, prompt_of

USER = {"role": "user", "content": "Say something."}


class Slow(ScriptedEngine):
    """Counts its turns, and answers one request in each of them, after a moment."""

    num_turns = 0

    def results(self) -> Iterator[Completion]:
        def on_turn() -> None:
            self.num_turns += 1
            time.sleep(0.005)
            own()

        own, self.on_turn = self.on_turn, on_turn
        yield from super().results()


def score(rows: Sequence[Scored]) -> object:
    return lambda: [Score(total=1.0, parts=()) for _ in rows]


def share_of(codec: TextCodec, siblings: int) -> Share:
    slots = slots_of([prompt_of(codec, [USER])], plan_of(codec, siblings))
    return Share(slots, score, None)  # type: ignore[arg-type]


def said(turn: TurnId) -> str:
    return f"number {turn.sibling}"


def texts(share: Share) -> list[str]:
    return [episode.text for episode in share.scored(Activity()).episodes]


def test_shares_are_sampled_side_by_side_and_beside_what_runs(quickstart_codec: TextCodec) -> None:
    engine = Slow(quickstart_codec, said)
    with closing(Sampler(engine, quickstart_codec, None)) as sampler:
        shares = [share_of(quickstart_codec, siblings) for siblings in (12, 3)]
        for share in shares:
            sampler.begin(share)
        for share in shares:
            sampler.wait(share, Activity())
        first, second = map(texts, shares)
        assert len(first) == 12 and first[:3] == second
        late = share_of(quickstart_codec, 2)
        sampler.begin(late)
        sampler.wait(late, Activity())
        assert texts(late) == first[:2]
        assert 0.0 <= sampler.take_idle() <= 1.0


def test_nothing_is_asked_of_the_engine_in_a_pause(quickstart_codec: TextCodec) -> None:
    engine = Slow(quickstart_codec, said)
    with closing(Sampler(engine, quickstart_codec, None)) as sampler:
        share, further = share_of(quickstart_codec, 40), share_of(quickstart_codec, 2)
        sampler.begin(share)
        for _ in range(3):
            with sampler.paused():
                turns, requests = engine.num_turns, len(engine.requests)
                sampler.begin(share_of(quickstart_codec, 1))
                time.sleep(0.05)
                assert (engine.num_turns, len(engine.requests)) == (turns, requests)
                assert not share.is_sampled
            time.sleep(0.01)
        sampler.wait(share, Activity())
        # Where nothing runs, nothing begins either.
        with sampler.paused():
            requests = len(engine.requests)
            sampler.begin(further)
            time.sleep(0.05)
            assert len(engine.requests) == requests
        sampler.wait(further, Activity())


def test_what_it_fails_with_is_raised_where_it_is_waited_for(quickstart_codec: TextCodec) -> None:
    def broken(turn: TurnId) -> str:
        raise RuntimeError("the engine has failed")

    with closing(Sampler(Slow(quickstart_codec, broken), quickstart_codec, None)) as sampler:
        share = share_of(quickstart_codec, 2)
        sampler.begin(share)
        with pytest.raises(RuntimeError, match="the engine has failed"):
            sampler.wait(share, Activity())
        with pytest.raises(RuntimeError, match="the engine has failed"), sampler.paused():
            pass


def test_closed_it_drops_what_runs_and_its_thread_ends(quickstart_codec: TextCodec) -> None:
    before = threading.active_count()
    sampler = Sampler(Slow(quickstart_codec, said), quickstart_codec, None)
    share = share_of(quickstart_codec, 400)
    sampler.begin(share)
    time.sleep(0.05)
    sampler.close()
    assert threading.active_count() == before and not share.is_sampled
    Sampler(Slow(quickstart_codec, said), quickstart_codec, None).close()
