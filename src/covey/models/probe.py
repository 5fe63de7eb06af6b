"""The probe that proves, at load, that a model may be trained on packed and prefix-shared streams.

Class flags do not tell: convolution and recurrent layers carry state from one packed row into the next. So
random rows are run alone, with the model's own attention and head, and again as a stream; values and the
gradient at the input embeddings must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.models.attention import LayoutLostError
from covey.models.policy import Policy
from covey.models.prefix import share_prompt
from covey.models.quantized import coarsest_dtype
from covey.norms import total_norm
from covey.token_streams import Row, StreamKind, build_stream, random_rows
from covey.types import MicroBatch
from covey.types.arrays import bools

# Largest relative difference of a healthy model: 1e-6 is usual in float32, 1e-2 in bfloat16; a leak is above
# 1e-2 in float32 and near 1 where state is carried over.
_EXACT = (torch.float32, torch.float64)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.15, torch.float16: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How far a stream layout is from rows run alone: relative differences of logprobs and embedding
    gradients; infinite where the model does not hand the layout to its attention."""

    stream: StreamKind
    value_difference: float
    gradient_difference: float
    passed: bool


def _rows(vocab: int) -> list[Row]:
    return random_rows(((11, (7, 4)), (6, (9, 5))), vocab, seed=20, same=2)


def micro_of(rows: Sequence[Row], kind: StreamKind, device: torch.device) -> MicroBatch:
    """A micro-batch with no training data in it but the tokens: temperature 1, advantages 0."""
    stream = build_stream(rows, kind)
    num = stream.target_N.shape[0]
    zeros = torch.zeros(num, device=device)
    count_S = torch.bincount(stream.sequence_N, minlength=len(rows)).to(device)
    return MicroBatch(
        tokens_T=stream.tokens_T.to(device),
        positions_T=stream.positions_T.to(device),
        segments=stream.segments,
        num_rows=stream.num_rows,
        context_U=stream.context_U.to(device),
        context_N=stream.context_N.to(device),
        target_N=stream.target_N.to(device),
        sequence_N=stream.sequence_N.to(device),
        media=stream.media,
        temperature_N=zeros + 1.0,
        sampler_logprob_N=zeros,
        advantage_N=zeros,
        old_logprob_N=None,
        ref_logprob_N=None,
        trained_count_S=count_S,
        episode_count_S=count_S,
        group_S=torch.zeros(len(rows), dtype=torch.long, device=device),
    )


class _EmbeddingGradient:
    """Records each output of the input embeddings as a leaf, so that a gradient costs no weight gradients."""

    def __init__(self, policy: Policy) -> None:
        self.leaves: list[Tensor] = []
        embeddings = policy.model.get_input_embeddings()  # type: ignore[operator]
        self._handle = embeddings.register_forward_hook(self._hook)

    def _hook(self, module: object, inputs: object, output: Tensor) -> Tensor:
        self.leaves.append(output.detach().requires_grad_(True))
        return self.leaves[-1]

    def close(self) -> None:
        self._handle.remove()


def _alone(policy: Policy, row: Row, weight_n: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle: one row, transformers' own forward and logits; logprobs and embedding gradients of the
    row."""
    recorder = _EmbeddingGradient(policy)
    try:
        ids = torch.tensor([list(row.token_ids)], device=policy.device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        start = row.prompt_length
        logprobs = logits[start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
        (gradient,) = torch.autograd.grad((logprobs * weight_n).sum(), recorder.leaves[-1])
    finally:
        recorder.close()
    return logprobs.detach(), gradient[0].float()


def _streamed(
    policy: Policy, rows: Sequence[Row], kind: StreamKind, weight_N: Tensor
) -> tuple[Tensor, Tensor]:
    recorder = _EmbeddingGradient(policy)
    try:
        micro = micro_of(rows, kind, policy.device)
        logprob_N = policy(micro).logprob_N
        (gradient,) = torch.autograd.grad((logprob_N * weight_N).sum(), recorder.leaves[-1])
    finally:
        recorder.close()
    return logprob_N.detach(), gradient.flatten(0, 1).float()


def _in_two_passes(policy: Policy, rows: Sequence[Row], weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """The same of two rows of a prompt, which the first of their passes computes for both."""
    recorder = _EmbeddingGradient(policy)
    shares_prompts, policy.shares_prompts = policy.shares_prompts, True
    first, second = share_prompt([micro_of([row], "prefix", policy.device) for row in rows])
    sizes = [len(first.target_N), len(second.target_N)]
    weights = weight_N.split(sizes)
    try:
        ahead = policy(first).logprob_N
        # The first half is of the prompt's pass.
        prompt, own = recorder.leaves[len(recorder.leaves) // 2 - 1], recorder.leaves[-1]
        (of_own,) = torch.autograd.grad((ahead * weights[0]).sum(), own)
        behind = policy(second).logprob_N
        of_prompt, of_rest = torch.autograd.grad(
            (behind * weights[1]).sum(), (prompt, recorder.leaves[-1]), materialize_grads=True
        )
    finally:
        recorder.close()
        policy.shares_prompts = shares_prompts
    # Without what pads a stream; the last token of a row is in none.
    found = zip((of_prompt, of_own, of_rest), (rows[0].prompt_length, *(n - 1 for n in sizes)), strict=True)
    gradient = torch.cat([part.flatten(0, 1)[:length].float() for part, length in found])
    return torch.cat([ahead, behind]).detach(), gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The probe's rows, the weight of each completion token, and what the rows are when run alone: logprobs
    and embedding gradients."""

    rows: Sequence[Row]
    weights: Sequence[Tensor]
    alone: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, policy: Policy) -> Oracle:
        """Run the rows alone; the policy is left on the layout it came with."""
        rows = _rows(min(policy.vocab, 1 << 15))
        lengths = [len(r.token_ids) - r.prompt_length for r in rows]
        weight_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(21))
        weights = weight_N.to(policy.device).split(lengths)
        with _evaluated(policy, "padded"):
            alone = [_alone(policy, r, w) for r, w in zip(rows, weights, strict=True)]
        return cls(rows=rows, weights=weights, alone=alone)

    def first(self, count: int) -> Oracle:
        """The same of the first rows alone."""
        return Oracle(rows=self.rows[:count], weights=self.weights[:count], alone=self.alone[:count])


