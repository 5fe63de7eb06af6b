"""What cannot be in the tensors of an optimizer step: they say of every token what its sample says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from covey.algorithm.loss_types.declare import Average
from covey.algorithm.loss_types.registry import loss_named
from covey.health.guard import Guard
from covey.health.words import broken
from covey.texts import tr
from covey.types import Batch, MicroBatch, TrainSample
from covey.types.episode import held

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from covey.batching.shares import PackPlan

_ROUNDING = 1e-6
_LOST = tr("A row was counted twice, or left out of a forward pass.")


def check_batches(batches: Sequence[Batch], rows: Sequence[TrainSample], plan: PackPlan, step: int) -> None:
    """Raise GuardStop where the first pass over a rollout would train on something else than its rows.

    F110: a token, what it is predicted from, or its kept set is not the sample's. F111: tokens or
    denominators do not add up. F113: a token with another row's advantage. `step` is the number of the first
    batch's step.
    """
    from covey.batching.pack import episode_tokens
    from covey.batching.shares import steps_of

    first = [b for b in batches if b.pass_index == 0]
    samples = [r.annotated.sample for r in rows]
    steps = steps_of(samples, [r.needs_forward for r in rows], plan)[-len(first) :] if first else []
    for number, (batch, step_rows) in enumerate(zip(first, steps, strict=True)):
        everyone = [rows[i] for i in step_rows.rows]
        mine = [rows[i] for i in step_rows.of_rank(plan.rank)]
        _check_counts(batch, everyone, step + number)
        counts = episode_tokens(everyone)
        forwarded = [r for r in mine if r.needs_forward]
        _check_tokens(batch, forwarded, counts, step + number)
        _check_images(batch, forwarded, step + number)
        _check_sets(batch, forwarded, step + number)


def planned_loss(rows: Sequence[TrainSample], loss_type: str, longest: int) -> tuple[float, float]:
    """The loss of a step over `rows` at a ratio of 1 and without KL, and the sum of its terms' sizes.

    Taken from the rows as a whole, so it knows nothing of forward passes. `longest` is
    max_completion_length.
    """
    import numpy as np

    from covey.batching.pack import episode_tokens

    tokens_S = np.array([r.num_tokens for r in rows], dtype=np.float64)
    advantage_S = np.array([r.advantage for r in rows])
    count_of = episode_tokens(rows)
    own_S = np.array([count_of[r.annotated.sample.episode] for r in rows], dtype=np.float64)
    loss = loss_named(loss_type)
    assert loss.value_at_1 is not None, f"{loss.name} declares no value at a ratio of 1"
    weight_S = {
        Average.EPISODE: tokens_S / np.maximum(own_S, 1.0) / len(count_of),
        Average.EPISODES: tokens_S / len(count_of),
        Average.LENGTH: tokens_S / (len(count_of) * longest),
        Average.TOKENS: tokens_S / max(1.0, tokens_S.sum()),
    }[loss.average]
    size_S = np.array([_size(r) for r in rows])
    value, size = float(weight_S @ advantage_S), float(weight_S @ size_S)
    return loss.value_at_1 * value, abs(loss.value_at_1) * size


def _size(row: TrainSample) -> float:
    """The mean size of the advantages of a row's tokens."""
    tokens = row.token_advantages
    return abs(row.advantage) if tokens is None else fmean(map(abs, tokens.tolist()))


def _check_counts(batch: Batch, rows: Sequence[TrainSample], step: int) -> None:
    d = batch.denominators
    tokens = sum(r.num_tokens for r in rows)
    num_episodes = len({r.annotated.sample.episode for r in rows})
    if (d.num_episodes, d.num_tokens) != (num_episodes, tokens):
        seen = tr(
            "the step divides by {divided_by} completions and {num_tokens} tokens, but its rows "
            "have {num_episodes} completions and {tokens} tokens",
            divided_by=d.num_episodes,
            num_tokens=d.num_tokens,
            num_episodes=num_episodes,
            tokens=tokens,
        )
        raise broken("F111", step, seen, tr("Denominators were counted over a part of the step."))
    own = sum(int(m.trained_count_S.sum()) for m in batch.micro_batches)
    there = sum(int(m.target_N.shape[0]) for m in batch.micro_batches)
    if own != there:
        seen = tr(
            "the forward passes contain {there} loss tokens, but their sequences count {own}",
            there=there,
            own=own,
        )
        raise broken("F111", step, seen, _LOST)


def _positions(micro: MicroBatch) -> Tensor:
    """Return the position of the token before each trained one; of text all three are the same."""
    position_T = micro.positions_T if micro.positions_T.dim() == 1 else micro.positions_T[0]
    return position_T[micro.context_U[micro.context_N]]


