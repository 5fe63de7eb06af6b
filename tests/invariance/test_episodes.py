"""A step whose completions have one, two and three rows has the gradient of a slow loop, however it is cut.

The loop of support/episodes.py is given the logits that the model has for each row alone. Compared are one
forward pass, row by row on padded rows, packed and shared streams cut by tokens, so that rows of an episode
lie in several micro-batches, the shares of two and of three ranks added up, and two gloo processes. Of one
completion a reward failed, one is cut, and of another a single row is masked.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.batching.pack import pack
from covey.batching.shares import steps_of
from covey.comm import LocalComm
from covey.learner.annotate import annotate
from covey.learner.backends.ddp import DDPBackend
from covey.learner.backends.single import SingleBackend
from covey.learner.update import accumulate
from covey.selftest.compare import far
from covey.training.process import ranks
from covey.types import TrainSample
from support.episodes import Episode, Row, loop_loss, within
from support.processes import run_in_processes
from support.steps import (
    CASES,
    GROUPS,
    OPTIMIZER,
    SIBLINGS,
    Case,
    alone,
    episode_rows,
    gradient,
    plan_of,
    policy,
)

NAMES = [name for name, case in CASES.items() if case.config.loss_type != "real"]
CUTS = (
    {},
    {"stream": "prefix", "max_tokens": 45},
    {"stream": "padded", "max_tokens": 1},
    {"stream": "packed", "max_tokens": 60},
)
NUM_EPISODES = GROUPS * SIBLINGS


def looped(given: Sequence[TrainSample], case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the loop over rows that are forwarded one by one."""
    model = policy("padded")
    least = -math.inf
    if case.share < 1.0:
        entropies = sorted(x for row in given if row.masked is None for x in row.annotated.entropy_N.tolist())
        least = entropies[-max(1, math.ceil(case.share * len(entropies)))]
    episodes: dict[int, Episode] = {}
    for row in given:
        here, sample = row.annotated, row.annotated.sample
        places = [i for i, on in enumerate(sample.is_trained) if on]
        targets = [sample.token_ids[i] for i in places]
        logits_TV = model.model(
            input_ids=torch.tensor(sample.token_ids[None]).long(), use_cache=False
        ).logits[0]
        logits_nV = logits_TV[[i - 1 for i in places]].double() / sample.temperature
        kept = sample.tokens.kept
        sets = None if kept is None else [ids.tolist() for ids in kept]
        nothing: list[float] = []
        drawn = Row(logits_nV.detach(), targets, nothing, nothing, nothing, nothing, False, sets)
        own = [float(within(drawn, n)[target]) for n, target in enumerate(targets)]
        episode = episodes.setdefault(sample.episode, Episode(sample.group, row.advantage, []))
        episode.rows.append(
            Row(
                logits_nV=logits_nV,
                targets=targets,
                old=own if case.is_on_policy else here.old_logprob_N.double().tolist(),
                reference=here.ref_logprob_N.double().tolist(),
                sampler=list(sample.sampler_logprobs),
                keep=[float(x >= least) for x in here.entropy_N.tolist()],
                is_masked=row.masked is not None,
                sets=sets,
            )
        )
    longest = plan_of().max_completion_length
    loss = loop_loss(list(episodes.values()), case.config, has_keep=case.share < 1.0, longest=longest)
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), named


@pytest.fixture(scope="module")
def given():
    rows = episode_rows()
    assert len({row.annotated.sample.episode for row in rows}) == NUM_EPISODES < len(rows)
    return rows


@pytest.fixture(scope="module")
def filtered():
    return episode_rows(has_sets=True)


@pytest.fixture(scope="module")
def expected(given):
    return {name: looped(given, CASES[name]) for name in NAMES}


def assert_same(actual, wanted) -> None:
    (loss, found), (expected_loss, slow) = actual, wanted
    assert loss == pytest.approx(expected_loss, rel=2e-5, abs=2e-6)
    assert found.keys() == slow.keys()
    assert far(found, slow) <= 3e-5