@contextmanager
def _evaluated(policy: Policy, kind: StreamKind) -> Iterator[None]:
    before, training, head = policy.stream, policy.training, policy.head
    policy.eval()
    policy.use_stream(kind)
    # The model's own logits know of no ban.
    policy.head = replace(head, banned=())
    try:
        yield
    finally:
        policy.head = head
        policy.use_stream(before)
        policy.train(training)


def probe(
    policy: Policy,
    kind: StreamKind,
    *,
    in_passes: bool = False,
    oracle: Oracle | None = None,
    share: float = 1.0,
) -> ProbeResult:
    """Compare `kind` with rows run alone; the policy is left on the layout it came with.

    `in_passes` are two rows of one prompt in a pass each, of which the second goes on from the first one's
    prompt. An `oracle` that is there already is not computed again. `share` is that of the model's layers
    that the policy has: fewer leak less and round less, so less is tolerated.
    """
    oracle = oracle or Oracle.of(policy)
    if in_passes:
        oracle = oracle.first(2)
    rows, weight_N = oracle.rows, torch.cat(list(oracle.weights))
    try:
        with _evaluated(policy, kind):
            run = (
                _in_two_passes(policy, rows, weight_N)
                if in_passes
                else _streamed(policy, rows, kind, weight_N)
            )
    except LayoutLostError:
        # Such a model can only compute rows that are apart, with its own attention.
        return ProbeResult(stream=kind, value_difference=math.inf, gradient_difference=math.inf, passed=False)
    value, gradient = run
    expected = torch.cat([values for values, _ in oracle.alone])
    value_difference = _relative(value - expected, expected)
    # The gradient at a stream token is summed over the rows that share it.
    expected_gradient = torch.zeros_like(gradient)
    for row, (_, row_gradient), index in zip(rows, oracle.alone, _token_index(rows, kind), strict=True):
        expected_gradient.index_add_(0, index.to(policy.device), row_gradient[: len(row.token_ids) - 1])
    gradient_difference = _relative(gradient - expected_gradient, expected_gradient)
    dtype = coarsest_dtype(policy, next(policy.parameters()).dtype)
    limit = _TOLERANCE.get(dtype, 0.05) * (share if dtype in _EXACT else math.sqrt(share))
    return ProbeResult(
        stream=kind,
        value_difference=value_difference,
        gradient_difference=gradient_difference,
        passed=value_difference <= limit and gradient_difference <= limit,
    )


def _relative(difference: Tensor, reference: Tensor) -> float:
    return float(total_norm([difference]) / total_norm([reference]).clamp_min(1e-30))


def _token_index(rows: Sequence[Row], kind: StreamKind) -> list[Tensor]:
    """Where each row's tokens lie in the stream, read off the predictors of an all-trained copy of the
    rows."""
    everything = [
        Row(
            token_ids=r.token_ids,
            is_trained=bools([False] + [True] * (len(r.token_ids) - 1)),
            prompt_length=r.prompt_length,
            prompt_key=r.prompt_key,
        )
        for r in rows
    ]
    stream = build_stream(everything, kind)
    return list(stream.context_U[stream.context_N].split([len(r.token_ids) - 1 for r in rows]))


def widest_stream(policy: Policy, share: float = 1.0) -> tuple[StreamKind, bool, list[ProbeResult]]:
    """The best layout that the model passes with its attention, prefix-shared, else packed, else padded rows,
    and whether a later pass may go on from the prompt of an earlier one; `share` is that of its layers that
    the policy has. Where the tokens of an image see each other only rows of their own hold."""
    if policy.vision is not None and not policy.vision.is_causal:
        return "padded", False, []
    oracle = Oracle.of(policy)
    results = [probe(policy, "prefix", oracle=oracle, share=share)]
    if results[0].passed:
        results.append(probe(policy, "prefix", in_passes=True, oracle=oracle, share=share))
        return "prefix", results[1].passed, results
    results.append(probe(policy, "packed", oracle=oracle, share=share))
    return ("packed" if results[1].passed else "padded"), False, results