def _own_positions(rows: Sequence[TrainSample], at: Sequence[Any]) -> list[Any]:
    """Return the position of the token before each trained one of each row, which are number `at` of it."""
    from covey.media_positions import positions_of

    samples = [row.annotated.sample for row in rows]
    return [
        positions_of(s.token_ids, s.media)[0, n - 1] if s.media else n - 1
        for s, n in zip(samples, at, strict=True)
    ]


def _check_images(batch: Batch, rows: Sequence[TrainSample], step: int) -> None:
    """Raise GuardStop (F110) where the passes have other images than their rows."""
    trained = {m.key for micro in batch.micro_batches if micro.media for m in micro.media.media}
    own = {medium.key for row in rows for medium in row.annotated.sample.media}
    if trained != own:
        seen = tr(
            "the forward passes have {num} images, {same} of them among the {own} of their samples",
            num=len(trained),
            same=len(trained & own),
            own=len(own),
        )
        raise broken("F110", step, seen, tr("Images were lost, or sorted into the wrong rows."))


def _check_tokens(batch: Batch, rows: Sequence[TrainSample], tokens_of: Mapping[int, int], step: int) -> None:
    """Raise GuardStop (F110, F111, F113) where the tensors of the passes are not those of their rows."""
    import numpy as np

    ids = [r.annotated.sample.token_ids for r in rows]
    at = [np.flatnonzero(r.annotated.sample.is_trained) for r in rows]
    counts, micros = [len(n) for n in at], batch.micro_batches

    def joined(parts: Sequence[np.ndarray[tuple[int], Any]]) -> np.ndarray:  # type: ignore[type-arg]
        return np.concatenate(parts) if parts else np.empty(0)

    def repeated(values: Sequence[float]) -> np.ndarray:  # type: ignore[type-arg]
        return np.repeat(np.asarray(values, dtype=np.float64), counts)

    trained = joined([i[n] for i, n in zip(ids, at, strict=True)])
    before = joined([i[n - 1] for i, n in zip(ids, at, strict=True)])
    for name, code, tensors, expected in (
        ("targets", "F110", [m.target_N for m in micros], trained),
        (
            tr("tokens before the targets"),
            "F110",
            [m.tokens_T[m.context_U[m.context_N]] for m in micros],
            before,
        ),
        ("positions", "F110", [_positions(m) for m in micros], joined(_own_positions(rows, at))),
        ("advantages", "F113", [m.advantage_N for m in micros], joined([r.advantages for r in rows])),
        (
            "temperatures",
            "F110",
            [m.temperature_N for m in micros],
            repeated([r.annotated.sample.temperature for r in rows]),
        ),
        (
            tr("tokens of the whole completion"),
            "F111",
            [m.episode_count_S[m.sequence_N] for m in micros],
            repeated([tokens_of[r.annotated.sample.episode] for r in rows]),
        ),
    ):
        values = np.concatenate([t.cpu().numpy() for t in tensors])
        if values.size != expected.size:
            seen = tr(
                "the forward passes contain {in_passes} loss tokens, but the samples contain {in_samples}",
                in_passes=values.size,
                in_samples=expected.size,
            )
            raise broken("F111", step, seen, _LOST)
        wrong = int((np.abs(values - expected) > _ROUNDING * np.abs(expected)).sum())
        if wrong:
            seen = tr(
                "the {name} of {wrong} of {size} loss tokens differ from those of their samples",
                name=name,
                wrong=wrong,
                size=expected.size,
            )
            raise broken(code, step, seen, tr("A mask or an index is shifted by one, or rows were mixed."))


def _check_sets(batch: Batch, rows: Sequence[TrainSample], step: int) -> None:
    """Raise GuardStop (F110) where tokens would be trained within other sets than they were drawn from."""
    import numpy as np

    own = [held(r.annotated.sample.tokens).kept for r in rows]
    sampled = [part for part in own if part is not None]
    trained = [micro.kept for micro in batch.micro_batches if micro.kept is not None]
    counts, words = (
        np.concatenate([np.empty(0), *(getattr(part, name) for part in sampled)])
        for name in ("counts", "words")
    )
    trained_counts, trained_words = (
        np.concatenate([np.empty(0), *(getattr(part, name).cpu().numpy() for part in trained)])
        for name in ("count_N", "words_K")
    )
    is_same = np.array_equal(counts[counts > 0], trained_counts[trained_counts > 0])
    if not is_same or not np.array_equal(words, trained_words):
        seen = tr(
            "what top_p, top_k and min_p kept is not the same in sampling and training: {sampled} ids for "
            "{num_sampled} sampled tokens, {trained} ids for {num_trained} trained ones",
            trained=int(trained_counts.sum()),
            num_trained=int((trained_counts > 0).sum()),
            sampled=int(counts.sum()),
            num_sampled=int((counts > 0).sum()),
        )
        raise broken("F110", step, seen, tr("A mask or an index is shifted by one, or rows were mixed."))


GUARD = Guard(place=4, of_batches=lambda seen: check_batches(seen.batches, seen.rows, seen.plan, seen.step))
