"""The cells of the contract: what a run of five steps is made of, and which of them are run when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from contract.backends import Kind
from contract.rollouts import ROWS_PER_RANK, SIBLINGS, Rows
from contract.uneven import Share

STEPS = 5
SAVED = 2
"""The step that is saved."""

TUNERS = ("full", "lora", "dora")
ACCUMULATIONS = (1, 4, 32)
ROWS: tuple[Rows, ...] = ("equal", "ragged", "an empty half", "a masked half")
DTYPES = ("float32", "bfloat16")
LAYOUTS = ("prefix", "packed", "padded")
# Tied embeddings and untied ones.
FAMILIES = ("qwen2", "llama")
LOSSES = ("dapo", "grpo")

# Tokens that a forward pass holds, so that there are at least as many passes as typed. One row is never
# refused: with 1 each row has a pass of its own.
_BUDGETS = {
    1: dict.fromkeys(LAYOUTS, 100_000),
    4: {"prefix": 50, "packed": 100, "padded": 170},
    32: dict.fromkeys(LAYOUTS, 1),
}
# Five steps from here move the weights by about a thousandth, and most tokens far enough to be clipped.
LEARNING_RATE = 1e-3
# Smaller than the norm of any gradient here.
MAX_GRAD_NORM = 0.05
# AdamW with a small epsilon forgets how large a gradient is: with one as large as the elements of a clipped
# gradient are here, its weights tell it from one that was doubled, or clipped twice. They also follow a
# gradient smoothly, so that rounding is not made into a whole step.
EPSILON = 1e-3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is learnt: all that changes the gradient, in exact arithmetic. `world` only says how many rows a
    step has, and which of them are masked."""

    tuner: str = "full"
    rows: Rows = "ragged"
    world: int = 1
    family: str = "qwen2"
    loss: str = "dapo"

    @property
    def has_kl(self) -> bool:
        """With a KL term a row without an advantage is forwarded, so that no half of a step is empty."""
        return self.rows != "an empty half"


@dataclass(frozen=True, kw_only=True)
class Cell(Problem):
    """A problem, and how its steps are computed."""

    accumulation: int = 1
    dtype: str = "float32"
    layout: str = "prefix"
    owned: Share = "evenly"
    dealt: Share = "evenly"

    def __str__(self) -> str:
        ranks = f"{self.world} process{'es' if self.world > 1 else ''}"
        names = (self.tuner, ranks, f"accumulation {self.accumulation}", self.shared_rows, self.dtype)
        return ", ".join((*names, self.layout, self.family, self.loss))

    @property
    def shared_rows(self) -> str:
        """The kind of its rows, and the ranks that own and forward them where they are not even."""
        owned = "" if self.owned == "evenly" else f", owned by {self.owned}"
        dealt = "" if self.dealt == "evenly" else f", dealt to {self.dealt}"
        return f"{self.rows}{owned}{dealt}"

    @property
    def problem(self) -> Problem:
        """The problem of this cell."""
        return Problem(**{name: getattr(self, name) for name in asdict(Problem())})


def oracle(problem: Problem, dtype: str = "float32") -> Cell:
    """The whole step in one forward pass of padded rows, in one process.

    Float32, because that is the most precise that a user can type, and its rounding, measured against the
    same in float64 by a test here, is ten times below the bound of 1e-5.
    """
    return Cell(**asdict(problem), dtype=dtype, layout="padded")


def options(cell: Cell, model: Path, replay: Path, output: Path, *, processes: int) -> dict[str, Any]:
    """What is typed for a cell; an oracle takes the rows of both ranks in one of the `processes`."""
    rows = ROWS_PER_RANK * cell.world // processes
    tuner = {"lora": {"lora_rank": 4}, "dora": {"lora_rank": 4, "use_dora": True}, "full": {}}[cell.tuner]
    return {
        "model": str(model),
        "dataset": ["quickstart#64"],
        "reward_funcs": ["accuracy"],
        "replay_rollouts": str(replay),
        "output_dir": str(output),
        "tuner_type": "full" if cell.tuner == "full" else "lora",
        **tuner,
        "num_generations": SIBLINGS,
        "per_device_train_batch_size": rows // cell.accumulation,
        "gradient_accumulation_steps": cell.accumulation,
        "max_tokens_per_micro_batch": _BUDGETS[cell.accumulation][cell.layout],
        "max_completion_length": 32,
        "mask_truncated_completions": True,
        "loss_type": cell.loss,
        "beta": 0.04 if cell.has_kl else 0.0,
        "num_iterations": 2,
        "epsilon": 0.1,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "max_grad_norm": MAX_GRAD_NORM,
        "torch_dtype": cell.dtype,
        "max_steps": STEPS,
        "save_steps": 100,
    }


