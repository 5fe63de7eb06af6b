"""Annotate and credit: from scored groups to the rows that this rollout's optimizer steps train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from covey.batching.credit import credit_samples, needs_forward, row_credits
from covey.batching.needs import Needs
from covey.batching.pack import build_micros, empty_micro, episode_tokens, micro_batches
from covey.batching.samples import ages_of, to_samples
from covey.batching.shares import PackPlan, Step, steps_of
from covey.comm import Comm
from covey.learner.backends.base import Annotation, Backend
from covey.options.schema import CreditOptions
from covey.rollout.moving import check_bans, check_sets, move
from covey.types import AnnotatedSample, Medium, Sample, ScoredGroup, TokenSequence, TrainSample
from covey.types.arrays import constant_bools
from covey.types.episode import held


def annotate_and_credit(
    groups: Sequence[ScoredGroup],
    backend: Backend,
    *,
    credit: CreditOptions,
    needs: Needs,
    plan: PackPlan,
    comm: Comm,
    version: int | None = None,
) -> list[TrainSample]:
    """Annotate and credit the samples of a rollout: every rank gets the credit of all of them, and the tokens
    and annotations of those that it forwards.

    The forward passes that annotate are the ones that train: the same rows in the same order, so that before
    an update the ratio is exactly 1 and the KL to an unchanged reference exactly 0. Tokens that an earlier
    policy than `version` sampled have their sampler's logprobs as old ones, but where the loss is decoupled;
    the others need theirs then too.
    """
    comm.activity.enter("annotate")
    samples = to_samples(groups, version)
    credits = row_credits(groups, samples, credit)
    forward = [needs_forward(c, may_skip_rows=needs.may_skip_rows) for c in credits]
    has_aged = any(s.age for s in samples)
    which: list[Annotation] = ["old"] if needs.old or has_aged else []
    which += ["reference"] if needs.reference else []
    steps = steps_of(samples, forward, plan) if which or needs.entropy or comm.world > 1 else []
    samples = at_their_ranks(samples, steps, comm, [group.group.prompt.media for group in groups])
    here = ((i, s.tokens) for i, s in enumerate(samples) if isinstance(s.tokens, TokenSequence) and s.length)
    check_bans(here, backend.sampler.head.banned, comm)
    values = {name: annotate(samples, forward, steps, backend, name, plan, comm) for name in which}
    if has_aged and not needs.decoupled:
        values["old"] = [_of_sampler(s, old) for s, old in zip(samples, values["old"], strict=True)]
    if needs.kl_in_reward:
        credits = row_credits(groups, samples, credit, _gaps(values, comm))
    if needs.entropy:
        in_loss = [c.masked is None for c in credits]
        values["entropy"] = annotate(samples, in_loss, steps, backend, "entropy", plan, comm)
    nothing: list[Tensor | None] = [None] * len(samples)
    annotated = [
        AnnotatedSample(sample=s, old_logprob_N=old, ref_logprob_N=ref, entropy_N=entropy)
        for s, old, ref, entropy in zip(
            samples, *(values.get(w, nothing) for w in ("old", "reference", "entropy")), strict=True
        )
    ]
    return credit_samples(annotated, credits, may_skip_rows=needs.may_skip_rows)


def _of_sampler(sample: Sample, old_N: Tensor | None) -> Tensor | None:
    """The old logprobs of a row, with the sampler's in the place of tokens that earlier weights sampled."""
    if not sample.age or old_N is None:
        return old_N
    is_aged_N = torch.from_numpy(ages_of(sample) > 0)
    return torch.where(is_aged_N, torch.tensor(sample.sampler_logprobs), old_N)


def at_their_ranks(
    samples: Sequence[Sample],
    steps: Sequence[Step],
    comm: Comm,
    prompt_media: Sequence[tuple[Medium, ...]] | None = None,
) -> list[Sample]:
    """Return the samples, with tokens where the rank forwards them and the summaries of others. Collective.

    Samples that every rank has stay as they are. `prompt_media` are the images of the prompt of each group
    (None: there are none). Raises GuardStop (F110) where kept sets are not those that
    tokens were drawn from.
    """
    if comm.world == 1:
        check_sets(((i, held(s.tokens)) for i, s in enumerate(samples) if s.length), comm)
        return list(samples)
    rank_of_R = np.concatenate([step.assignment.rank_of_R for step in steps])
    shared = np.array([s.owner is None for s in samples])
    owner_R = np.where(shared, rank_of_R, np.array([s.owner or 0 for s in samples]))
    own = {i: held(samples[i].tokens) for i in np.flatnonzero(owner_R == comm.rank).tolist()}
    images = None if prompt_media is None else [prompt_media[s.group] for s in samples]
    mine = move(own, [s.tokens for s in samples], owner_R, rank_of_R, comm, images)
    return [
        s if s.owner is None else replace(s, tokens=mine.get(i) or s.summary) for i, s in enumerate(samples)
    ]


def _gaps(values: Mapping[Annotation, Sequence[Tensor | None]], comm: Comm) -> list[float]:
    """The sum of old less reference logprobs of every row, of which one rank has each. Collective."""
    pairs = zip(values["old"], values["reference"], strict=True)
    return comm.sum([0.0 if old is None or ref is None else float((old - ref).sum()) for old, ref in pairs])


def annotate(
    samples: Sequence[Sample],
    forward: Sequence[bool],
    steps: Sequence[Step],
    backend: Backend,
    which: Annotation,
    plan: PackPlan,
    comm: Comm,
) -> list[Tensor | None]:
    """Logprobs, or entropies, of the trained tokens of the samples that are this rank's (float32, CPU), and
    None for those of other ranks. Rows that need no forward pass have zeros. `steps` are those of
    `steps_of`: a rank computes the rows that it trains."""
    values: list[Tensor | None] = [None] * len(samples)
    for step in steps:
        for i in step.of_rank(plan.rank):
            values[i] = torch.zeros(samples[i].num_trained)
        per_rank = [micro_batches(samples, forward, step, plan, rank) for rank in range(plan.world)]
        passes = per_rank[plan.rank]
        rows = [[_bare(samples[i]) for i in numbers] for numbers in passes]
        micros = build_micros(rows, plan, episode_tokens(chain.from_iterable(rows)))
        if backend.is_sharded:
            spare = max(len(numbers) for numbers in per_rank) - len(micros)
            micros += [empty_micro(samples[step.rows.start].group, plan) for _ in range(spare)]
        mine = [i for numbers in passes for i in numbers]
        if not micros:
            continue
        value_N = backend.annotate(micros, which, comm.activity.advance).cpu()
        parts = value_N.split([samples[i].num_trained for i in mine])
        for i, part in zip(mine, parts, strict=True):
            values[i] = part.clone()
    return values


def _bare(sample: Sample) -> TrainSample:
    """A sample with nothing to train on yet: only its tokens matter to an annotation."""
    return TrainSample(
        annotated=AnnotatedSample(sample=sample),
        advantage=0.0,
        loss_mask=constant_bools(True, sample.num_trained),
    )
