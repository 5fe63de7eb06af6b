"""The numbers that the rules compare with, each with where it comes from and when it was written down.

Thresholds age, and depend on model, task and precision. "chosen" means that no source gives the number: it
is set far from what runs of the built-in task and published runs show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One number, its source and the month it was written down (YYYY-MM)."""

    value: float
    source: str
    date: str


def _t(value: float, source: str, date: str = "2026-11") -> Threshold:
    return Threshold(value=value, source=source, date=date)


_TRL_ENTROPY = "TRL's target of the adaptive entropy bonus, 0.2 nats"
_CALIBRATION = "chosen: early enough to be the run's own start, long enough for a median"

THRESHOLDS: Mapping[str, Threshold] = {
    # -- calibration and repetition of words
    "calibration_steps": _t(20, _CALIBRATION),
    "calibration_values": _t(5, _CALIBRATION + ", where a log has every tenth step only"),
    "recent_values": _t(5, "chosen: the mean of five values stands for now"),
    "streak": _t(5, "chosen: a sign that lasts for five values is no accident"),
    "say_again_steps": _t(100, "chosen: once a screen"),
    "say_again_worse": _t(2, "chosen: twice as far beyond the limit is news"),
    "risen_spreads": _t(0.25, "chosen: a quarter of the spread within groups is a rise"),
    # -- a reward against the first rollout, and against the best five
    "first_errors": _t(3, "three standard errors: one rollout is the baseline, chosen by nobody"),
    "best_errors": _t(4, "four: the best five of many are above the mean by chance alone"),
    "fell_badness": _t(1.25, "chosen: a quarter more, where nothing else speaks for a fall"),
    "best_values": _t(5, "as recent_values"),
    "now_few": _t(5, "as recent_values: enough where the change is large"),
    "now_values": _t(10, "chosen: twice as many, where it is small"),
    "now_values_log": _t(20, "chosen: where a log does not say how many groups a value saw"),
    "now_least": _t(3, "chosen: three rollouts after the first one"),
    "solved_gap": _t(0.05, "chosen: within a twentieth of the highest reward"),
    "solved_spread": _t(0.35, "chosen: at 0.98 solved prompts it is 0.3 of that at a third"),
    "share_rise": _t(0.2, "chosen: a fifth of all completions more than at the start"),
    # -- collapse
    "entropy_low": _t(0.2, _TRL_ENTROPY),
    "entropy_low_share": _t(0.2, "chosen; PRIME-RL/Entropy-Mechanism#20 and verl#5953 show steeper falls"),
    "entropy_gone_share": _t(
        0.1, "chosen: 1.85 to 0.04 nats in 22 steps at 300 times the usual rate was seen"
    ),
    "entropy_gone_values": _t(3, "as no_signal_rollouts"),
    "unparsed_begin": _t(
        0.25, "chosen: 16% of the first rollout in a run that 300 times the usual rate broke"
    ),
    "unparsed_lost": _t(0.5, "chosen: that run had 81% at step 10"),
    "entropy_high": _t(1.0, "rllm#116: fine below 1 nat a token, trouble at 2"),
    "entropy_high_share": _t(2.0, "chosen: twice the entropy of the start"),
    "surge_of_better": _t(2.0, "rllm#116: trouble at 2 nats a token"),
    "length_long_share": _t(3.0, "chosen: three times the length of the start"),
    "length_window": _t(50, "chosen: reasoning that is learned grows over hundreds of steps (2501.12948)"),
    "length_nothing_share": _t(0.1, "chosen: a tenth of the start is another task, whatever it is paid"),
    "length_paid_share": _t(2.0, "chosen: twice the length of the start"),
    "length_correlation": _t(0.8, "chosen: the length explains two thirds of a reward's spread"),
    "one_answer": _t(0.9, "chosen: nine completions of ten are the same text"),
    "one_answer_start": _t(0.5, "chosen: a task that half has one answer for may have one for all"),
    "length_short_share": _t(0.3, "chosen; VLM-R1#280 is a fall to a sixth"),
    "truncated": _t(0.3, "chosen; below 0.1 is usual"),
    "truncated_rise": _t(0.2, "chosen: above the share of the start by this much"),
    "truncated_at_start": _t(0.95, "chosen; ms-swift#4950 has 1.0 throughout"),
    "truncated_at_start_values": _t(3, "chosen: the first three rollouts"),
    "repetitive": _t(0.05, "chosen; a healthy run has next to none"),
    "repetitive_least": _t(3, "chosen: fewer completions are a small sample"),
    "unknown_ids": _t(0.001, "chosen: one token in a thousand; of a model and its own tokenizer it is none"),
    "failed_calls": _t(0.5, "chosen: more calls fail than give a result"),
    # -- rewards
    "reward_fall_share": _t(0.25, "chosen: a quarter below the start"),
    "level_spreads": _t(2, "chosen: rewards of 0 and 1 are one apart, which is two deviations at a half"),
    "steady_rollouts": _t(10, "chosen: as no_signal_rollouts_small"),
    "steady_rollouts_small": _t(20, "chosen: this many rollouts, however small"),
    "steady_completions": _t(256, "chosen: what is earned once in a hundred is seen in 92 % of such samples"),
    "unscored": _t(0.1, "chosen: a tenth of the completions was sampled in vain"),
    "unscored_least": _t(3, "chosen: fewer completions are a small sample"),
    "eval_fall_share": _t(0.1, "chosen: a tenth below the best evaluation"),
    "eval_fall_errors": _t(2.0, "two standard errors of a share"),
    "eval_fall_values": _t(3, "chosen: three evaluations in a row"),
    # -- signal and movement
    "no_signal_rollouts": _t(3, "chosen; TRL's frac_reward_zero_std exists for trl#3857 and trl#3502"),
    "no_signal_groups": _t(16, "chosen: fewer groups are a small sample"),
    "no_signal_rollouts_small": _t(10, "chosen: this many rollouts, however small"),
    "little_signal": _t(0.8, "chosen: four groups of five have no spread"),
    "little_signal_excess": _t(0.3, "chosen: above p^G + (1-p)^G, what chance gives at pass rate p"),
    "little_signal_rollouts": _t(10, "chosen"),
    "identical_groups": _t(0.5, "chosen: of the groups of the first rollouts"),
    "identical_rollouts": _t(3, "chosen: later a model that has learned may repeat itself"),
    "kl_high": _t(10.0, "chosen: nats a token; open-r1#257 goes beyond and the reward to 0"),
    "kl_early": _t(1.0, "chosen: a token's probability changes by a factor of e; 2 to 5 at step 3 was seen"),
    "kl_growth": _t(100.0, "chosen: a hundredfold of 20 values ago"),
    "kl_growth_least": _t(0.5, "chosen: growth below half a nat a token is learning"),
    "kl_values": _t(3, "chosen: a spike alone is usual (NeMo-RL's guide: trends matter, not spikes)"),
    "grad_growth": _t(10.0, "chosen: times the median; verl's and prime-rl's guides watch for spikes"),
    "grad_values": _t(3, "as kl_values"),
    "learning_rate_zero": _t(1e-8, "ms-swift#5890: 1e-8 over 4,389 steps, nothing learned"),
    "learning_rate_values": _t(10, "chosen: warm-up starts at 0 and a schedule ends there"),
    "memory_growth": _t(1.2, "chosen: a fifth above the start of the window"),
    "memory_growth_gib": _t(0.5, "chosen: less is caches"),
    "memory_window": _t(100, "chosen: the first steps still grow"),
    "ess_low": _t(0.5, "chosen: half of the tokens count for nothing"),
    "ess_values": _t(3, "as kl_values"),
    "dead_gradient_values": _t(3, "chosen; ms-swift#5571 has it from the first step on"),
    "dead_kl_values": _t(20, "chosen; ms-swift#4348 and #3558 have it throughout"),
}
"""Every threshold by name."""


def limit(name: str) -> float:
    """Return the value of a threshold."""
    return THRESHOLDS[name].value
