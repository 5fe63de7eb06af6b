"""Packing: which rows of an optimizer step a rank forwards together, and the tensors of it.

A forward pass may hold some rows of an episode and not others. Every rank knows the length, the advantage and
the mask of every row, so the denominators are global without a collective; it has the tokens of its own rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.batching.quantile import exact_quantile
from covey.batching.samples import ages_of
from covey.batching.shares import PackPlan, Step, steps_of
from covey.comm import Comm, LocalComm
from covey.kernels.upload import upload
from covey.models.prefix import share_prompt
from covey.token_streams import Row, build_streams
from covey.types import (
    AnnotatedSample,
    Batch,
    Denominators,
    KeptSets,
    KeptTokens,
    MicroBatch,
    Outcome,
    Sample,
    TokenSequence,
    TrainSample,
)
from covey.types.arrays import Bools, bools, constant_bools, ints
from covey.types.episode import held

# Sums of float32 advantages closer to 0 than this are rounding.
_CANCELLED = 1e-4


def episode_tokens(rows: Iterable[TrainSample]) -> Counter[int]:
    """The loss tokens of each episode over all its rows, by the episode's number."""
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[row.annotated.sample.episode] += row.num_tokens
    return tokens


def micro_batches(
    samples: Sequence[Sample], forward: Sequence[bool], step: Step, plan: PackPlan, rank: int
) -> list[list[int]]:
    """The sample numbers that each of a rank's forward passes holds, in order.

    Rows are taken in sample order until the next one would pass the token budget. Siblings that share a
    prompt stay together, and the prompt's tokens count once; where they do not fit one pass, they start
    several new ones. A single row is never refused.
    """
    numbers = [i for i in step.of_rank(rank) if forward[i]]
    if plan.stream == "padded":
        return _padded_passes(samples, numbers, plan)
    units = [[i] for i in numbers]
    if plan.stream == "prefix":
        units = [list(unit) for _, unit in groupby(numbers, key=lambda i: samples[i].group)]
    out: list[list[int]] = []
    used = 0
    for unit in units:
        passes = _cut(samples, unit, plan)
        if out and len(passes) == 1 and used + passes[0][1] <= plan.max_tokens:
            out[-1] += unit
            used += passes[0][1]
        else:
            out += [members for members, _ in passes]
            used = passes[-1][1]
    return out


def _padded_passes(samples: Sequence[Sample], numbers: Sequence[int], plan: PackPlan) -> list[list[int]]:
    out: list[list[int]] = []
    widest = 0
    for i in numbers:
        widest = max(widest, samples[i].length)
        if not out or (len(out[-1]) + 1) * widest > plan.max_tokens:
            out.append([])
            widest = samples[i].length
        out[-1].append(i)
    return out


def _cut(samples: Sequence[Sample], unit: Sequence[int], plan: PackPlan) -> list[tuple[list[int], int]]:
    """The passes that siblings alone would take: their numbers, and the tokens of each pass, in which their
    prompt counts once."""
    passes: list[tuple[list[int], int]] = []
    families: set[Hashable] = set()
    for i in unit:
        family, num_tokens = samples[i].prompt_key, samples[i].length
        members, used = passes[-1] if passes else ([], plan.max_tokens)
        total = used + num_tokens - (samples[i].prompt_length if family in families else 0)
        if total > plan.max_tokens:
            passes.append(([i], num_tokens))
            families = {family}
        else:
            passes[-1] = [*members, i], total
            families.add(family)
    return passes


