"""The C library: its products, its draws, how it is compiled, and what it computes for other processors."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from covey.kernels.cpu import decoder as decoder_module
from covey.kernels.cpu import library as library_module
from covey.kernels.cpu.decoder import compiled_llama
from covey.kernels.cpu.library import open_library
from covey.kernels.protocol import DrawInputs
from covey.models.policy import Policy
from covey.rollout.noise import sample, token_table
from support.models import VOCAB, random_model
from support.processors import WARNINGS, flags, library_for, processors

# Where there are tiles also what multiplies bfloat16 without them.
TARGETS = (*processors(), *(("cooperlake",) if "amx_bf16" in flags() else ()))


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    """What threads share is part of what is tested."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=TARGETS)
def library(request, tmp_path_factory) -> ctypes.CDLL:
    """The library as it is compiled for a processor."""
    return library_for(request.param, tmp_path_factory)


def policy_of(family: str, **changes: object) -> Policy:
    return Policy(random_model(family, **changes)).eval()


@pytest.fixture(params=["panels", "as they lie"])
def weights(request, monkeypatch):
    """With copies of the weights in panels, and without."""
    if request.param != "panels":
        monkeypatch.setattr(decoder_module, "_PANELLED", 0)


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 40])
def test_products_are_those_of_torch(library, rows):
    policy = policy_of("llama")
    step = compiled_llama(library, policy, 8)
    assert step is not None
    hidden = torch.randn(rows, 64)
    expected = policy.logits(hidden)
    assert torch.allclose(step.logits(hidden), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(step.logits(2 * hidden), expected, rtol=1e-5, atol=1e-5)


# 340 words are no whole number of tiles, 40 rows of a width of 64 more than two of them.
@pytest.mark.parametrize("vocab", [VOCAB, 340])
@pytest.mark.parametrize("width", [64, 72, 24])
@pytest.mark.parametrize("rows", [1, 5, 6, 13, 40])
def test_products_in_bfloat16_are_exact_sums_rounded_once(library, width, rows, vocab):
    policy = policy_of("llama", hidden_size=width, vocab_size=vocab).to(torch.bfloat16)
    step = compiled_llama(library, policy, 8)
    assert step is not None
    hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).bfloat16()
    exact = hidden.double() @ policy.model.get_output_embeddings().weight.double().T
    actual = step.logits(hidden).double()
    # Half a unit in the last place; sums in float32 land on the other side of a middle now and then.
    assert torch.allclose(actual, exact, rtol=1.01 * 2**-8, atol=1e-6)
    assert float((actual == exact.bfloat16()).double().mean()) > 0.99


@pytest.mark.usefixtures("weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_what_it_is_batched_with(library, dtype):
    policy = policy_of("llama").to(dtype)
    step = compiled_llama(library, policy, 8)
    assert step is not None
    hidden = torch.randn(40, 64).to(dtype)
    whole = step.logits(hidden)
    for first, last in ((0, 1), (3, 8), (20, 33)):
        assert torch.equal(step.logits(hidden[first:last].contiguous()), whole[first:last])
    torch.set_num_threads(1)
    alone = step.logits(hidden)
    torch.set_num_threads(2)
    assert torch.equal(alone, whole)


@pytest.mark.parametrize(
    ("temperature", "vocab"), [(0.3, VOCAB), (1.0, VOCAB), (1.7, VOCAB), (0.3, 512), (1.0, 516), (1.7, 2404)]
)
def test_draws_are_those_of_the_noise_in_torch(library, temperature, vocab):
    # 516 has a block of four tokens, and 2,404 a last one that is no whole number of vectors.
    policy = policy_of("llama", vocab_size=vocab)
    step = compiled_llama(library, policy, 8)
    assert step is not None and step.draws
    rows = 4000
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 64, generator=generator)
    keys = torch.randint(0, 2**32, (rows,), generator=generator)
    given = torch.full((rows,), temperature), keys, torch.arange(rows), token_table(vocab, hidden.device)
    expected, expected_logprob, _ = sample(policy.logits(hidden), *given)
    token, logprob, _ = step.draw(hidden, DrawInputs(*given))
    # Two largest sums of logprob and noise may be closer than float32 tells apart.
    assert int((token != expected).sum()) <= 1
    same = token == expected
    assert torch.allclose(logprob[same], expected_logprob[same], rtol=1e-5, atol=2e-5)
    other = step.draw(hidden, DrawInputs(given[0], keys + 1, *given[2:]))[0]
    assert float((other == expected).float().mean()) < 0.9