def full(kind: Kind) -> list[Cell]:
    """Every cell of a backend; layout, model and loss are drawn, and DoRA has those of one accumulation."""
    draw = random.Random(0)
    found = [
        cell
        for values in itertools.product(TUNERS[:2], ROWS, kind.worlds, ACCUMULATIONS, DTYPES)
        if reason_against(cell := _drawn(draw, values)) is None
    ]
    dora = [replace(c, tuner="dora") for c in found if (c.tuner, c.accumulation) == ("lora", 4)]
    return [*found, *dora, *uneven(kind)]


def uneven(kind: Kind) -> list[Cell]:
    """The cells whose ranks are not even, of a backend of several."""
    return [replace(cell, world=2) for cell in UNEVEN] if kind.worlds[-1] == 2 else []


def _drawn(draw: random.Random, values: Sequence[Any]) -> Cell:
    given = dict(zip(("tuner", "rows", "world", "accumulation", "dtype"), values, strict=True))
    return Cell(layout=draw.choice(LAYOUTS), family=draw.choice(FAMILIES), loss=draw.choice(LOSSES), **given)


def reason_against(cell: Cell) -> str | None:
    """Why a cell makes no sense, where it makes none."""
    if cell.world == 1 and cell.rows not in ROWS[:2]:
        return f"{cell.rows} in one process is a step without a row to learn from, which is skipped"
    return None


def of_test(kind: Kind) -> list[Cell]:
    """The cells that `make test` runs: few in which every two choices meet that can meet, one of DoRA, two of
    one row a pass, which take longest, and two of tokens that were drawn from kept sets. Of a variant it is
    one with all weights, one of LoRA and one of kept sets."""
    names = ("tuner", "rows", "world", "accumulation", "dtype", "layout")
    every = [
        replace(cell, family=family, loss=loss)
        for family, loss in zip(FAMILIES, LOSSES, strict=True)
        for values in itertools.product(TUNERS[:2], ROWS, kind.worlds, ACCUMULATIONS[:2], DTYPES, LAYOUTS)
        if reason_against(cell := Cell(**dict(zip(names, values, strict=True)))) is None
    ]
    left = set(itertools.chain.from_iterable(map(_pairs, every)))
    chosen = []
    while left:
        best = max(every, key=lambda cell: len(left.intersection(_pairs(cell))))
        chosen.append(best)
        left.difference_update(_pairs(best))
    world = kind.worlds[-1]
    masked: Rows = "ragged" if world == 1 else "a masked half"
    more = [
        Cell(rows="ragged", world=world, accumulation=32),
        Cell(tuner="lora", rows=masked, world=world, accumulation=32, dtype="bfloat16", layout="packed"),
        Cell(tuner="dora", rows="ragged", world=world, accumulation=4, layout="packed"),
        Cell(rows="filtered", world=world, accumulation=4),
        Cell(tuner="lora", rows="filtered", world=world, accumulation=4, layout="padded", loss="grpo"),
    ]
    if kind.is_variant:
        return [more[0], replace(more[1], accumulation=4), more[3], *uneven(kind)[:3]]
    return [*chosen, *more, *uneven(kind)[:-1]]


def _pairs(cell: Cell) -> Iterator[tuple[tuple[str, object], ...]]:
    return itertools.combinations(asdict(cell).items(), 2)


UNEVEN = (
    Cell(rows="ragged", accumulation=4, layout="packed", owned="0 but one"),
    Cell(rows="ragged", accumulation=4, layout="packed", owned="0", dealt="1"),
    Cell(rows="two sequences", tuner="lora", owned="0", dealt="1 but one"),
    Cell(rows="two sequences", loss="grpo", accumulation=4, layout="padded", owned="1 but one"),
    Cell(rows="an empty half", tuner="lora", accumulation=4, family="llama", dealt="1 but one"),
    Cell(rows="a masked half", tuner="lora", accumulation=4, dtype="bfloat16", owned="1", dealt="0"),
    Cell(rows="ragged", accumulation=32, loss="grpo", owned="0 but one", dealt="0 but one"),
)
"""Ranks of which one owns the tokens of a rollout, or forwards the rows of a step, but for one or with none
left for the other. `make test` leaves out the last one, and of a variant takes the first three."""

STOPPED = (
    Cell(world=2, accumulation=4, rows="ragged"),
    Cell(tuner="lora", world=2, accumulation=4, rows="a masked half", dtype="bfloat16"),
)
"""Runs that are stopped and resumed: all weights, and an adapter in bfloat16."""

NONSENSE = {
    "KL of an empty half": "with a KL term a row without an advantage is forwarded, so no half is empty",
}
"""Further cells that are none, with the reason."""
