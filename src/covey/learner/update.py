"""Update: one optimizer step over its micro-batches, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.activity import Activity
from covey.algorithm.agreement import NUM_SUMS, agreement_metrics, agreement_sums
from covey.algorithm.contrast import Contrast
from covey.algorithm.correction import derived_metrics
from covey.algorithm.loss_types.registry import SUMS_OF_SEQUENCES, loss_named
from covey.algorithm.losses import LossConfig, LossInputs, LossOutput, policy_loss
from covey.comm import Comm
from covey.errors import GuardStop
from covey.learner.backends.base import Backend, LossFunction
from covey.learner.grouped import contrasts
from covey.learner.optimizer import NonFiniteGradient
from covey.learner.second_gradient import RandomStates, compare_gradients
from covey.texts import joined, tr
from covey.types import Batch, Finding, Fix, Metric, MicroBatch, StepResult, TokenStats

# The sum of entropies within kept sets, and how many tokens have a set.
_KEPT_ENTROPY, _NUM_SETS = "entropy_kept", "num_sets"
_GAP = "sampling/sampling_logp_difference/mean"


@dataclass(slots=True)
class _Sums:
    """Sums over the trained tokens of a step on this rank. What they are of is kept on the device, and added
    up when the step is over. `gradients` are samples of the gradient, before the first pass and behind
    each. `gaps` are the largest differences of a pass from the old logprobs. `pairs` are the logprobs of the
    engine and the learner, and `aged` those of what weights sampled that the learner had before, and of the
    learner now."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    tokens: int = 0
    sequences: int = 0
    has_signal: Sequence[bool] = ()
    gradients: list[Tensor] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    aged: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(
        self, inputs: LossInputs, output: LossOutput, micro: MicroBatch, kept_entropy_N: Tensor | None
    ) -> None:
        age_N, nothing = micro.age_N, inputs.logprob_N.new_zeros(0)
        logprob_N, old_N = inputs.logprob_N.detach(), inputs.old_logprob_N
        assert inputs.entropy_N is not None and inputs.sampler_logprob_N is not None
        learner_N, engine_N = logprob_N if old_N is None else old_N, inputs.sampler_logprob_N
        if age_N is not None:
            is_new_N = age_N == 0
            self.aged.append((engine_N[~is_new_N], logprob_N[~is_new_N]))
            learner_N, engine_N = learner_N[is_new_N], engine_N[is_new_N]
        self.pairs.append((engine_N, learner_N))
        found = {
            "loss": output.loss.detach(),
            "entropy": inputs.entropy_N.detach(),
            _KEPT_ENTROPY: nothing if kept_entropy_N is None else kept_entropy_N,
            _NUM_SETS: nothing if micro.kept is None else (micro.kept.count_N > 0).float(),
            _GAP: (learner_N - engine_N).abs_(),
            **output.sums,
        }
        for name, value in found.items():
            self.values.setdefault(name, []).append(value)
        self.tokens += int(logprob_N.shape[0])
        self.sequences += int(inputs.trained_count_S.shape[0]) if logprob_N.shape[0] else 0
        if old_N is not None:
            moved_N = (logprob_N - old_N).abs()
            if age_N is not None:
                moved_N = moved_N[age_N == 0]
            if moved_N.numel():
                self.gaps.append(moved_N.max())

    def look(self, probe: Tensor | None) -> None:
        """Keep a sample of the gradient, where the backend knows it."""
        if probe is not None:
            self.gradients.append(probe)

    @property
    def silent(self) -> int:
        """How many passes with signal changed no gradient; 0 where the backend does not know."""
        if not self.gradients:
            return 0
        sample_MX = torch.stack(self.gradients)
        has_changed = (sample_MX[1:] != sample_MX[:-1]).any(dim=1).tolist()
        return sum(asked and not changed for asked, changed in zip(self.has_signal, has_changed, strict=True))

    def agreement(self) -> tuple[list[float], float]:
        """The sums of `agreement_sums` on this rank, and the largest gap between engine and learner; -1
        without a token. Then those of `aged`."""
        sums, furthest = _agreement(self.pairs)
        return [*sums, *_agreement(self.aged)[0]], furthest

    def totals(self) -> dict[str, float]:
        """The sums over all micro-batches."""
        parts = {
            name: torch.cat([value.reshape(-1) for value in values]).sum(dtype=torch.float64)
            for name, values in self.values.items()
        }
        return dict(zip(parts, torch.stack(list(parts.values())).tolist(), strict=True))