def test_equal_logits_are_drawn_equally_often(library):
    policy = policy_of("llama")
    step = compiled_llama(library, policy, 8)
    assert step is not None
    rows = 200_000
    hidden = torch.zeros(rows, 64)
    given = (
        torch.ones(rows),
        torch.arange(rows) * 2654435761 % 2**32,
        torch.arange(rows),
        token_table(VOCAB, hidden.device),
    )
    drawn = step.draw(hidden, DrawInputs(*given))[0]
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    expected = rows / VOCAB
    # Chi-square of 319 degrees of freedom: 5 standard deviations above its mean.
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < VOCAB - 1 + 5 * (2 * (VOCAB - 1)) ** 0.5


@pytest.mark.parametrize("vocab", [VOCAB, 1028])
def test_logits_that_are_no_numbers_draw_the_first_token(library, vocab):
    policy = policy_of("llama", vocab_size=vocab)
    step = compiled_llama(library, policy, 8)
    assert step is not None
    hidden = torch.full((3, 64), float("nan"))
    given = torch.ones(3), torch.arange(3), torch.arange(3), token_table(vocab, hidden.device)
    token, logprob, _ = step.draw(hidden, DrawInputs(*given))
    assert token.tolist() == [0, 0, 0] and bool(logprob.isnan().all())


@pytest.mark.usefixtures("weights")
def test_a_former_step_follows_the_weights_where_they_are(library):
    policy = policy_of("llama")
    step = compiled_llama(library, policy, 8)
    hidden = torch.randn(5, 64)
    before = step.logits(hidden)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert compiled_llama(library, policy, 8, step) is step
    assert torch.allclose(step.logits(hidden), policy.logits(hidden), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(step.logits(hidden), before, rtol=1e-2, atol=1e-2)
    # More positions, weights elsewhere or in another precision need another one.
    assert compiled_llama(library, policy, 9, step) is not step
    last = policy.model.get_output_embeddings().weight
    last.data = last.data * 2
    moved = compiled_llama(library, policy, 8, step)
    assert moved is not step
    assert torch.allclose(moved.logits(hidden), policy.logits(hidden), rtol=1e-5, atol=1e-5)
    low = compiled_llama(library, policy.to(torch.bfloat16), 8, moved)
    assert compiled_llama(library, policy, 8, low) is not low


def test_other_policies_take_the_other_way(library):
    assert compiled_llama(library, policy_of("gpt2"), 8) is None
    assert compiled_llama(library, policy_of("llama").to(torch.float16), 8) is None
    large = compiled_llama(library, policy_of("llama"), 8)
    assert large is not None and large.draws


# -- compiling ---------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "covey" / "native"


@pytest.mark.needs("a C compiler")
def test_it_is_compiled_once_without_a_warning_and_for_its_user(empty_cache, monkeypatch):
    flags = (*library_module._FLAGS, *WARNINGS.split())
    monkeypatch.setattr(library_module, "_FLAGS", flags)
    assert open_library() is not None
    (made,) = empty_cache.iterdir()
    assert made.stat().st_mode & 0o022 == 0 and empty_cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(library_module, "_compile", lambda *_: pytest.fail("compiled again"))
    assert open_library() is not None
    monkeypatch.setattr(library_module.os, "getuid", lambda: 4242)
    assert open_library() is None


def test_without_a_compiler_there_is_none(empty_cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert open_library() is None
    assert not empty_cache.exists()


def test_a_compiler_that_fails_leaves_nothing(empty_cache, monkeypatch):
    monkeypatch.setenv("CC", shutil.which("false") or "false")
    assert open_library() is None
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    taken = tmp_path / "a file"
    taken.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    assert open_library() is None
