"""One optimizer step on a tiny model, without a run: rows with every annotation, cut and laid out at will."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.algorithm.correction import Correction
from covey.algorithm.losses import LossConfig
from covey.batching.credit import row_credits
from covey.batching.needs import Needs
from covey.batching.pack import pack
from covey.batching.samples import to_samples
from covey.batching.shares import PackPlan, steps_of
from covey.comm import Comm, LocalComm
from covey.learner.annotate import annotate, annotate_and_credit
from covey.learner.backends.base import Backend
from covey.learner.backends.single import SingleBackend
from covey.learner.update import accumulate
from covey.models.policy import Policy
from covey.rewards.registry import total
from covey.types import (
    AnnotatedSample,
    Finish,
    KeptSets,
    Score,
    ScoredGroup,
    ScorePart,
    Status,
    TokenSequence,
    TrainSample,
)
from support.groups import episode, scored
from support.models import random_model
from support.options import credit, learner

OPTIMIZER = learner()
CREDIT = credit(loss_type="real", mask_truncated_completions=True)
GROUPS, SIBLINGS = 3, 4
BASE = LossConfig(loss_type="dapo", epsilon=0.1, epsilon_high=0.15)


@dataclass(frozen=True)
class Case:
    """A loss on a step; `share` is the top_entropy_quantile, and on-policy there are no old logprobs."""

    config: LossConfig
    share: float = 1.0
    is_on_policy: bool = False


def _case(
    loss_type: str = "dapo", *, share: float = 1.0, is_on_policy: bool = False, **changes: object
) -> Case:
    if loss_type == "cispo":
        changes = {"epsilon_high": 1.1, **changes}
    return Case(replace(BASE, loss_type=loss_type, **changes), share, is_on_policy)


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "fipo")
CASES: dict[str, Case] = {
    **{
        f"{loss}, {level}": _case(loss, importance_sampling_level=level)
        for loss in LOSSES
        for level in ("token", "sequence", "sequence_token")
    },
    **{f"{loss}, on-policy": _case(loss, is_on_policy=True) for loss in ("vespo", "real", "sapo")},
    "vespo": _case("vespo"),
    "real": _case("real"),
    "real, k3": _case("real", beta=0.1),
    "delta": _case(delta=1.2),
    **{f"{name}": _case(beta=0.1, kl_estimator=name) for name in ("k1", "k2", "k3")},
    "entropy bonus": _case(entropy_coef=0.1),
    "entropy bonus, grpo": _case("grpo", entropy_coef=0.1),
    **{f"top entropy, {loss}": _case(loss, share=0.3) for loss in ("dapo", "grpo", "luspo")},
    **{
        f"top entropy at {level}": _case(share=0.3, importance_sampling_level=level)
        for level in ("sequence", "sequence_token")
    },
    "top entropy and bonus": _case(share=0.3, entropy_coef=0.1),
    "off-policy mask": _case(off_policy_delta=0.02),
    **{
        f"{mode}": _case(correction=Correction(mode=mode, threshold=1.01))
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "product": _case(
        correction=Correction(mode="sequence_truncate", threshold=3.0, is_product=True, floor=0.5)
    ),
    "vespo, corrected": _case("vespo", correction=Correction(mode="token_truncate", threshold=1.05)),
}
"""Every loss at every level, and everything that may be added to one."""


def policy(stream: str) -> Policy:
    """The same random weights at every call."""
    return Policy(random_model("qwen2"), stream=stream).train()


def rollout() -> list[ScoredGroup]:
    """Three groups of four, short ones first: one row failed, one was cut, one group is all equal."""
    rng = random.Random(11)
    groups = []
    for number in range(GROUPS):
        prompt = tuple(rng.randrange(300) for _ in range(rng.randint(3, 9)))
        episodes, scores = [], []
        for sibling in range(SIBLINGS):
            own = tuple(rng.randrange(300) for _ in range(rng.randint(1, 4 + 7 * number)))
            is_cut = (number, sibling) == (2, 3)
            episodes.append(
                episode(
                    prompt,
                    own,
                    number=number,
                    sibling=sibling,
                    logprobs=[-5.0] * len(own),
                    finish=Finish.LENGTH if is_cut else Finish.STOP,
                )
            )
            is_failed = (number, sibling) == (0, 1)
            reward = None if is_failed else 1.0 if number == 1 else rng.random()
            scores.append(Score(total=reward, parts=(), status=Status.ERROR if is_failed else Status.OK))
        groups.append(scored(episodes, scores, number=number))
    return groups


def plan_of(**changes: object) -> PackPlan:
    """The whole step in one forward pass, but for what is changed."""
    plan = PackPlan(
        rank=0,
        world=1,
        completions_per_rank=GROUPS * SIBLINGS,
        num_iterations=1,
        max_tokens=10_000,
        max_completion_length=24,
        stream="prefix",
        device=torch.device("cpu"),
    )
    return replace(plan, **changes)


def rows() -> list[TrainSample]:
    """Rows whose old, reference and sampler's logprobs lie around those of the policy."""
    generator = torch.Generator().manual_seed(5)
    found = annotate_and_credit(
        rollout(),
        SingleBackend(policy("prefix"), OPTIMIZER),
        credit=CREDIT,
        needs=Needs(old=True, reference=False, may_skip_rows=False, entropy=True),
        plan=plan_of(),
        comm=LocalComm(),
    )

    return [_moved(row, generator) for row in found]