def _agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[float], float]:
    """The sums of `agreement_sums` and the largest gap; -1 without a token."""
    if not any(engine_N.numel() for engine_N, _ in pairs):
        return [0.0] * NUM_SUMS, -1.0
    engine_N, learner_N = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    furthest = (engine_N - learner_N).abs().max().double().reshape(1)
    *sums, gap = torch.cat([agreement_sums(engine_N, learner_N), furthest]).tolist()
    return sums, gap


def update(
    batch: Batch,
    backend: Backend,
    config: LossConfig,
    learning_rate: float,
    comm: Comm,
    *,
    compare: bool = False,
    before_step: Callable[[], None] = lambda: None,
) -> StepResult:
    """Take one optimizer step.

    A step whose every row is out of the loss is skipped. One without signal calls the optimizer with a zero
    gradient, as TRL does. With `compare`, for a step with ratios of 1, its gradient is computed a second
    time and the result says how far the two are apart. `before_step` is called when the gradient
    is whole. Raises GuardStop (F101) before anything is applied where the gradient is not finite.
    """
    comm.begin("update", num_micro=len(batch.micro_batches), num_tokens=batch.denominators.num_tokens)
    if batch.denominators.num_tokens == 0:
        return StepResult(stats=None, metrics={}, skipped=tr("every row is masked or invalid"))
    random_states = RandomStates(backend.policy.device)
    sums = accumulate(batch, backend, config, comm)
    match = compare_gradients(batch, backend, config, random_states, comm) if compare else None
    before_step()
    try:
        step = backend.step(learning_rate)
        comm.activity.leave_collective()
    except NonFiniteGradient as error:
        raise GuardStop(_non_finite(str(error), sums, comm.activity.step + 1)) from error
    metrics, silent, gap = _reduce(sums, comm)
    return StepResult(stats=step, metrics=metrics, silent=silent, ratio_gap=gap, match=match)


def accumulate(batch: Batch, backend: Backend, config: LossConfig, comm: Comm) -> _Sums:
    """Forward and backward of every micro-batch: the backend then holds the gradient of the step."""
    activity, num_micro = comm.activity, len(batch.micro_batches)
    of_groups: Sequence[Contrast | None] = [None] * num_micro
    if loss_named(config.loss_type).by_group:
        of_groups = contrasts(batch, backend, config.real_tau, comm)
    sums = _Sums(has_signal=batch.has_signal)
    sums.look(backend.gradient_probe())
    for number, (micro, contrast) in enumerate(zip(batch.micro_batches, of_groups, strict=True), start=1):
        activity.advance(number, num_micro)
        is_last = number == num_micro
        loss = _loss_of(batch, config, contrast, activity if is_last and comm.world > 1 else None)
        stats, output = backend.backward(micro, loss, last=is_last)
        sums.add(micro_inputs(stats, micro, batch, contrast), output, micro, stats.kept_entropy_N)
        sums.look(backend.gradient_probe())
    return sums


def _loss_of(
    batch: Batch, config: LossConfig, contrast: Contrast | None, activity: Activity | None
) -> LossFunction:
    """The loss of a micro-batch; `activity` is given where other ranks are waited for after it."""

    def loss(stats: TokenStats, micro: MicroBatch) -> LossOutput:
        output = policy_loss(micro_inputs(stats, micro, batch, contrast), config)
        if activity is not None:
            # The backward pass that follows reduces gradients over ranks. A GPU takes that on, and the host
            # waits for it only when the step reads the norm.
            activity.wait("gradients")
        return output

    return loss


