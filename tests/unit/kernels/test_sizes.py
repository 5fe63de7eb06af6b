"""Padding behind a stream: few sizes, and nothing of it in what comes out."""

from __future__ import annotations

import pytest
import torch

from covey.kernels.sizes import in_few_sizes, step_up
from covey.models.policy import Policy
from covey.models.probe import micro_of
from covey.token_streams import Row
from support.models import random_model


def rows_of(*lengths: int) -> list[Row]:
    return [
        Row(
            token_ids=[1 + (i + n) % 90 for i in range(5 + n)],
            is_trained=[False] * 5 + [True] * n,
            prompt_length=5,
            prompt_key=number,
        )
        for number, n in enumerate(lengths)
    ]


def test_sizes_are_few_and_little_is_padded():
    sizes = {step_up(n, 64, 32) for n in range(1, 16_385)}
    assert len(sizes) < 200
    assert all(n <= step_up(n, 64, 32) < n + max(64, n / 16) for n in range(1, 16_385))
    assert step_up(64, 64, 32) == 64 and step_up(4096, 64, 32) == 4096


def test_contexts_are_of_fewer_sizes_still_and_never_more_than_full_blocks():
    """A head's products are of a block, and of what is left behind the last one."""
    found = set()
    for rows in ((n % 7, n) for n in range(1, 700)):
        micro = micro_of(rows_of(*rows), "packed", torch.device("cpu"))
        contexts = micro.context_U.shape[0]
        padded = in_few_sizes(micro, block=200).context_U.shape[0]
        assert contexts <= padded < contexts + 64
        found.add(padded % 200)
    assert found == {0, 32, 64, 128, 192}


def test_the_padding_is_short_segments_of_its_own_and_trains_nothing():
    micro = micro_of(rows_of(7, 3), "prefix", torch.device("cpu"))
    padded = in_few_sizes(micro, block=512)
    length = micro.tokens_T.shape[0]
    assert padded.tokens_T.shape == padded.positions_T.shape == padded.context_U.shape == (32,)
    assert torch.equal(padded.context_N, micro.context_N) and torch.equal(padded.target_N, micro.target_N)
    assert torch.equal(padded.tokens_T[:length], micro.tokens_T)
    count = len(micro.segments)
    assert padded.segments[:count] == micro.segments
    found = [(segment.start, segment.length, segment.parent) for segment in padded.segments[count:]]
    assert found == [(start, min(16, 32 - start), None) for start in range(length, 32, 16)]
    assert in_few_sizes(padded, block=512).segments == padded.segments


def test_a_stream_that_trains_nothing_still_trains_nothing():
    micro = micro_of(rows_of(0), "prefix", torch.device("cpu"))
    assert in_few_sizes(micro, block=512).target_N.shape == (0,)


@pytest.mark.parametrize("stream", ["prefix", "packed"])
def test_no_gradient_reaches_the_padding(stream):
    policy = Policy(random_model("llama"), stream=stream)
    stats = policy(micro_of(rows_of(7, 3), stream, torch.device("cpu")))
    assert stats.logprob_N.shape == stats.entropy_N.shape == (10,)
    (stats.logprob_N.sum() + stats.entropy_N.sum()).backward()
    # The padding is token 0, which is in no row, and is predicted by nobody's head but as one of all tokens.
    assert policy.model.get_input_embeddings().weight.grad[0].count_nonzero() == 0
