"""Rules over the records of a run: what is unusual, as against the invariants, which are impossible."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from covey.codes import CODES
from covey.health import breakdown, collapse, groups, movement, sampling
from covey.health.history import History
from covey.health.sign import Sign
from covey.health.thresholds import limit
from covey.texts import tr
from covey.types import Finding, Severity, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: it speaks when `check` holds `streak` times in a row.

    It is asked once a rollout, a step or an evaluation.
    """

    code: str
    check: Callable[[History], Sign | None]
    streak: int = 1
    each: Literal["rollout", "step", "evaluation"] = "rollout"


_LASTING = int(limit("streak"))

RULES: tuple[Rule, ...] = (
    Rule(code="F201", check=collapse.entropy_collapse, streak=_LASTING),
    Rule(code="F202", check=collapse.entropy_surge, streak=_LASTING),
    Rule(code="F203", check=collapse.length_explosion, streak=_LASTING),
    Rule(code="F204", check=collapse.length_collapse, streak=_LASTING),
    Rule(code="F205", check=collapse.truncation_spiral, streak=_LASTING),
    Rule(code="F206", check=collapse.repetition),
    Rule(code="F207", check=breakdown.hacking),
    Rule(code="F208", check=breakdown.held_out_falls, each="evaluation"),
    Rule(code="F209", check=movement.kl_blow_up, streak=int(limit("kl_values")), each="step"),
    Rule(code="F210", check=movement.gradient_blow_up, streak=int(limit("grad_values")), each="step"),
    Rule(code="F211", check=groups.no_signal),
    Rule(code="F212", check=groups.little_signal),
    Rule(code="F213", check=movement.rate_is_zero, streak=int(limit("learning_rate_values")), each="step"),
    Rule(code="F214", check=movement.memory_grows, each="step"),
    Rule(code="F215", check=movement.stopped_learning),
    Rule(code="F216", check=movement.dead_gradient, streak=int(limit("dead_gradient_values")), each="step"),
    Rule(code="F217", check=movement.dead_kl, streak=int(limit("dead_kl_values")), each="step"),
    Rule(code="F218", check=movement.not_finite, each="step"),
    Rule(
        code="F219",
        check=collapse.truncated_from_the_start,
        streak=int(limit("truncated_at_start_values")),
    ),
    Rule(code="F220", check=groups.short_of_signal),
    Rule(code="F221", check=breakdown.breakdown),
    Rule(code="F222", check=breakdown.fell, streak=_LASTING),
    Rule(code="F223", check=breakdown.length_is_paid, streak=_LASTING),
    Rule(code="F224", check=breakdown.one_answer, streak=_LASTING),
    Rule(code="F225", check=sampling.low_sample_size, streak=int(limit("ess_values"))),
    Rule(code="F233", check=sampling.unknown_ids, each="step"),
)


@dataclass(slots=True, kw_only=True)
class _Held:
    """How long a rule holds now, and when it last spoke."""

    since: int = 0
    streak: int = 0
    said: int | None = None
    badness: float = 0.0


class Rules:
    """Checks one record at a time, in a run or over its metrics.jsonl afterwards.

    A rule that holds on speaks again after 100 steps, or when it is twice as bad. `counts` says for how many
    records each code held. A resumed run goes on with the start, the counts and the streaks of the run that
    was stopped.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.counts: dict[str, int] = {}
        self.history = History(options=options or {})
        self._held = {rule.code: _Held() for rule in RULES}

    def check(self, record: StepRecord) -> list[Finding]:
        """Add the record and return the findings that are new with it."""
        self.history.add(record)
        findings = []
        for rule in RULES:
            if not self._applies_now(rule):
                continue
            held = self._held[rule.code]
            sign = rule.check(self.history)
            if sign is None:
                held.streak = 0
                continue
            held.since = held.since if held.streak else record.step
            held.streak += 1
            if held.streak < rule.streak:
                continue
            self.counts[rule.code] = self.counts.get(rule.code, 0) + 1
            if _is_due(held, sign, record.step):
                held.said, held.badness = record.step, sign.badness
                findings.append(_finding(rule.code, sign, held.since, record.step))
        return findings

    def _applies_now(self, rule: Rule) -> bool:
        match rule.each:
            case "rollout":
                return self.history.is_new_rollout
            case "step":
                return True
            case "evaluation":
                return self.history.value("eval_reward") is not None

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to say the same of later records, as JSON."""
        held = {
            code: [h.since, h.streak, h.said, min(h.badness, sys.float_info.max)]
            for code, h in self._held.items()
        }
        return {
            "counts": list(map(list, self.counts.items())),
            "held": held,
            "step": self.history.step,
            "history": self.history.state(),
        }

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Go on from `values`; a rule that they do not know starts anew."""
        self.counts = dict(values["counts"])
        for code in self._held.keys() & values["held"].keys():
            since, streak, said, badness = values["held"][code]
            self._held[code] = _Held(since=since, streak=streak, said=said, badness=badness)
        self.history.load_state(values["history"], values["step"])

    def holding(self) -> tuple[str, ...]:
        """The codes that held when their rule was last asked."""
        return tuple(r.code for r in RULES if self._held[r.code].streak >= r.streak)


def _is_due(held: _Held, sign: Sign, step: int) -> bool:
    if held.said is None or step - held.said >= limit("say_again_steps"):
        return True
    return sign.badness >= limit("say_again_worse") * held.badness


def _finding(code: str, sign: Sign, since: int, step: int) -> Finding:
    when = (
        tr("step {step}", step=step)
        if since == step
        else tr("steps {since} to {step}", since=since, step=step)
    )
    return Finding(
        code=code,
        seen=tr("{when}: {seen}", when=when, seen=sign.seen),
        why=CODES[code].why,
        cause=sign.cause,
        fixes=sign.fixes,
        severity=Severity.WARNING,
        step=step,
    )