def _reduce(sums: _Sums, comm: Comm) -> tuple[Mapping[str, Metric], int, float | None]:
    """Means over the tokens that were forwarded on all ranks, in one collective; the loss is a plain sum.

    The same collective gives the backward passes that changed no gradient, and the largest gap to the old
    logprobs.
    """
    local = sums.totals()
    names = sorted(local)
    own, furthest = sums.agreement()
    values = [*own, *(local[n] for n in names), float(sums.tokens), float(sums.sequences)]
    (silent, gap, apart), found = _with_evidence(sums, furthest, values, comm)
    agreement, aged = found[:NUM_SUMS], found[NUM_SUMS : 2 * NUM_SUMS]
    *totals, tokens, sequences = found[2 * NUM_SUMS :]
    num_sets = int(totals[names.index(_NUM_SETS)])
    counts = {name: int(sequences if name in SUMS_OF_SEQUENCES else tokens) for name in names}
    counts |= {_KEPT_ENTROPY: num_sets, _GAP: int(agreement[0])}
    means = {
        name: total / counts[name] if counts[name] else None
        for name, total in zip(names, totals, strict=True)
        if name != _NUM_SETS and (num_sets or name != _KEPT_ENTROPY)
    }
    metrics = {
        n: Metric(value=v, count=counts.get(n, int(tokens))) for n, v in derived_metrics(means).items()
    }
    compared = agreement_metrics(agreement, apart)
    metrics |= {n: Metric(value=v, count=int(agreement[0])) for n, v in compared.items()}
    if aged[0]:
        ess = agreement_metrics(aged, None)["sampling/ess"]
        metrics["age/ess"] = Metric(value=ess, count=int(aged[0]))
    metrics["loss"] = Metric(value=totals[names.index("loss")], count=int(tokens))
    metrics.setdefault("kl", Metric(value=None, count=0))
    return metrics, silent, gap


def _with_evidence(
    sums: _Sums, furthest: float, values: Sequence[float], comm: Comm
) -> tuple[tuple[int, float | None, float | None], list[float]]:
    """Return the passes without a gradient, over all ranks, with the largest gaps to the old logprobs and to
    the engine's; and the sums of `values` over ranks. One collective does all of it.

    A maximum is computed by a sum: every rank has an entry of its own, which holds 0 on all others.
    """
    world = comm.world
    gaps = [0.0] * (2 * world)
    gaps[comm.rank] = float(torch.stack(sums.gaps).max()) if sums.gaps else -1.0
    gaps[world + comm.rank] = furthest
    silent, *found = comm.sum([float(sums.silent), *gaps, *values])
    largest = _largest(found[:world]), _largest(found[world : 2 * world])
    return (int(silent), *largest), found[2 * world :]


def _largest(gaps: Sequence[float]) -> float | None:
    """The largest of the gaps of all ranks; -1 stands for none."""
    # Python's max drops a NaN that does not come first.
    largest = math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)
    return None if largest < 0.0 else largest


def _non_finite(seen: str, sums: _Sums, step: int) -> Finding:
    broken = [name for name, value in sums.totals().items() if not math.isfinite(value)]
    return Finding(
        code="F101",
        seen=tr(
            "{seen}; not finite in this step: {broken}",
            seen=seen,
            broken=joined(", ", sorted(broken)) or tr("only the gradient"),
        ),
        why=tr("A step with such a gradient turns every weight into NaN. It was not applied."),
        cause=tr("A ratio or logit overflowed, most often because the learning rate is too high."),
        fixes=(
            Fix(text=tr("use a smaller learning rate")),
            Fix(text="float32", edits={"torch_dtype": "float32"}),
        ),
        step=step,
    )


def micro_inputs(
    stats: TokenStats, micro: MicroBatch, batch: Batch, contrast: Contrast | None = None
) -> LossInputs:
    """Those of one micro-batch; `contrast` is for the loss `real`."""
    return LossInputs(
        logprob_N=stats.logprob_N,
        old_logprob_N=micro.old_logprob_N,
        ref_logprob_N=micro.ref_logprob_N,
        advantage_N=micro.advantage_N,
        sequence_N=micro.sequence_N,
        trained_count_S=micro.trained_count_S,
        episode_count_S=micro.episode_count_S,
        denominators=batch.denominators,
        sampler_logprob_N=micro.sampler_logprob_N,
        entropy_N=stats.entropy_N,
        keep_N=micro.keep_N,
        contrast=contrast,
    )