def pack(rows: Sequence[TrainSample], plan: PackPlan, rollout: int, comm: Comm | None = None) -> list[Batch]:
    """This rank's share of every optimizer step of a rollout, pass after pass.

    Ranks with fewer forward passes in a step get empty ones, whose loss is a zero inside the graph, up to the
    largest count: every rank takes part in every collective of a backward pass. `comm` is asked where a
    quantile of entropies is taken, of which each rank has those of its rows (None: this one has all).
    """
    samples = [r.annotated.sample for r in rows]
    forward = [r.needs_forward for r in rows]
    steps = []
    for step in steps_of(samples, forward, plan):
        per_rank = [micro_batches(samples, forward, step, plan, rank) for rank in range(plan.world)]
        held = [[rows[i] for i in numbers] for numbers in per_rank[plan.rank]]
        everyone = [rows[i] for i in step.rows]
        least, num_kept = least_entropy(everyone, plan.top_entropy_quantile, comm or LocalComm())
        tokens = episode_tokens(everyone)
        micros = build_micros(held, plan, tokens, least)
        spare = max(1, *(len(numbers) for numbers in per_rank)) - len(micros)
        micros += [empty_micro(everyone[0].annotated.sample.group, plan) for _ in range(spare)]
        waits = [micro.shared is not None and micro.shared.is_followed for micro in micros]
        signal = [
            _has_signal(members, least, wait, tokens) for members, wait in zip(held, waits, strict=False)
        ]
        signal += [False] * spare
        groups = range(everyone[0].annotated.sample.group, everyone[-1].annotated.sample.group + 1)
        denominators = _denominators(everyone, plan, num_kept)
        steps.append((tuple(micros), tuple(signal), denominators, everyone, groups))
    return [
        Batch(
            micro_batches=micros,
            has_signal=signal,
            denominators=d,
            dropped=_dropped(everyone),
            num_rows=len(everyone),
            groups=groups,
            rollout=rollout,
            pass_index=index,
        )
        for index in range(plan.num_iterations)
        for micros, signal, d, everyone, groups in steps
    ]


def least_entropy(rows: Sequence[TrainSample], share: float, comm: Comm) -> tuple[float | None, int | None]:
    """The least entropy of the `share` of a step's loss tokens that have the most, and how many have it or
    more; None where all count. Each rank gives the entropies that it has. Collective below a `share` of 1.

    Tokens with exactly that entropy all count. Source: "Beyond the 80/20 rule" (arXiv:2506.01939).
    """
    if share >= 1.0:
        return None, None
    entropies = [r.annotated.entropy_N for r in rows if r.masked is None]
    own_X = torch.cat([torch.zeros(0), *(e for e in entropies if e is not None)])
    least = exact_quantile(own_X, share, comm)
    if least is None:
        return None, None
    (num_kept,) = comm.sum([float((own_X >= least).sum())])
    return least, int(num_kept)


def _keep(row: TrainSample, least: float | None) -> Tensor | None:
    """Which tokens (N,) of a row have an entropy that counts, 1 or 0; None where all do."""
    if least is None:
        return None
    entropy_N = row.annotated.entropy_N
    assert entropy_N is not None, "a quantile of entropies needs entropies"
    return (entropy_N >= least).float()


def _counts(row: TrainSample, least: float | None) -> Bools:
    """Return which tokens (N,) of a row may have a gradient: their entropy counts, and filters left more than
    the token itself."""
    keep_N, sets = _keep(row, least), held(row.annotated.sample.tokens).kept
    counts_N = (
        constant_bools(True, row.annotated.sample.num_trained) if keep_N is None else keep_N.bool().numpy()
    )
    return counts_N if sets is None else counts_N & ~sets.is_single


def _has_signal(
    rows: Sequence[TrainSample], least: float | None, wait: bool, tokens: Mapping[int, int]
) -> bool:
    """Whether the advantages of some completion do not cancel over the rows that hold it, under either
    weighting of a loss: each token the same, or by the `tokens` of its episode. Rows of an older policy are
    ignored, because their ratio may be clipped. With `wait`, first tokens do not count: their gradient comes
    in a later pass."""
    rows = [row for row in rows if not row.annotated.sample.age]
    if any(row.token_advantages is not None for row in rows):
        return _has_token_signal(rows, least, wait, tokens)
    net: dict[tuple[int, bytes], tuple[float, float]] = {}
    for row in rows:
        sample, counts_N = row.annotated.sample, _counts(row, least)
        if not counts_N[_waiting(sample, wait) :].any():
            continue
        key = (sample.group, sample.token_ids.tobytes())
        plain, shared = net.get(key, (0.0, 0.0))
        net[key] = plain + row.advantage, shared + row.advantage / tokens[sample.episode]
    most = max(tokens.values(), default=1)
    return any(abs(a) > _CANCELLED and abs(b) > _CANCELLED / (2 * most) for a, b in net.values())


