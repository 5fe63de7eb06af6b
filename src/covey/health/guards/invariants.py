"""What cannot be on a healthy run, checked on every optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from covey.health.guard import Guard
from covey.health.words import broken
from covey.texts import joined, tr
from covey.types import Batch, Fix, GradientMatch, StepResult, StepStats

if TYPE_CHECKING:
    from covey.comm import Comm

# Larger than the noise of any kernel, smaller than what any fault leaves.
_SAME = 1e-4
# The same for a sum of terms, each of whose ratios may be _SAME away from 1.
_LOSS = 1e-3
# Of the weights with a gradient, at least this share moves once the learning rate is near its peak.
_FEW = 0.5
_FULL = 0.5
# How close to a whole number of counts a wrong scale has to be for that to be named as its cause.
_NEAR = 0.02


EngineName = Literal["native", "generate", "vllm", "servers", "rollout_func"]
"""Names what samples: the built-in engine, transformers' `generate`, vLLM in the processes, servers, or a
rollout function of the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step is held to.

    `is_fresh`: no update since the rollout was annotated. `is_start`: no update since the run began from its
    reference.
    `sampler_gap`: the largest mean |logprob - sampler's logprob| that rounding explains, None where the
    policy that sampled is unknown. `gradient_gap`: the largest relative difference between two computations
    of a gradient that rounding explains. `peak_rate`: the learning rate that was asked for. `may_lack`: parts
    of the names of trained tensors that may have no gradient in this step. `loss`: the loss that the
    advantages of all rows give, and the sum of its terms' sizes; None where they alone do not give it.
    `may_be_silent`: advantages may leave no gradient, because of what the loss weighs them with. `engine` is
    what has sampled. `of_images`: names of trained tensors that have a gradient through images alone, which
    may lack one where `images_may_lack` has a part of the name; `only_images`: no others are trained.
    `has_images`: a forward pass of the step, on any rank, has an image, and each of its tokens an advantage.
    """

    step: int
    is_fresh: bool
    is_start: bool
    sampler_gap: float | None
    gradient_gap: float
    peak_rate: float
    may_lack: tuple[str, ...]
    loss: tuple[float, float] | None = None
    may_be_silent: bool = False
    engine: EngineName = "native"
    of_images: frozenset[str] = frozenset()
    images_may_lack: tuple[str, ...] = ()
    only_images: bool = False
    has_images: bool = False

    def sees(self, stats: StepStats) -> bool:
        """Return whether tensors that see images have, or must have, a gradient in a step."""
        return self.has_images or not self.of_images <= set(stats.untouched)

    def lost(self, stats: StepStats) -> list[str]:
        """Return the trained tensors that have no gradient and should have one."""
        sees = self.sees(stats)
        return [
            name
            for name in stats.untouched
            if not _has_part(name, self.may_lack)
            and not (name in self.of_images and (not sees or _has_part(name, self.images_may_lack)))
        ]


def _has_part(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)


def check_step(batch: Batch, result: StepResult, facts: StepFacts, comm: Comm) -> None:
    """Raise GuardStop where a step contradicts its own batch.

    F102: advantages and a ratio of 1, but no gradient. F123: the same in one micro-batch. F103: a gradient
    and a learning rate, but weights that stay. F115: the sampler's probabilities are not the learner's.
    F116: a ratio other than 1 before any update. F111: a loss that is not the one of the step's rows. F117:
    a KL to the reference before any update. F124: a trained tensor without gradient. F127: a gradient that
    is not its rows'.
    """
    stats = result.stats
    if stats is None:
        return
    _check_gradient(batch, result, facts, comm)
    _check_weights(stats, any(batch.has_signal), facts)
    if facts.is_fresh:
        _check_fresh(result, facts)
    if result.match is not None:
        _check_match(result.match, batch, facts, comm)


def _check_gradient(batch: Batch, result: StepResult, facts: StepFacts, comm: Comm) -> None:
    stats = result.stats
    assert stats is not None
    if facts.may_be_silent or (facts.only_images and not facts.has_images):
        return
    is_on_policy = facts.is_fresh or all(m.old_logprob_N is None for m in batch.micro_batches)
    # The norm is the same on every rank, so all of them ask each other or none does.
    if stats.grad_norm == 0.0 and any(comm.max([float(is_on_policy and any(batch.has_signal))])):
        raise broken(
            "F102",
            facts.step,
            tr("trained tokens have advantages, but the gradient is exactly 0"),
            tr(
                "The loss is not connected to the weights: parameters are frozen, or a layer detaches "
                "its output."
            ),
        )
    if result.silent and is_on_policy:
        raise broken(
            "F123",
            facts.step,
            tr(
                "{silent} of the micro-batches with advantages added nothing to the gradient",
                silent=result.silent,
            ),
            tr(
                "A hook, the engine's own accumulation or a cleared buffer lost the result of a "
                "backward pass."
            ),
        )


def _check_match(match: GradientMatch, batch: Batch, facts: StepFacts, comm: Comm) -> None:
    if match.gap <= facts.gradient_gap:
        return
    passes, world = len(batch.micro_batches), comm.world
    known = (
        (1.0 / passes, tr("This is the result of dividing by the {passes} micro-batches.", passes=passes)),
        (1.0 / world, tr("This is the result of averaging over the {world} ranks.", world=world)),
        (float(world), tr("This is the result of multiplying by the {world} ranks.", world=world)),
        (2.0, tr("This is the result of counting everything twice.")),
    )
    near = [words for scale, words in known if scale != 1.0 and abs(match.scale / scale - 1.0) < _NEAR]
    cause = tr("A hook, an engine or a buffer lost a backward pass, counted it twice or scaled it.")
    raise broken(
        "F127",
        facts.step,
        tr(
            "the gradient of the step is {scale:.4g} times the gradient of its rows computed again "
            "without accumulation (1 is right); the relative difference of {worst} is {gap:.2g}, "
            "and rounding explains at most {gradient_gap:g}",
            scale=match.scale,
            worst=match.worst,
            gap=match.gap,
            gradient_gap=facts.gradient_gap,
        ),
        joined(" ", near) if near else cause,
    )


def _check_weights(stats: StepStats, has_signal: bool, facts: StepFacts) -> None:
    asked = stats.grad_norm > 0.0 and stats.learning_rate > 0.0
    # During a warm-up a rate may be too small for a while; float32 holds every step of the rate itself.
    is_full = stats.learning_rate >= _FULL * facts.peak_rate and stats.frac_moved is not None
    if asked and (stats.frac_params_changed == 0.0 or (is_full and stats.frac_moved < _FEW)):  # type: ignore[operator]
        larger = Fix(text=tr("use a larger learning rate"), edits={"learning_rate": 1e-6})
        share = stats.frac_params_changed if stats.frac_moved is None else stats.frac_moved
        raise broken(
            "F103",
            facts.step,
            tr(
                "gradient norm {grad_norm:.3g} and learning rate {learning_rate:.3g}, but only "
                "{share:.1%} of the weights with a gradient changed",
                grad_norm=stats.grad_norm,
                learning_rate=stats.learning_rate,
                share=share,
            ),
            tr(
                "The learning rate is too small for the precision of the weights, or the optimizer "
                "does not update the float32 master weights."
            ),
            *([larger] if facts.peak_rate < larger.edits["learning_rate"] else []),
        )
    lost = facts.lost(stats)
    if has_signal and stats.grad_norm > 0.0 and lost:
        more = tr(" and {num_lost} more", num_lost=len(lost) - 3) if len(lost) > 3 else ""
        raise broken(
            "F124",
            facts.step,
            tr(
                "{num_lost} tensors that are trained have a gradient of exactly 0: {lost}{more}",
                num_lost=len(lost),
                lost=joined(", ", lost[:3]),
                more=more,
            ),
            tr("They are frozen, not used in the forward pass, or a hook clears their gradient."),
        )


def _another_engine(engine: EngineName) -> tuple[Fix, ...]:
    """How to sample with another engine than the one that sampled, if there is a plainer one."""
    match engine:
        case "native":
            text = tr("sample with the generic engine, to see which of the two is wrong")
            return (Fix(text=text, edits={"engine": "generate"}),)
        case "vllm":
            text = tr("sample with covey's own engine, to see which of the two is wrong")
            return (Fix(text=text, edits={"use_vllm": False}),)
        case "servers":
            text = tr("leave out --rollout_servers, to see whether the servers or the run are wrong")
            return (Fix(text=text),)
        case "rollout_func":
            text = tr(
                "return from rollout_func what generate() gave, without encoding it again: the tokens "
                "behind the very prompt_ids, their log-probabilities in the same order, and env_mask 0 for "
                "all tokens that the model did not write"
            )
            return (Fix(text=text),)
    return ()


def _check_fresh(result: StepResult, facts: StepFacts) -> None:
    if result.ratio_gap is not None and not result.ratio_gap <= _SAME:
        raise broken(
            "F116",
            facts.step,
            tr(
                "before any update on this rollout, a token's log-probability differs by "
                "{ratio_gap:.3g} from its old one, so the ratio is not 1",
                ratio_gap=result.ratio_gap,
            ),
            tr(
                "The old log-probabilities come from other weights, another temperature or another "
                "row; or dropout is on."
            ),
        )
    loss = result.metrics["loss"].value
    if facts.loss is not None and loss is not None and not abs(loss - facts.loss[0]) <= _LOSS * facts.loss[1]:
        raise broken(
            "F111",
            facts.step,
            tr(
                "the loss is {loss:.4g}, but the advantages of the step's rows give {expected:.4g}",
                loss=loss,
                expected=facts.loss[0],
            ),
            tr("Parts of the step were averaged separately, by forward pass or by rank."),
        )
    gap = result.metrics["sampling/sampling_logp_difference/mean"].value
    if facts.sampler_gap is not None and gap is not None and not gap <= facts.sampler_gap:
        raise broken(
            "F115",
            facts.step,
            tr(
                "the sampler's log-probabilities differ by {gap:.3g} on average from the "
                "learner's, for the same weights and tokens; rounding explains at most "
                "{sampler_gap:g}",
                gap=gap,
                sampler_gap=facts.sampler_gap,
            ),
            tr(
                "One of them uses another temperature, another record of what top_p, top_k and min_p kept, "
                "other weights, or a wrong mask or position."
            ),
            *_another_engine(facts.engine),
        )
    kl = result.metrics["kl"].value
    if facts.is_start and kl is not None and not abs(kl) <= _SAME:
        raise broken(
            "F117",
            facts.step,
            tr("the KL to the reference is {kl:.3g} before the first update", kl=kl),
            tr("The reference is not the model that the run starts from."),
        )


GUARD = Guard(place=5, of_step=lambda seen: check_step(seen.batch, seen.result, seen.facts, seen.comm))
