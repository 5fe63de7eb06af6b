"""The gradient of every loss, with every mask, correction and bonus, does not depend on how its step is cut.

Proven on one step of three groups of four with ragged lengths, a failed row, a cut and masked one, and a
group without signal: in one forward pass; row by row on padded rows; packed and cut by tokens, so that groups
lie in several micro-batches; with groups and siblings in another order; and on two gloo processes with
unequal work, where the middle group lies on both. Old, reference and sampler's logprobs are off the policy's.
Losses that rewards of steps go with are proven with these too: a completion has up to four steps.

Not proven here: whole runs, of which test_split.py has some.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.learner.backends.ddp import DDPBackend
from covey.selftest.compare import far
from covey.training.process import ranks
from support.exactness import GRADIENT
from support.processes import run_in_processes
from support.steps import (
    CASES,
    OPTIMIZER,
    alone,
    gradient,
    plan_of,
    policy,
    reordered,
    rows,
    stepped_rows,
)

CUTS = {"stream": "prefix", "max_tokens": 45}, {"stream": "padded", "max_tokens": 1}
PACKED = {"stream": "packed", "max_tokens": 60}
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
# What rewards of steps go with.
OF_STEPS = [f"{loss}, {level}" for loss in LOSSES for level in ("token", "sequence_token")]
OF_STEPS += ["off-policy mask", "top entropy, grpo", "k3"]
EVERY = [*(("completions", name) for name in CASES), *(("steps", name) for name in OF_STEPS)]


def rows_of_each_kind():
    return {"completions": rows(), "steps": stepped_rows()}


@pytest.fixture(scope="module")
def given():
    return rows_of_each_kind()


@pytest.fixture(scope="module")
def whole(given):
    """The reference: every case in one forward pass."""
    return {(kind, name): alone(given[kind], CASES[name]) for kind, name in EVERY}


def assert_same(actual, expected) -> None:
    (loss, found), (expected_loss, wanted) = actual, expected
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    assert far(found, wanted) <= GRADIENT


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_one_process(kind, name, given, whole):
    expected = whole[kind, name]
    for changes in CUTS:
        assert_same(alone(given[kind], CASES[name], **changes), expected)
    moved = alone(reordered(given[kind], 3), CASES[name], **PACKED)
    assert_same(moved, expected)
    for factor in (0.0, -1.0, 2.0):
        with pytest.raises(AssertionError):
            assert_same((moved[0], {n: factor * g for n, g in moved[1].items()}), expected)


def test_steps_are_another_gradient_than_their_mean(whole):
    flat = stepped_rows(flat=True)
    for name in ("dapo, token", "grpo, sequence_token"):
        assert far(alone(flat, CASES[name])[1], whole["steps", name][1]) > 0.05


def test_cases_differ(whole):
    """The comparison is not blind: no two cases agree but those that have to.

    bnpo and dapo are one loss here. Where all tokens of a completion weigh the same, the gradient at the
    level sequence_token is that at sequence; with tokens masked, or weighed by fipo, it is not.
    """

    def same_as(name):
        plain = name.replace("bnpo,", "dapo,")
        return plain if "fipo" in name else plain.replace(", sequence_token", ", sequence")

    same = {
        frozenset(pair)
        for pair in itertools.combinations(CASES, 2)
        if far(*(whole["completions", name][1] for name in pair)) < 1e-4
    }
    pairs = itertools.combinations(CASES, 2)
    assert same == {frozenset(pair) for pair in pairs if same_as(pair[0]) == same_as(pair[1])}


@pytest.mark.multi
def test_two_processes(whole, tmp_path):
    run_in_processes(__file__, tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    for number, name in enumerate(EVERY):
        assert_same((losses[number], load_file(tmp_path / f"{number}.safetensors")), whole[name])


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    given, losses = rows_of_each_kind(), []
    with ranks(2) as comm:
        plan = plan_of(world=2, rank=comm.rank, completions_per_rank=6, max_tokens=40)
        for number, (kind, name) in enumerate(EVERY):
            backend = DDPBackend(policy("prefix"), OPTIMIZER)
            loss, found = gradient(given[kind], CASES[name], plan, backend, comm)
            losses.append(loss)
            backend.close()
            if comm.rank == 0:
                save_file({n: g.contiguous() for n, g in found.items()}, work / f"{number}.safetensors")
    if comm.rank == 0:
        (work / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
