"""The learner's side of the canary: what it says of the tokens that an engine sampled, on any backend.

Axes: N sampled tokens, R of them with the whole vocabulary in their place, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from covey.batching.pack import build_micros, episode_tokens
from covey.batching.shares import PackPlan
from covey.learner.backends.base import Advance, Annotation
from covey.models.policy import Policy
from covey.rollout.canary import LearnersView, Sampled, View
from covey.types import (
    AnnotatedSample,
    Completion,
    GenerationRequest,
    MicroBatch,
    Outcome,
    Sample,
    TokenSequence,
    TrainSample,
)
from covey.types.arrays import constant_bools

# Numbers of whole rows of the vocabulary, which bound what they take: 40 bytes each.
_CELLS = 1 << 20


class Learner(Protocol):
    """What computes logprobs: a backend, or the policy of an evaluation."""

    @property
    def policy(self) -> Policy: ...

    @property
    def sampler(self) -> Policy: ...

    def annotate(self, micros: Sequence[MicroBatch], which: Annotation, advance: Advance) -> Tensor: ...


def learners_view(learner: Learner, advance: Advance) -> View:
    """Return a function that computes the learner's logprobs of sampled tokens, by the forward passes that
    train, in evaluation mode.

    It makes one pass on every rank, whatever it was given: for the sampled tokens, and for the whole
    vocabulary in place of the first of them. It is collective.
    """

    def view(sampled: Sequence[Sampled]) -> LearnersView:
        policy, vocab = learner.policy, learner.sampler.vocab
        micro = _micro(sampled, policy)
        is_training = policy.training
        policy.eval()
        try:
            logprob_X = learner.annotate([_with_vocabulary(micro, vocab)], "old", advance).float().cpu()
        finally:
            policy.train(is_training)
        num = int(micro.target_N.shape[0])
        return LearnersView(logprob_N=logprob_X[:num], logprob_RV=logprob_X[num:].view(-1, vocab))

    return view


def _micro(sampled: Sequence[Sampled], policy: Policy) -> MicroBatch:
    """One forward pass over all completions, each with a prompt of its own."""
    rows = [
        TrainSample(
            annotated=AnnotatedSample(sample=_sample(number, *pair)),
            advantage=0.0,
            loss_mask=constant_bools(True, len(pair[1].token_ids)),
        )
        for number, pair in enumerate(sampled)
    ]
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=len(rows),
        num_iterations=1,
        max_tokens=sum(row.annotated.sample.length for row in rows),
        max_completion_length=max(len(row.loss_mask) for row in rows),
        stream=policy.stream,
        device=policy.device,
    )
    (micro,) = build_micros([rows], plan, episode_tokens(rows))
    return micro


def _sample(number: int, request: GenerationRequest, completion: Completion) -> Sample:
    return Sample(
        group=number,
        sibling=0,
        episode=number,
        tokens=TokenSequence.of_turn(request.prompt_token_ids, completion, request.media),
        temperature=request.sampling.temperature,
        outcome=Outcome(completion.finish),
    )


def _with_vocabulary(micro: MicroBatch, vocab: int) -> MicroBatch:
    """The same pass with every token of the vocabulary behind its own targets, in place of the first ones;
    the logprobs of those are within the whole vocabulary."""
    num = min(int(micro.target_N.shape[0]), max(1, _CELLS // vocab))

    def extended(values_N: Tensor) -> Tensor:
        return torch.cat([values_N, values_N[:num].repeat_interleave(vocab)])

    kept = micro.kept
    if kept is not None:
        none_X = kept.count_N.new_zeros(num * vocab)
        kept = replace(kept, count_N=torch.cat([kept.count_N, none_X]))
    every_V = torch.arange(vocab, device=micro.target_N.device)
    return replace(
        micro,
        context_N=extended(micro.context_N),
        target_N=torch.cat([micro.target_N, every_V.repeat(num)]),
        sequence_N=extended(micro.sequence_N),
        temperature_N=extended(micro.temperature_N),
        sampler_logprob_N=extended(micro.sampler_logprob_N),
        advantage_N=extended(micro.advantage_N),
        kept=kept,
    )
