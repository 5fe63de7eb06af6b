"""Every rule over the records of a run. The documentation prints `when`, the condition of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from covey.health import breakdown, collapse, groups, movement, sampling, unearned
from covey.health.history import History
from covey.health.sign import Sign
from covey.health.thresholds import limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Declares a rule, which speaks when `check` holds `streak` times in a row.

    It is checked once per rollout, step or evaluation. `when` is its condition, as the documentation
    prints it.
    """

    code: str
    check: Callable[[History], Sign | None]
    when: str
    streak: int = 1
    each: Literal["rollout", "step", "evaluation"] = "rollout"


_LASTING = int(limit("streak"))


def _n(name: str) -> str:
    """A threshold as a number in a text."""
    return f"{limit(name):g}"


def _p(name: str) -> str:
    """A threshold as a percentage."""
    return f"{limit(name):.0%}".replace("%", " %")


_STEADY = (
    f"{_n('steady_rollouts')} rollouts and {_n('steady_completions')} completions, or "
    f"{_n('steady_rollouts_small')} rollouts"
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="F201",
        check=collapse.entropy_collapse,
        streak=_LASTING,
        when=f"the entropy is below {_n('entropy_low')} nats and {_p('entropy_low_share')} of its start, and "
        "the run is no better",
    ),
    Rule(
        code="F202",
        check=collapse.entropy_surge,
        streak=_LASTING,
        when=f"the entropy is above {_n('entropy_high')} nat and {_n('entropy_high_share')} times its start; "
        f"if the run is better, above {limit('entropy_high') * limit('surge_of_better'):g} nats and "
        f"{limit('entropy_high_share') * limit('surge_of_better'):g} times its start",
    ),
    Rule(
        code="F203",
        check=collapse.length_explosion,
        streak=_LASTING,
        when=f"completions are longer than {_n('length_long_share')} times their start and the run is no "
        f"better; if it is better, only where they grew so within {_n('length_window')} rollouts and the "
        "reward may depend on the length",
    ),
    Rule(
        code="F204",
        check=collapse.length_collapse,
        streak=_LASTING,
        when=f"completions are shorter than {_n('length_short_share')} of their start; if the run is better, "
        f"than {_n('length_nothing_share')}",
    ),
    Rule(
        code="F205",
        check=collapse.truncation_spiral,
        streak=_LASTING,
        when=f"over {_p('truncated')} of the completions are cut, {100 * limit('truncated_rise'):g} points "
        "more than at the start",
    ),
    Rule(
        code="F206",
        check=collapse.repetition,
        when=f"over {_p('repetitive')} of the completions, and {_n('repetitive_least')} of them, repeat "
        "themselves",
    ),
    Rule(
        code="F207",
        check=breakdown.hacking,
        when="one reward has risen and another has fallen, and the total has not fallen",
    ),
    Rule(
        code="F208",
        check=breakdown.held_out_falls,
        each="evaluation",
        when=f"{_n('eval_fall_values')} evaluations are {_p('eval_fall_share')} below the best one, and the "
        "training reward is higher",
    ),
    Rule(
        code="F209",
        check=movement.kl_blow_up,
        streak=int(limit("kl_values")),
        each="step",
        when=f"the KL is above {_n('kl_high')} nats a token; or it rose above {_n('kl_early')} within the "
        f"first {_n('calibration_steps')} steps and is still above it; or it is above "
        f"{_n('kl_growth_least')} and {_n('kl_growth')} times that of 20 steps ago",
    ),
    Rule(
        code="F210",
        check=movement.gradient_blow_up,
        streak=int(limit("grad_values")),
        each="step",
        when=f"the norm of the gradient is {_n('grad_growth')} times its median",
    ),
    Rule(
        code="F211",
        check=groups.no_signal,
        when=f"no group has any spread: {_n('no_signal_rollouts')} rollouts and {_n('no_signal_groups')} "
        f"groups, or {_n('no_signal_rollouts_small')} rollouts; not where the task is solved",
    ),
    Rule(
        code="F212",
        check=groups.little_signal,
        when=f"{_p('little_signal')} of the groups of {_n('little_signal_rollouts')} rollouts have no "
        f"spread, {100 * limit('little_signal_excess'):g} points more than p^G + (1-p)^G; or the completions "
        "of a prompt are the same text from the start",
    ),
    Rule(
        code="F213",
        check=movement.rate_is_zero,
        streak=int(limit("learning_rate_values")),
        each="step",
        when=f"the learning rate is 0, or was never above {_n('learning_rate_zero')}",
    ),
    Rule(
        code="F214",
        check=movement.memory_grows,
        each="step",
        when=f"memory grows in each quarter of {_n('memory_window')} steps, to {_n('memory_growth')} times "
        f"and by {_n('memory_growth_gib')} GiB",
    ),
    Rule(
        code="F215",
        check=movement.stopped_learning,
        when=f"the reward is level over {_n('stopped_window')} values, {_p('stopped_share')} of which had no "
        "signal, gradient or update; not where the task is solved",
    ),
    Rule(
        code="F216",
        check=movement.dead_gradient,
        streak=int(limit("dead_gradient_values")),
        each="step",
        when="rewards differ within groups and the gradient is exactly 0",
    ),
    Rule(
        code="F217",
        check=movement.dead_kl,
        streak=int(limit("dead_kl_values")),
        each="step",
        when="the KL is exactly 0 while steps are taken",
    ),
    Rule(
        code="F218",
        check=movement.not_finite,
        each="step",
        when="a loss, gradient, reward, KL or entropy is not finite",
    ),
    Rule(
        code="F219",
        check=collapse.truncated_from_the_start,
        streak=int(limit("truncated_at_start_values")),
        when=f"{_p('truncated_at_start')} of the completions are cut from the first rollout on",
    ),
    Rule(
        code="F220",
        check=groups.short_of_signal,
        when="groups without signal remain in the batch after all further draws of `dynamic_sample`",
    ),
    Rule(
        code="F221",
        check=breakdown.breakdown,
        when="the total reward has fallen, or a part of it while no other part has risen, and the "
        "completions have changed: KL, entropy, length, cut, repeated or unreadable ones",
    ),
    Rule(
        code="F222",
        check=breakdown.fell,
        streak=_LASTING,
        when="the reward has fallen by a quarter more than in F221, or a held-out reward is a quarter below "
        "its best, and the completions look as before",
    ),
    Rule(
        code="F223",
        check=breakdown.length_is_paid,
        streak=_LASTING,
        when=f"within groups the reward and the length have a correlation of {_n('length_correlation')}, "
        f"lengths are {_n('length_paid_share')} times or {_n('length_short_share')} of their start in its "
        "direction, and no other reward has risen",
    ),
    Rule(
        code="F224",
        check=breakdown.one_answer,
        streak=_LASTING,
        when=f"{_p('one_answer')} of the completions of at least four prompts are the same text; at the "
        f"start it was less than {_p('one_answer_start')}",
    ),
    Rule(
        code="F225",
        check=sampling.low_sample_size,
        streak=int(limit("ess_values")),
        when="the importance weights between engine and learner leave an effective sample size of less than "
        f"{_p('ess_low')} of the tokens",
    ),
    Rule(
        code="F226",
        check=unearned.not_earned,
        when=f"a reward for right answers is at its lowest for every completion of the run: {_STEADY}",
    ),
    Rule(
        code="F227",
        check=unearned.always_same,
        when="another reward has the same value for every completion of the run, for as long as in F226, and "
        "this value is not known to be its best",
    ),
    Rule(
        code="F228",
        check=groups.unscored,
        when=f"over {_p('unscored')} of the completions of {_n('recent_values')} rollouts, and "
        f"{_n('unscored_least')} of them, have no reward",
    ),
    Rule(
        code="F229",
        check=collapse.collapsed,
        when=f"F211 holds, and in {_n('entropy_gone_values')} rollouts in a row, with no signal since, the "
        f"entropy was below {_p('entropy_gone_share')} of its start",
    ),
    Rule(
        code="F233",
        check=sampling.unknown_ids,
        each="step",
        when=f"more than {limit('unknown_ids'):.1%} of the tokens of a rollout or an evaluation have ids "
        "that the tokenizer does not have",
    ),
)