def added_up(given: Sequence[TrainSample], case: Case, world: int) -> tuple[float, dict[str, Tensor]]:
    """The sum over the shares of so many ranks, each computed in this process."""
    share = {"world": world, "completions_per_rank": NUM_EPISODES // world, "max_tokens": 50}
    parts = [alone(given, case, rank=rank, **share) for rank in range(world)]
    return sum(loss for loss, _ in parts), {n: sum(found[n] for _, found in parts) for n in parts[0][1]}


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_is_the_loop(name, given, expected):
    for changes in CUTS:
        assert_same(alone(given, CASES[name], **changes), expected[name])
    for world in (2, 3):
        found = added_up(given, CASES[name], world)
        assert_same(found, expected[name])
    for factor in (0.0, -1.0, 2.0):
        with pytest.raises(AssertionError):
            assert_same((found[0], {n: factor * g for n, g in found[1].items()}), expected[name])


# Each aggregation, both levels, KL, an entropy bonus and a quantile.
FILTERED = (
    *("grpo, token", "dapo, sequence", "dr_grpo, token", "sapo, on-policy", "vespo", "k3"),
    *("entropy bonus", "top entropy, dapo", "token_mask"),
)


@pytest.mark.parametrize("name", FILTERED)
def test_within_kept_sets_too(name, filtered, given):
    expected = looped(filtered, CASES[name])
    for changes in CUTS:
        assert_same(alone(filtered, CASES[name], **changes), expected)
    found = added_up(filtered, CASES[name], 2)
    assert_same(found, expected)
    assert far(found[1], alone(given, CASES[name])[1]) > 0.1
    for factor in (0.0, -1.0, 2.0):
        with pytest.raises(AssertionError):
            assert_same((found[0], {n: factor * g for n, g in found[1].items()}), expected)


@pytest.mark.parametrize("changes", CUTS)
def test_the_ratio_within_sets_is_exactly_1(changes, filtered):
    """Old logprobs and those of the update come from the same sums."""
    plan = replace(plan_of(**changes), completions_per_rank=NUM_EPISODES)
    samples = [row.annotated.sample for row in filtered]
    forward = [row.needs_forward for row in filtered]
    backend = SingleBackend(policy(plan.stream), OPTIMIZER)
    steps = steps_of(samples, forward, plan)
    old = annotate(samples, forward, steps, backend, "old", plan, LocalComm())
    rows = [
        replace(row, annotated=replace(row.annotated, old_logprob_N=own))
        for row, own in zip(filtered, old, strict=True)
    ]
    (batch,) = pack(rows, plan, rollout=0)
    sums = accumulate(batch, backend, CASES["grpo, token"].config, LocalComm())
    assert max(float(gap) for gap in sums.gaps) == 0.0
    alone_in_set = [
        k for row in rows if row.needs_forward for k in row.annotated.sample.tokens.kept.is_single
    ]
    singles = torch.cat([row.annotated.old_logprob_N for row in rows if row.needs_forward])[alone_in_set]
    assert len(singles) > 10 and (singles == 0.0).all()


@pytest.mark.multi
def test_two_processes(expected, filtered, tmp_path):
    run_in_processes(__file__, tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    wanted = [*(expected[name] for name in NAMES), *(looped(filtered, CASES[name]) for name in FILTERED)]
    for number, own in enumerate(wanted):
        assert_same((losses[number], load_file(tmp_path / f"{number}.safetensors")), own)


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    given, filtered, losses = episode_rows(), episode_rows(has_sets=True), []
    cases = [*((given, name) for name in NAMES), *((filtered, name) for name in FILTERED)]
    with ranks(2) as comm:
        plan = plan_of(world=2, rank=comm.rank, completions_per_rank=NUM_EPISODES // 2, max_tokens=40)
        for number, (rows, name) in enumerate(cases):
            backend = DDPBackend(policy("prefix"), OPTIMIZER)
            loss, found = gradient(rows, CASES[name], plan, backend, comm)
            losses.append(loss)
            backend.close()
            if comm.rank == 0:
                save_file({n: g.contiguous() for n, g in found.items()}, work / f"{number}.safetensors")
    if comm.rank == 0:
        (work / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
