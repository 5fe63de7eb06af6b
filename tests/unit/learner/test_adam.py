"""AdamW with moments of 8 bits beside that of 32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from covey.errors import CheckpointError
from covey.learner.adam import Adam
from support.options import learner

# One of 8 bits in blocks, and two that are too small for them.
SHAPES = ((80, 64), (8, 8), (300,))
RATE = 1e-2


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def adam(kind: str, masters: list[nn.Parameter], decay: float = 0.1) -> Adam:
    return Adam(masters, learner(optim=kind, adam_beta2=0.99, weight_decay=decay))


def step(optimizer: Adam, masters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step(RATE)
    assert all(master.grad is None for master in masters)


def moved(kind: str, num_steps: int, **how: float) -> list[Tensor]:
    masters = weights()
    optimizer = adam(kind, masters, **how)
    for seed in range(num_steps):
        step(optimizer, masters, seed)
    return [m.detach() - start.detach() for m, start in zip(masters, weights(), strict=True)]


def test_the_updates_are_those_of_32_bits_but_for_rounding() -> None:
    rounded, exact = moved("adamw_8bit", 8), moved("adamw_torch", 8)
    gaps = [float((a - b).norm() / b.norm()) for a, b in zip(rounded, exact, strict=True)]
    # 8 bits round, and small tensors do not.
    assert 1e-4 < gaps[0] < 0.05
    assert gaps[1] < 1e-5 and gaps[2] < 1e-5
    undecayed = moved("adamw_8bit", 8, decay=0.0)
    assert not torch.equal(rounded[1], undecayed[1]) and torch.equal(rounded[2], undecayed[2])


def test_the_state_is_of_8_bits_and_goes_on_as_it_was() -> None:
    first, second = weights(), weights()
    one, other = adam("adamw_8bit", first), adam("adamw_8bit", second)
    for seed in range(3):
        step(one, first, seed)
    for here, there in zip(first, second, strict=True):
        other.load(there, {name: tensor.clone() for name, tensor in one.state(here).items()})
        there.data.copy_(here.data)
    large = one.state(first[0])
    assert large["state1"].dtype == large["state2"].dtype == torch.uint8
    # 2 bytes a weight, and a scale of 4 for each 256 of either moment.
    held = sum(t.numel() * t.element_size() for t in one.moments())
    assert held == 80 * 64 * 2 + 2 * 4 * (80 * 64 // 256) + 8 * (64 + 300)
    for seed in range(3, 6):
        step(one, first, seed)
        step(other, second, seed)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kinds", [("adamw_torch", "adamw_8bit"), ("adamw_8bit", "adamw_torch")])
def test_state_of_the_other_kind_is_refused(kinds: tuple[str, str]) -> None:
    masters = weights()
    saver, loader = (adam(kind, masters) for kind in kinds)
    step(saver, masters, 0)
    with pytest.raises(CheckpointError, match=f"has the moments of optim {kinds[0]}, "):
        loader.load(masters[0], saver.state(masters[0]))