def _waiting(sample: Sample, wait: bool) -> int:
    """How many of a row's trained tokens the prompt's last position predicts, 0 or 1, where these `wait`."""
    return int(wait and sample.is_trained[sample.prompt_length : sample.prompt_length + 1].any())


def _has_token_signal(
    rows: Sequence[TrainSample], least: float | None, wait: bool, tokens: Mapping[int, int]
) -> bool:
    """`_has_signal` for rows whose tokens have different advantages. A token has signal if its advantages,
    added up over the rows that are the same up to it, are not 0 under either weighting."""
    places: dict[tuple[int, int, int], int] = {}
    net: dict[int, tuple[float, float]] = {}
    for row in rows:
        sample = row.annotated.sample
        keep = _counts(row, least).astype(float).tolist()
        if _waiting(sample, wait):
            keep[0] = 0.0
        values = iter([a * k for a, k in zip(row.advantages.tolist(), keep, strict=True)])
        at = 0
        for token, on in zip(sample.token_ids.tolist(), sample.is_trained.tolist(), strict=True):
            at = places.setdefault((sample.group, at, token), len(places) + 1)
            if on:
                value = next(values)
                plain, shared = net.get(at, (0.0, 0.0))
                net[at] = plain + value, shared + value / tokens[sample.episode]
    most = max([len(places), *(tokens[row.annotated.sample.episode] for row in rows)])
    return any(abs(a) > _CANCELLED and abs(b) > _CANCELLED / most for a, b in net.values())


def _denominators(rows: Sequence[TrainSample], plan: PackPlan, num_kept: int | None) -> Denominators:
    return Denominators(
        num_episodes=len({r.annotated.sample.episode for r in rows}),
        num_tokens=sum(r.num_tokens for r in rows),
        max_completion_length=plan.max_completion_length,
        num_kept=num_kept,
    )


def _dropped(rows: Sequence[TrainSample]) -> dict[str, int]:
    return dict(Counter(r.masked or "zero_advantage" for r in rows if not r.needs_forward))


def build_micros(
    passes: Sequence[Sequence[TrainSample]],
    plan: PackPlan,
    tokens: Mapping[int, int],
    least: float | None = None,
) -> list[MicroBatch]:
    """The forward passes of a rank in a step, on the plan's device; passes that begin with the same prompt
    share it. `tokens` are the `episode_tokens` of the whole step, `least` is what `least_entropy` gave."""
    micros = _each_alone(passes, plan, tokens, least) if passes else []
    if plan.stream != "prefix":
        return micros
    keys = [rows[0].annotated.sample.prompt_key for rows in passes]
    pairs = groupby(zip(keys, micros, strict=True), key=itemgetter(0))
    return [micro for _, same in pairs for micro in share_prompt([micro for _, micro in same])]


