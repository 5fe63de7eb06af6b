"""Every backend gives the gradient, the steps and the numbers of one process.

Proven on replayed rollouts of tiny models: five optimizer steps, two on each rollout, with a KL term, clipped
ratios and clipped gradients, against one process that takes the whole step in one forward pass of padded
rows. The oracle itself is held to plain autograd in float64. A pairwise part of the matrix is run here, all
of it by `make contract`; all guards of a run are on.

Not proven here: NCCL, several machines, and models whose rounding is larger than that of three layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from contract import plain
from contract.backends import KINDS, Kind
from contract.cells import STOPPED, Cell, of_test, oracle
from contract.compare import Gap, broken, gaps
from contract.faults import FAULTS
from contract.matrix import Bench, Trial, fault_cell, resume_gaps
from contract.worker import Left
from covey.selftest.compare import far

SINGLE = KINDS[0]
Resumed = Mapping[tuple[Kind, Kind], Mapping[Cell, Sequence[Gap]]]
TESTED = [kind for kind in KINDS if not kind.is_long]
MAIN = [kind for kind in TESTED if not kind.is_variant]
ORACLES = (
    Cell(rows="ragged", world=2, family="llama", loss="grpo"),
    Cell(rows="a masked half", world=2),
    Cell(rows="filtered", world=2, family="llama", loss="grpo"),
    Cell(rows="equal", tuner="lora", dtype="bfloat16"),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(tmp_path_factory.mktemp("contract"))
    tested = [cell for kind in TESTED for cell in of_test(kind)]
    faulty = [fault_cell(kind, fault) for kind in MAIN for fault in FAULTS]
    made.run_oracles(SINGLE, [*ORACLES, *tested, *faulty])
    return made


@pytest.fixture(scope="module")
def trials(bench: Bench) -> dict[Kind, Trial]:
    """Every backend with its cells; those that are no variant with all faults, and stopped."""
    made = {SINGLE: Trial(bench, SINGLE, of_test(SINGLE), stopped=STOPPED)}
    for kind in TESTED[1:]:
        more = {} if kind.is_variant else {"faults": FAULTS, "stopped": STOPPED}
        made[kind] = Trial(bench, kind, of_test(kind), **more)
    return made


@pytest.fixture(scope="module")
def resumed(trials: dict[Kind, Trial]) -> Resumed:
    """The stopped runs: each backend goes on with its own and with those of one process, one process with
    those of each."""
    single, main = trials[SINGLE], [trials[kind] for kind in MAIN]
    asked = [(single, main), *((trial, [trial, single]) for trial in main)]
    return {
        (other.kind, by.kind): resume_gaps(left, other, by)
        for by, others in asked
        for other, left in zip(others, by.go_on(others), strict=True)
    }


@pytest.mark.multi
@pytest.mark.parametrize("kind", TESTED, ids=lambda kind: kind.name)
def test_every_cell_is_within_its_bounds(kind: Kind, bench: Bench, trials: dict[Kind, Trial]) -> None:
    faults = {str(cell): broken(bench.gaps(cell, left)) for cell, left in trials[kind].cells.items()}
    assert faults and {cell: bad for cell, bad in faults.items() if bad} == {}


@pytest.mark.multi
@pytest.mark.parametrize("kind", MAIN, ids=lambda kind: kind.name)
def test_a_resumed_run_is_the_run_that_went_on(kind: Kind, resumed: Resumed) -> None:
    """In the same layout to the bit; from and to one process with the same masters and moments."""
    for pair in ((kind, kind), (kind, SINGLE), (SINGLE, kind)):
        assert [broken(resumed[pair][cell]) for cell in STOPPED] == [[], []]


@pytest.mark.multi
@pytest.mark.usefixtures("resumed")
@pytest.mark.parametrize("kind", MAIN, ids=lambda kind: kind.name)
def test_every_fault_is_named(kind: Kind, trials: dict[Kind, Trial]) -> None:
    """By the guard that can see it, or where none can by a comparison of the contract."""
    named = trials[kind].named
    assert {f.name for f in FAULTS} == {f.name for f in named} | kind.nonsense.keys()
    assert {f.name: by for f, by in named.items() if not by.startswith(f.named_by(kind))} == {}


# -- the oracle, and the comparisons themselves


@pytest.mark.parametrize("cell", ORACLES[:3], ids=str)
def test_the_oracle_has_the_gradient_of_float64(cell: Cell, bench: Bench) -> None:
    expected = plain.gradient(bench.model(cell.family), bench.replay(cell), cell.loss)
    assert far(bench.oracle(cell.problem).gradients[0], expected) < 2e-6


def _gradients(left: Left, factor: float) -> Left:
    return replace(left, gradients=[{n: factor * g for n, g in own.items()} for own in left.gradients])


def _movement(left: Left, factor: float) -> Left:
    start = left.weights[0]
    moved = {
        step: {n: start[n] + factor * (w - start[n]) for n, w in own.items()} if step else own
        for step, own in left.weights.items()
    }
    return replace(left, weights=moved)


def _metric(name: str) -> Callable[[Left, float], Left]:
    def changed(left: Left, factor: float) -> Left:
        return replace(left, metrics=[{**line, name: factor * line[name]} for line in left.metrics])

    return changed


# What is spoiled, and the comparison that has to see it.
SPOILED: Mapping[str, tuple[Callable[[Left, float], Left], str]] = {
    "gradients": (_gradients, "gradient"),
    "movement": (_movement, "movement after step 5"),
    "grad_norm": (_metric("grad_norm"), "logged norm of the first gradient"),
    "grad_norm_clipped": (_metric("grad_norm_clipped"), "clipped norm"),
    **{name: (_metric(name), f"metric {name}") for name in ("entropy", "num_tokens", "kl", "grad_norm")},
    "loss": (_metric("loss"), "loss"),
}


@pytest.mark.parametrize("factor", (0.0, -1.0, 2.0))
@pytest.mark.parametrize("given", ORACLES, ids=str)
def test_what_is_zeroed_negated_or_doubled_fails(given: Cell, factor: float, bench: Bench) -> None:
    cell, good = oracle(given.problem, given.dtype), bench.oracle(given.problem, given.dtype)
    assert broken(bench.gaps(cell, good)) == []
    seen = {}
    for name, (spoil, what) in SPOILED.items():
        (gap,) = [gap for gap in bench.gaps(cell, spoil(good, factor)) if gap.what == what]
        seen[name] = not gap.is_within
    assert seen == dict.fromkeys(SPOILED, True)


def _other_order(left: Left) -> Left:
    return replace(left, names=list(reversed(left.names)))


def _tensor_less(left: Left) -> Left:
    return replace(left, names=left.names[:-1])


def _step_less(left: Left) -> Left:
    return replace(left, gradients=left.gradients[:-1])


def _one_token(left: Left) -> Left:
    """A token of the step is left out of one tensor."""
    name = left.names[3]
    first = {**left.gradients[0], name: left.gradients[0][name] * (1 - 1e-3)}
    return replace(left, gradients=[first, *left.gradients[1:]])


@pytest.mark.parametrize(
    "spoil", (_other_order, _tensor_less, _step_less, _one_token), ids=lambda f: f.__name__
)
def test_what_is_another_result_fails(spoil: Callable[[Left], Left], bench: Bench) -> None:
    problem = ORACLES[0].problem
    assert broken(gaps(spoil(bench.oracle(problem)), bench.oracle(problem), oracle(problem)))
