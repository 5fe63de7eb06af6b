"""Async rewards run at the same time: each waits inside its call until the other has begun.

Called one after the other, the first would wait until its patience is over and say 0.
"""

from __future__ import annotations

import asyncio
import textwrap
import threading

import pytest

from covey.rewards.callee import is_async
from covey.rewards.protocol import TrainerState
from covey.rewards.reward_set import RewardSet

PATIENCE_S = 30

# Files are what two processes see of each other.
MEETING = f"""
    import asyncio, pathlib, time

    HERE = pathlib.Path(__file__).parent

    async def met(mine, other):
        (HERE / mine).touch()
        ends = time.monotonic() + {PATIENCE_S}
        while not (HERE / other).exists() and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        return (HERE / other).exists()

    async def first(completions):
        return [float(await met("one", "two"))] * len(completions)

    async def second(completions):
        return [float(await met("two", "one"))] * len(completions)
"""
PLUGIN = """
    from swift.rewards import AsyncORM, orms
    import mine

    class First(AsyncORM):
        async def __call__(self, completions, **kwargs):
            return await mine.first(completions)

    class Second(AsyncORM):
        async def __call__(self, completions, **kwargs):
            return await mine.second(completions)

    orms["first"], orms["second"] = First, Second
"""


def values(rewards, rows):
    return [[p.value for p in row.parts] for row in rewards.score(rows, TrainerState()).rows]


def test_functions_of_a_file_with_one_worker(tmp_path, scored):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MEETING), encoding="utf-8")
    entries = [f"{tmp_path / 'mine.py'}:{name}" for name in ("first", "second")]
    with RewardSet.start(entries, workers=1, timeout_s=2 * PATIENCE_S) as rewards:
        assert values(rewards, [scored("a"), scored("b")]) == [[1.0, 1.0]] * 2


def test_classes_of_ms_swift_with_one_worker(tmp_path, scored):
    for name, text in (("mine.py", MEETING), ("plugin.py", PLUGIN)):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    with RewardSet.start(
        ["first", "second"],
        plugins=[str(tmp_path / "plugin.py")],
        workers=1,
        timeout_s=2 * PATIENCE_S,
    ) as rewards:
        assert values(rewards, [scored("a")]) == [[1.0, 1.0]]


def test_an_async_function_waits_for_no_sync_one(tmp_path, scored):
    """A sync function that holds the only worker until the async one has begun."""
    sync = """
    def slow(completions):
        return asyncio.run(first(completions))
    """
    text = textwrap.dedent(MEETING) + textwrap.dedent(sync)
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    entries = [f"{tmp_path / 'mine.py'}:{name}" for name in ("slow", "second")]
    with RewardSet.start(entries, workers=1, timeout_s=2 * PATIENCE_S) as rewards:
        assert values(rewards, [scored("a")]) == [[1.0, 1.0]]


def test_functions_of_this_process(scored):
    begun = [threading.Event() for _ in range(3)]

    async def meet(mine, completions):
        begun[mine].set()
        waits = (asyncio.to_thread(event.wait, PATIENCE_S) for event in begun)
        return [float(all(await asyncio.gather(*waits)))] * len(completions)

    async def first(completions):
        return await meet(0, completions)

    class Second:
        async def __call__(self, completions, **kwargs):
            return await meet(1, completions)

    def sync(completions):
        begun[2].set()
        return [float(all(event.wait(PATIENCE_S) for event in begun))] * len(completions)

    with RewardSet.start([first, Second, sync]) as rewards:
        assert values(rewards, [scored("a"), scored("b")]) == [[1.0, 1.0, 1.0]] * 2


async def coroutine(completions):
    return [0.0]


class Object:
    async def __call__(self, completions):
        return [0.0]


class Sync:
    def __call__(self, completions):
        return [0.0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [(coroutine, True), (Object(), True), (Sync(), False), (len, False), (lambda completions: [0.0], False)],
)
def test_what_is_async(function, expected):
    assert is_async(function) is expected