def _each_alone(
    passes: Sequence[Sequence[TrainSample]], plan: PackPlan, tokens: Mapping[int, int], least: float | None
) -> list[MicroBatch]:
    """The forward passes before any prompt is shared; their tensors are slices of the whole step's."""
    rows = [row for members in passes for row in members]
    samples, annotated = [row.annotated.sample for row in rows], [row.annotated for row in rows]
    assert all(row.loss_mask.all() for row in rows), "rows with masked tokens are out of the forward pass"
    counts = [s.num_trained for s in samples]
    sizes = [len(members) for members in passes]
    ends = np.cumsum([0, *counts])[np.cumsum([0, *sizes])]
    own_tokens = np.diff(ends).tolist()

    def cut(tensor: Tensor | None, lengths: list[int] = own_tokens) -> Sequence[Any]:
        return [None] * len(passes) if tensor is None else tensor.to(plan.device).split(lengths)

    parts: dict[str, Sequence[Any]] = {
        "temperature_N": cut(
            _flat([np.full(count, s.temperature) for s, count in zip(samples, counts, strict=True)])
        ),
        "sampler_logprob_N": cut(_flat([s.sampler_logprobs for s in samples])),
        "advantage_N": cut(_flat([row.advantages for row in rows])),
        "old_logprob_N": cut(_joined([a.old_logprob_N for a in annotated])),
        "ref_logprob_N": cut(_joined([a.ref_logprob_N for a in annotated])),
        "keep_N": cut(_joined([_keep(row, least) for row in rows])),
        "trained_count_S": cut(torch.tensor(counts), sizes),
        "episode_count_S": cut(torch.tensor([tokens[s.episode] for s in samples]), sizes),
        "group_S": cut(torch.tensor([s.group for s in samples]), sizes),
        "age_N": cut(_ages(samples)),
        "kept": [_kept([row.annotated.sample for row in members], plan) for members in passes],
    }
    streams = build_streams(
        [[_row(row.annotated.sample) for row in members] for members in passes], plan.stream, plan.device
    )
    return [
        MicroBatch(
            tokens_T=stream.tokens_T,
            positions_T=stream.positions_T,
            segments=stream.segments,
            num_rows=stream.num_rows,
            context_U=stream.context_U,
            context_N=stream.context_N,
            target_N=stream.target_N,
            sequence_N=stream.sequence_N,
            media=stream.media,
            **dict(zip(parts, own, strict=True)),
        )
        for stream, own in zip(streams, zip(*parts.values(), strict=True), strict=True)
    ]


def _ages(samples: Sequence[Sample]) -> Tensor | None:
    """Return the age of each trained token; None where all are 0."""
    if not any(sample.age for sample in samples):
        return None
    return torch.from_numpy(np.concatenate([ages_of(sample) for sample in samples]))


def _flat(values: Sequence[np.ndarray[tuple[int], Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0), *values]).astype(np.float32))


def _kept(samples: Sequence[Sample], plan: PackPlan) -> KeptTokens | None:
    """Return the sets that the samples' trained tokens were drawn from, with a count of 0 where a sample has
    none; None if none of them has any."""
    sets = [held(s.tokens).kept for s in samples]
    vocab = next((own.vocab for own in sets if own is not None), None)
    if vocab is None:
        return None
    parts = [
        own or KeptSets(vocab=vocab, counts=np.zeros(s.num_trained, np.int32), words=ints(()))
        for s, own in zip(samples, sets, strict=True)
    ]
    joined = KeptSets.joined(parts)
    return KeptTokens(
        vocab=vocab,
        count_N=upload(joined.counts.copy(), plan.device),
        words_K=upload(joined.words.copy(), plan.device),
    )


def _row(sample: Sample) -> Row:
    return Row(
        token_ids=sample.token_ids,
        is_trained=sample.is_trained,
        prompt_length=sample.prompt_length,
        prompt_key=sample.prompt_key,
        media=sample.media,
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [p for p in parts if p is not None]
    assert len(present) in (0, len(parts)), "either every row is annotated or none"
    return torch.cat(present) if present else None


def empty_micro(group: int, plan: PackPlan) -> MicroBatch:
    """A forward pass over one token that trains nothing, in a group of its step."""
    nothing = Sample(
        group=group,
        sibling=0,
        episode=0,
        tokens=TokenSequence.behind(1, token_ids=[0], is_trained=[False], logprobs=(), versions=()),
        temperature=1.0,
        outcome=Outcome.SCORED,
    )
    # An empty annotation stands for "annotated": whether a loss needs one follows from the configuration.
    none = torch.zeros(0)
    row = TrainSample(
        annotated=AnnotatedSample(sample=nothing, old_logprob_N=none, ref_logprob_N=none),
        advantage=0.0,
        loss_mask=bools(()),
    )
    return build_micros([[row]], plan, episode_tokens([row]))[0]
