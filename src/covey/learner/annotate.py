"""Annotate and credit: from scored groups to the rows that this rollout's optimizer steps train on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from covey.algorithm.needs import Needs
from covey.batching.credit import CreditConfig, credit_samples, needs_forward, row_credits
from covey.batching.pack import (
    PackPlan,
    build_micros,
    empty_micro,
    episode_tokens,
    micro_batches,
    step_slices,
)
from covey.batching.samples import to_samples
from covey.comm import Comm
from covey.learner.backends.base import Annotation, Backend
from covey.types import AnnotatedSample, Sample, ScoredGroup, TrainSample
from covey.types.arrays import bools


def annotate_and_credit(
    groups: Sequence[ScoredGroup],
    backend: Backend,
    *,
    credit: CreditConfig,
    needs: Needs,
    plan: PackPlan,
    comm: Comm,
    version: int | None = None,
) -> list[TrainSample]:
    """Annotate and credit every sample of a rollout; every rank gets all of them.

    The forward passes that annotate are the ones that train: the same rows in the same order, so that before
    an update the ratio is exactly 1 and the KL to an unchanged reference exactly 0. What an earlier policy
    than `version` sampled has its sampler's logprobs as old ones; the others need theirs then too.
    """
    comm.activity.enter("annotate")
    samples = to_samples(groups, version)
    credits = row_credits(groups, samples, credit)
    forward = [needs_forward(c, may_skip_rows=needs.may_skip_rows) for c in credits]
    has_aged = any(s.age for s in samples)
    has_old = needs.old or has_aged
    annotations: list[Annotation] = [w for w, on in (("old", has_old), ("reference", needs.reference)) if on]  # type: ignore[misc]
    values = {which: annotate(samples, forward, backend, which, plan, comm) for which in annotations}
    if has_aged:
        values["old"] = [
            torch.tensor(s.sampler_logprobs) if s.age else old
            for s, old in zip(samples, values["old"], strict=True)
        ]
    if needs.kl_in_reward:
        gaps = [float((old - ref).sum()) for old, ref in zip(values["old"], values["reference"], strict=True)]
        credits = row_credits(groups, samples, credit, gaps)
    if needs.entropy:
        in_loss = [c.masked is None for c in credits]
        values["entropy"] = annotate(samples, in_loss, backend, "entropy", plan, comm)
    nothing: list[Tensor | None] = [None] * len(samples)
    annotated = [
        AnnotatedSample(sample=s, old_logprob_N=old, ref_logprob_N=ref, entropy_N=entropy)
        for s, old, ref, entropy in zip(
            samples, *(values.get(w, nothing) for w in ("old", "reference", "entropy")), strict=True
        )
    ]
    return credit_samples(annotated, credits, may_skip_rows=needs.may_skip_rows)


def annotate(
    samples: Sequence[Sample],
    forward: Sequence[bool],
    backend: Backend,
    which: Annotation,
    plan: PackPlan,
    comm: Comm,
) -> list[Tensor]:
    """Logprobs, or entropies, of every sample's trained tokens (float32, CPU); rows that need no forward pass
    keep zeros.

    Each rank computes the rows that it trains; a sum over ranks, of which all but one hold zeros, shares
    them.
    """
    counts = [len(s.sampler_logprobs) for s in samples]
    flat = torch.zeros(sum(counts))
    parts = flat.split(counts)
    for step in step_slices(samples, plan):
        per_rank = [micro_batches(samples, forward, step, plan, rank) for rank in range(plan.world)]
        passes = per_rank[plan.rank]
        rows = [[_bare(samples[i]) for i in numbers] for numbers in passes]
        micros = build_micros(rows, plan, episode_tokens(chain.from_iterable(rows)))
        if backend.is_sharded:
            spare = max(len(numbers) for numbers in per_rank) - len(micros)
            micros += [empty_micro(samples[step.start], plan) for _ in range(spare)]
        mine = [i for numbers in passes for i in numbers]
        if not micros:
            continue
        value_N = backend.annotate(micros, which, comm.activity.advance).cpu()
        for i, values in zip(mine, value_N.split([counts[i] for i in mine]), strict=True):
            parts[i].copy_(values)
    return list(comm.sum_tensor(flat).split(counts))


def _bare(sample: Sample) -> TrainSample:
    """A sample with nothing to train on yet: only its tokens matter to an annotation."""
    return TrainSample(
        annotated=AnnotatedSample(sample=sample),
        advantage=0.0,
        loss_mask=bools([True] * len(sample.sampler_logprobs)),
    )
