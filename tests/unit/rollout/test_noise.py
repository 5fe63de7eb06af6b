"""Sampling noise: a pure function of its key, and draws that follow the softmax.

Statistical bounds fail for a right implementation with a chance below one in a million, and every seed is
fixed: a failure is a change of the function, not bad luck.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from covey.rollout import noise as noise_module
from covey.rollout.noise import Ahead, gumbel, row_key, sample, token_table
from covey.types import TurnId

CPU = torch.device("cpu")
KEY = TurnId(seed=1, split="train", rollout=2, attempt=0, prompt_id=3, sibling=4)
EULER = 0.5772156649


def noise(keys: list[int], positions: list[int], vocab: int) -> torch.Tensor:
    return gumbel(torch.tensor(keys), torch.tensor(positions), token_table(vocab, CPU))


def keys_of(count: int) -> list[int]:
    return [row_key(replace(KEY, sibling=i)) for i in range(count)]


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


def test_row_keys_are_the_same_on_every_machine():
    # BLAKE2b of 32 bits over "1/train/2/0/3/4" is the bytes f0 2e b4 42, read from the low end.
    assert row_key(KEY) == 0x42B42EF0
    assert 0 <= row_key(KEY) < 2**32


def test_every_field_of_a_key_matters():
    changed = [
        replace(KEY, seed=2),
        replace(KEY, split="val"),
        replace(KEY, rollout=3),
        replace(KEY, attempt=1),
        replace(KEY, prompt_id=4),
        replace(KEY, sibling=5),
        # Digits that run into each other, were the fields not kept apart.
        replace(KEY, rollout=20, attempt=3),
        replace(KEY, rollout=2, attempt=0, prompt_id=34, sibling=4),
    ]
    assert len({row_key(k) for k in (KEY, *changed)}) == 1 + len(changed)


@pytest.mark.parametrize("vocab", [1, 7, 96, 1001])
def test_noise_depends_on_nothing_but_its_key(vocab):
    keys, positions = keys_of(9), list(range(9))
    whole = noise(keys, positions, vocab)
    order = [4, 0, 8, 2, 7, 1, 3, 6, 5]
    assert torch.equal(noise([keys[i] for i in order], [positions[i] for i in order], vocab), whole[order])
    for i in range(9):
        assert torch.equal(noise(keys[i : i + 1], positions[i : i + 1], vocab)[0], whole[i])
    # A token has the same noise under a larger vocabulary: padding the head changes no draw.
    assert torch.equal(noise(keys, positions, vocab + 13)[:, :vocab], whole)


@pytest.mark.parametrize("vocab", [501, 1501, 1536])
def test_draws_do_not_depend_on_the_batch(vocab):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(33, vocab, generator=generator)
    temperature = 0.5 + torch.rand(33, generator=generator)
    keys, positions = torch.tensor(keys_of(33)), torch.arange(33)
    table = token_table(vocab, CPU)
    token, logprob, _ = sample(logits, temperature, keys, positions, table)
    order = torch.randperm(33, generator=generator)
    again, again_logprob, _ = sample(logits[order], temperature[order], keys[order], positions[order], table)
    assert torch.equal(again, token[order])
    assert torch.equal(again_logprob, logprob[order])
    for i in range(33):
        one = slice(i, i + 1)
        alone, *_ = sample(logits[one], temperature[one], keys[one], positions[one], table)
        assert int(alone) == int(token[i])


@pytest.mark.parametrize("block", [512, 3, 4, 1])  # the whole vocabulary of 8 at once, or 3, 2 and 8 blocks
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_draws_follow_the_softmax(temperature, block, monkeypatch):
    monkeypatch.setattr(noise_module, "_BLOCK", block)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0, 1.5, 0.0])
    num = 40_000
    keys = torch.tensor(keys_of(num // 8)).repeat_interleave(8)
    positions = torch.arange(8).repeat(num // 8)
    token, *_ = sample(
        logits.expand(num, -1), torch.full((num,), temperature), keys, positions, token_table(8, CPU)
    )
    counts = torch.bincount(token, minlength=8).double()

    def chi_square(probability: torch.Tensor) -> float:
        expected = num * probability.double()
        return float(((counts - expected).square() / expected).sum())

    # Seven degrees of freedom: 40.5 is passed with a chance of 1e-6.
    assert chi_square((logits / temperature).softmax(-1)) < 40.5
    for wrong in (1.1 * temperature, 0.9 * temperature):
        assert chi_square((logits / wrong).softmax(-1)) > 40.5


@pytest.mark.parametrize("vocab", [50, 1300])
def test_logprobs_are_of_the_scaled_softmax(vocab):
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(200, vocab, generator=generator)
    temperature = 0.3 + torch.rand(200, generator=generator)
    token, logprob, _ = sample(
        logits, temperature, torch.tensor(keys_of(200)), torch.zeros(200).long(), token_table(vocab, CPU)
    )
    expected = (
        (logits.double() / temperature.double()[:, None]).log_softmax(-1).gather(1, token[:, None])[:, 0]
    )
    assert logprob.dtype == torch.float32
    assert float((logprob - expected).abs().max()) < 2e-5
    unscaled = logits.double().log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert float((logprob - unscaled).abs().max()) > 0.1


def test_a_token_that_cannot_be_is_never_drawn_from_any_block():
    # All but one token of the last, shorter block are impossible; places behind the vocabulary are no tokens.
    logits = torch.full((400, 1300), float("-inf"))
    logits[:, [3, 700, 1290]] = torch.tensor([0.0, 1.0, 2.0])
    keys, zeros = torch.tensor(keys_of(400)), torch.zeros(400).long()
    token, logprob, _ = sample(logits, torch.ones(400), keys, zeros, token_table(1300, CPU))
    share = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    counts = torch.stack([(token == t).sum() for t in (3, 700, 1290)])
    assert int(counts.sum()) == 400
    # Two degrees of freedom: 27.6 is passed with a chance of 1e-6.
    assert float(((counts - 400 * share).square() / (400 * share)).sum()) < 27.6
    assert bool(logprob.isfinite().all())


def test_half_precision_logits_are_drawn_from_in_float32():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    keys, zeros, table = torch.tensor(keys_of(20)), torch.zeros(20).long(), token_table(50, CPU)
    low = sample(logits, torch.ones(20), keys, zeros, table)
    high = sample(logits.float(), torch.ones(20), keys, zeros, table)
    assert torch.equal(low[0], high[0])
    assert torch.equal(low[1], high[1])


@pytest.mark.parametrize("first", [1, 8])
@pytest.mark.parametrize("cells", [1 << 18, 150])  # as many positions as it likes, or one of 3 x 50
def test_noise_made_ahead_is_the_noise_of_each_position(first, cells, monkeypatch):
    monkeypatch.setattr(noise_module, "_AHEAD_CELLS", cells)
    keys, start, table = torch.tensor(keys_of(3)), torch.tensor([0, 7, 2]), token_table(50, CPU)
    ahead = Ahead(keys, start, table, first)
    for step in range(20):
        assert torch.equal(ahead.next(), gumbel(keys, start + step, table))


def test_a_draw_with_noise_made_ahead_is_the_draw_without_it():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(3))
    keys, zeros, table = torch.tensor(keys_of(20)), torch.zeros(20).long(), token_table(50, CPU)
    ahead = Ahead(keys, zeros, table)
    drawn = [sample(logits, torch.ones(20), keys, zeros + i, table, ahead)[0] for i in range(5)]
    plain = [sample(logits, torch.ones(20), keys, zeros + i, table)[0] for i in range(5)]
    assert torch.equal(torch.stack(drawn), torch.stack(plain))
    assert not torch.equal(drawn[0], drawn[1])


def test_moments_and_range_of_the_gumbel_noise():
    value = noise(keys_of(1000), [0] * 1000, 1000).double()
    # A million values: the mean's standard error is 0.0013, the variance's (kurtosis 5.4) 0.0035.
    assert float(value.mean()) == pytest.approx(EULER, abs=5 * 0.0013)
    assert float(value.var()) == pytest.approx(math.pi**2 / 6, abs=5 * 0.0035)
    assert bool(value.isfinite().all())
    assert float(value.min()) > -2.82
    # The largest of a million has median ln(1e6) + 0.37 = 14.2; above 28 is one in a million.
    assert 11.0 < float(value.max()) < 23.0


def test_positions_siblings_and_tokens_are_uncorrelated():
    # 100,000 pairs: a correlation of 0.016 is five standard errors.
    keys = keys_of(1001)
    base = noise(keys[:1000], [5] * 1000, 100)
    others = {
        "next position": noise(keys[:1000], [6] * 1000, 100),
        "far position": noise(keys[:1000], [5 + 4096] * 1000, 100),
        "next sibling": noise(keys[1:], [5] * 1000, 100),
        "next token": noise(keys[:1000], [5] * 1000, 101)[:, 1:],
    }
    assert correlation(base, base) > 0.999
    for name, other in others.items():
        assert abs(correlation(base, other)) < 0.016, name


def mix(x: int) -> int:
    """The 32-bit mixer in plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_the_noise_against_plain_integers():
    # Tensors hold 32-bit numbers in int64, whose products wrap: the low bits must be those of exact
    # arithmetic.
    keys, positions, vocab = [0, 1, 2**32 - 1, 123456789], [0, 4095, 7, 2**31], 300
    got = noise(keys, positions, vocab)
    for row, (key, position) in enumerate(zip(keys, positions, strict=True)):
        bits = [mix(mix(key ^ mix(position)) ^ mix(v * 0x9E3779B1 % 2**32)) for v in range(vocab)]
        expected = [-math.log(-math.log1p(-(b + 0.5) / 2**32)) for b in bits]
        assert got[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_token_table_is_a_bijection():
    table = token_table(200_000, CPU)
    assert table.dtype == torch.int64
    assert int(table.min()) >= 0
    assert int(table.max()) < 2**32
    assert table.unique().numel() == 200_000
