"""The gradient of every loss, with every mask, correction and bonus, does not depend on how its step is cut.

Proven on one step of three groups of four with ragged lengths, a failed row, a cut and masked one, and a
group without signal: in one forward pass; row by row on padded rows; packed and cut by tokens, so that groups
lie in several micro-batches; with groups and siblings in another order; and on two gloo processes with
unequal work, where the middle group lies on both. Old, reference and sampler's logprobs are off the policy's.

Not proven here: whole runs, of which test_split.py has some.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.learner.backends.ddp import DDPBackend
from covey.training.process import ranks
from support.steps import CASES, OPTIMIZER, alone, distance, gradient, plan_of, policy, reordered, rows

CUTS = {"stream": "prefix", "max_tokens": 45}, {"stream": "padded", "max_tokens": 1}
PACKED = {"stream": "packed", "max_tokens": 60}


@pytest.fixture(scope="module")
def given():
    return rows()


@pytest.fixture(scope="module")
def whole(given):
    """The reference: every case in one forward pass."""
    return {name: alone(given, case) for name, case in CASES.items()}


def assert_same(actual, expected) -> None:
    (loss, found), (expected_loss, wanted) = actual, expected
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    assert distance(found, wanted) <= 1e-5


@pytest.mark.parametrize("name", CASES)
def test_one_process(name, given, whole):
    for changes in CUTS:
        assert_same(alone(given, CASES[name], **changes), whole[name])
    moved = alone(reordered(given, 3), CASES[name], **PACKED)
    assert_same(moved, whole[name])
    for factor in (0.0, -1.0, 2.0):
        with pytest.raises(AssertionError):
            assert_same((moved[0], {n: factor * g for n, g in moved[1].items()}), whole[name])


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
        for pair in itertools.combinations(whole, 2)
        if distance(whole[pair[0]][1], whole[pair[1]][1]) < 1e-4
    }
    pairs = itertools.combinations(whole, 2)
    assert same == {frozenset(pair) for pair in pairs if same_as(pair[0]) == same_as(pair[1])}


@pytest.mark.multi
def test_two_processes(whole, tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"),
        *(__file__, str(tmp_path)),
    ]
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    for number, name in enumerate(CASES):
        found = load_file(tmp_path / f"{number}.safetensors")
        assert_same((losses[name], found), whole[name])


def _main(work: Path) -> None:
    torch.set_num_threads(1)
    given, losses = rows(), {}
    with ranks(2) as comm:
        plan = plan_of(world=2, rank=comm.rank, completions_per_rank=6, max_tokens=40)
        for number, (name, case) in enumerate(CASES.items()):
            backend = DDPBackend(policy("prefix"), OPTIMIZER)
            losses[name], found = gradient(given, case, plan, backend, comm)
            backend.close()
            if comm.rank == 0:
                save_file(
                    {n: g.contiguous().clone() for n, g in found.items()}, work / f"{number}.safetensors"
                )
    if comm.rank == 0:
        (work / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