def _moved(row: TrainSample, generator: torch.Generator) -> TrainSample:
    here = row.annotated
    old, reference, sampler = (
        here.old_logprob_N + scale * torch.randn(len(here.old_logprob_N), generator=generator)
        for scale in (0.15, 0.3, 0.1)
    )
    sample = replace(here.sample, tokens=replace(here.sample.tokens, logprobs=tuple(sampler.tolist())))
    return replace(row, annotated=replace(here, sample=sample, old_logprob_N=old, ref_logprob_N=reference))


def random_sets(token_ids: Sequence[int], seed: int, vocab: int) -> KeptSets:
    """For each token a set that has it: alone, as a short list, as a bitmap, or the whole vocabulary."""
    rng = random.Random(seed)
    sizes = [rng.choice((1, 1, 2, 3, 9, vocab // 4, vocab - 1, vocab)) for _ in token_ids]
    return KeptSets.of(
        [
            {token, *rng.sample(range(vocab), size)} if size > 1 else {token}
            for token, size in zip(token_ids, sizes, strict=True)
        ],
        vocab,
    )


def with_sets(row: TrainSample, vocab: int) -> TrainSample:
    """The row as if filters had left a random set to draw each of its tokens from."""
    sample = row.annotated.sample
    kept = random_sets(sample.tokens.trained_ids.tolist(), 100 * sample.episode + sample.sequence, vocab)
    tokens = replace(sample.tokens, kept=kept)
    return replace(row, annotated=replace(row.annotated, sample=replace(sample, tokens=tokens)))


def episode_rows(*, has_sets: bool = False) -> list[TrainSample]:
    """The same completions, of which some go on in a second and a third row, behind a history that is not
    trained; of one the last row is masked. With `has_sets` filters have left random sets."""
    rng, generator = random.Random(7), torch.Generator().manual_seed(6)
    found = []
    for row in rows():
        found.append(row)
        sample = row.annotated.sample
        for place in range(sample.episode % 3):
            history, own = ([rng.randrange(300) for _ in range(rng.randint(1, 9))] for _ in range(2))
            prompt, num = sample.token_ids[: sample.prompt_length], len(own)
            later = replace(
                sample,
                sequence=place + 1,
                tokens=TokenSequence.behind(
                    len(prompt),
                    token_ids=(*prompt, *history, *own),
                    is_trained=(False,) * (len(prompt) + len(history)) + (True,) * num,
                    logprobs=(0.0,) * num,
                    versions=((0, num),),
                ),
            )
            is_cut = (sample.episode, place) == (8, 1)
            found.append(
                replace(
                    row,
                    annotated=AnnotatedSample(sample=later),
                    loss_mask=(row.masked is None and not is_cut,) * num,
                    masked="truncated" if is_cut else row.masked,
                    needs_forward=row.needs_forward and not is_cut,
                )
            )
    if has_sets:
        found = [with_sets(row, policy("prefix").vocab) for row in found]
    samples = [row.annotated.sample for row in found]
    backend, everything = SingleBackend(policy("prefix"), OPTIMIZER), [True] * len(samples)
    steps = steps_of(
        samples, everything, replace(plan_of(), completions_per_rank=len({s.episode for s in samples}))
    )
    annotated = [
        AnnotatedSample(sample=sample, old_logprob_N=old, entropy_N=entropy)
        for sample, old, entropy in zip(
            samples,
            annotate(samples, everything, steps, backend, "old", plan_of(), LocalComm()),
            annotate(samples, everything, steps, backend, "entropy", plan_of(), LocalComm()),
            strict=True,
        )
    ]
    return [
        _moved(replace(row, annotated=here), generator) for row, here in zip(found, annotated, strict=True)
    ]


def stepped_rows(*, flat: bool = False) -> list[TrainSample]:
    """The same with numbers of up to four steps a completion; `flat` gives the tokens of a row their mean."""
    rng, groups = random.Random(4), []
    for given in rollout():
        scores = []
        for answer, score in zip(given.group.episodes, given.scores, strict=True):
            length = len(answer.completion_ids)
            ends = sorted({*rng.sample(range(1, length + 1), min(3, length)), length})
            steps = tuple(rng.random() for _ in ends)
            part = ScorePart(name="prm", value=sum(steps) / len(steps), steps=steps)
            outcome = ScorePart(name="accuracy", value=score.total)
            told = total([part, outcome], [1.0, 1.0], tuple(ends))
            scores.append(told if score.status is Status.OK else score)
        groups.append(replace(given, scores=tuple(scores)))
    credits = row_credits(groups, to_samples(groups), CREDIT)
    assert sum(c.token_advantages is not None for c in credits) >= 8
    return [
        replace(row, advantage=c.advantage, token_advantages=None if flat else c.token_advantages)
        for row, c in zip(rows(), credits, strict=True)
    ]


def for_case(given: Sequence[TrainSample], case: Case) -> list[TrainSample]:
    """The rows with the annotations that a case has."""

    def one(row: TrainSample) -> TrainSample:
        here = row.annotated
        kept = replace(
            here,
            old_logprob_N=None if case.is_on_policy else here.old_logprob_N,
            ref_logprob_N=here.ref_logprob_N if case.config.beta else None,
            entropy_N=here.entropy_N if case.share < 1.0 else None,
        )
        return replace(row, annotated=kept)

    return [one(row) for row in given]


def reordered(given: Sequence[TrainSample], seed: int) -> list[TrainSample]:
    """The same rows with the groups, and the siblings within each, in another order."""
    rng = random.Random(seed)
    order = rng.sample(range(GROUPS), GROUPS)
    out = []
    for place, group in enumerate(order):
        members = [row for row in given if row.annotated.sample.group == group]
        for sibling, row in enumerate(rng.sample(members, len(members))):
            sample = replace(row.annotated.sample, group=place, sibling=sibling, episode=len(out))
            out.append(replace(row, annotated=replace(row.annotated, sample=sample)))
    return out


def gradient(
    given: Sequence[TrainSample], case: Case, plan: PackPlan, backend: Backend, comm: Comm
) -> tuple[float, dict[str, Tensor]]:
    """The step's loss over all ranks, and its gradient."""
    plan = replace(plan, top_entropy_quantile=case.share)
    (batch,) = pack(for_case(given, case), plan, rollout=0)
    sums = accumulate(batch, backend, case.config, comm)
    (loss,) = comm.sum([sums.totals()["loss"]])
    return loss, backend.masters.gradients()


def alone(given: Sequence[TrainSample], case: Case, **changes: object) -> tuple[float, dict[str, Tensor]]:
    """The same in this process."""
    plan = plan_of(**changes)
    return gradient(given, case, plan, SingleBackend(policy(plan.stream), OPTIMIZER), LocalComm())
