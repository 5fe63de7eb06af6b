"""Print what episodes of several turns cost on the native engine: `python bench/turns.py`.

- Slow answers: seconds of a rollout whose answers take 0.5 s each, against decoding alone, the answers of one
  episode, and the sum of decoding and all answers. How many tokens were decoded while answers were awaited.
- The loop: CPU seconds of the turn loop against the path of single turns on equal work, and what the loop
  takes for a turn without an engine.
- Keys and values that are kept: tokens that are computed and seconds, with each turn anew and with turns that
  extend the former one.

Figures of one run are compared with each other alone. About a minute on two cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch

from covey.activity import Activity
from covey.data.text import TextCodec, load_codec
from covey.environments.agents import Agents
from covey.models.load import choose_stream, load_policy
from covey.models.policy import Policy
from covey.quickstart import task
from covey.rollout.native.engine import NativeEngine
from covey.rollout.scripted import ScriptedEngine
from covey.rollout.single_turns import SingleTurns
from covey.rollout.slots import CollectPlan, slots_of
from covey.rollout.turns import TurnLoop
from covey.types import Episode, SamplingParams
from support.agents import agents_for
from support.sums import TURNS, SumsHost, sum_prompts, sums_agents

SLOW_S = 0.5
PROMPTS, SIBLINGS, REPEATS = 16, 8, 7
# A random model ends a turn with one token in a hundred, so that turns have lengths like those of a model.
ENDS = (70, 140, 210)


def say(name: str, *figures: str) -> None:
    sys.stdout.write(f"{name:<58} " + " ".join(f"{figure:>12}" for figure in figures) + "\n")
    sys.stdout.flush()


class Counting(SumsHost):
    """Answers late; `meanwhile` are the tokens that were computed while at least one answer was awaited."""

    def __init__(self, engine: NativeEngine, seconds: float) -> None:
        super().__init__(lambda key, turn: seconds)
        self._engine, self._out, self._since = engine, 0, 0
        self.meanwhile = self.num_answers = 0

    def step(self, key: int, turn: Any, done: Callable[[Any], None]) -> None:
        if not self._out:
            self._since = self._engine.num_computed
        self._out += 1
        self.num_answers += 1

        def told(value: Any) -> None:
            self._out -= 1
            if not self._out:
                self.meanwhile += self._engine.num_computed - self._since
            done(value)

        super().step(key, turn, told)


class Bench:
    """A model, its codec, and the rollout that each row samples."""

    def __init__(self) -> None:
        self.codec: TextCodec = load_codec(task.MODEL_DIR)
        self.policy: Policy = load_policy(task.MODEL_DIR, device=torch.device("cpu"), disable_dropout=True)
        choose_stream(self.policy)
        self.policy.eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.03)
        sampling = SamplingParams(
            temperature=1.0, max_new_tokens=600, stop_token_ids=(*self.codec.stop_token_ids, *ENDS)
        )
        self.plan = CollectPlan(num_generations=SIBLINGS, sampling=sampling, seed=1)
        self.slots = slots_of(sum_prompts(self.codec, PROMPTS), self.plan)

    def turns(
        self, engine: Any, agents: Agents, clock: Callable[[], float] = time.perf_counter
    ) -> tuple[float, dict[int, Episode]]:
        """The seconds of a rollout by the turn loop, and its episodes."""
        agents = replace(agents, limits=replace(agents.limits, max_tokens=600))
        began = clock()
        loop = TurnLoop(self.slots, engine, self.codec, agents, Activity())
        found = dict(loop.episodes())
        return clock() - began, found

    def single(self, engine: Any, clock: Callable[[], float]) -> tuple[float, dict[int, Episode]]:
        """The same by the path of single turns."""
        began = clock()
        found = dict(SingleTurns(self.slots, engine, self.codec, Activity()).episodes())
        return clock() - began, found


def slow_answers(bench: Bench) -> None:
    """Answers that take half a second."""
    engine = NativeEngine(bench.policy)
    bench.turns(engine, sums_agents(bench.codec))
    decoding, _ = bench.turns(engine, sums_agents(bench.codec))
    host = Counting(engine, SLOW_S)
    before = engine.num_computed
    took, found = bench.turns(engine, replace(sums_agents(bench.codec), environment=host))
    tokens = engine.num_computed - before
    chain = max(len(episode.turns) for episode in found.values()) * SLOW_S
    every = host.num_answers * SLOW_S
    say("decoding alone", f"{decoding:.2f} s")
    say("the answers of one episode, one after the other", f"{chain:.2f} s")
    say(f"all {host.num_answers} answers, one after the other", f"{every:.1f} s")
    say("the rollout with such answers", f"{took:.2f} s")
    say("  against decoding + the answers of one episode", f"{took / (decoding + chain):.2f}")
    say("  against decoding + all answers", f"{took / (decoding + every):.3f}")
    say("tokens decoded while answers were awaited", f"{host.meanwhile / tokens:.0%}")


def loop(bench: Bench) -> None:
    """Return the seconds that the loop takes with one turn an episode, and without an engine."""
    engine = NativeEngine(bench.policy)
    alone = replace(agents_for(bench.codec, form=None), format=None)
    ratios = []
    for _ in range(REPEATS):
        ours, by_turns = bench.turns(engine, alone, time.process_time)
        theirs, by_one = bench.single(engine, time.process_time)
        assert [e.sequences[0].token_ids.tolist() for _, e in sorted(by_turns.items())] == [
            e.sequences[0].token_ids.tolist() for _, e in sorted(by_one.items())
        ]
        ratios.append(ours / theirs)
    say(
        f"one turn: the loop against single turns, of {REPEATS}",
        *(f"{x:.3f}" for x in (min(ratios), statistics.median(ratios), max(ratios))),
    )
    for length in (20, 200):
        scripted = ScriptedEngine(bench.codec, lambda turn, length=length: "1+2=3 " * (length // 6))
        took, found = bench.turns(scripted, sums_agents(bench.codec), time.process_time)
        num = sum(len(episode.turns) for episode in found.values())
        assert num == TURNS * len(bench.slots)
        say(f"the loop alone, for a turn of {length} characters", f"{1e3 * took / num:.2f} ms")


def kept(bench: Bench) -> None:
    """Turns that extend the former one, and turns that are computed anew."""
    seconds, computed = {}, {}
    for name in ("anew", "extended", "anew", "extended"):
        engine = NativeEngine(bench.policy)
        if name == "anew":
            submit = engine.submit
            engine.submit = lambda request, submit=submit: submit(replace(request, extends=None))  # type: ignore[method-assign]
        bench.turns(engine, sums_agents(bench.codec))
        before = engine.num_computed
        seconds[name], _ = bench.turns(engine, sums_agents(bench.codec))
        computed[name] = engine.num_computed - before
    say("tokens computed: each turn anew, extended", *(f"{computed[n]}" for n in ("anew", "extended")))
    say("  extended against anew", f"{computed['extended'] / computed['anew']:.2f}")
    say("seconds: extended against anew", f"{seconds['extended'] / seconds['anew']:.2f}")


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    bench = Bench()
    say(f"{PROMPTS} prompts x {SIBLINGS} episodes, built-in shape, random weights, float32, one thread")
    slow_answers(bench)
    loop(bench)
    kept(bench)


if __name__ == "__main__":
    main()
