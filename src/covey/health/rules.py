"""Rules over the records of a run: what is unusual, as against the invariants, which are impossible."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from covey.codes import CODES
from covey.health.history import History
from covey.health.rule import Rule
from covey.health.rule_list import RULES
from covey.health.saved import BACK, Checkpoints, none_saved, possible
from covey.health.sign import Sign
from covey.health.thresholds import limit
from covey.texts import tr
from covey.types import Finding, Fix, Severity, StepRecord


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
    was stopped. `saved` lists the checkpoints that advice may name; a log without `has_counts` does not say
    how many things its values saw.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        saved: Checkpoints = none_saved,
        has_counts: bool = True,
    ) -> None:
        self.counts: dict[str, int] = {}
        self.history = History(options=options or {}, saved=saved, has_counts=has_counts)
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
                fixes = self._possible(rule, sign, held.since)
                findings.append(_finding(rule.code, replace(sign, fixes=fixes), held.since, record.step))
        return findings

    def _possible(self, rule: Rule, sign: Sign, since: int) -> tuple[Fix, ...]:
        """The fixes of a sign, with the checkpoint that is there from before it, if any."""
        before = sign.was_well
        if before is None:
            # A rollout that is unusual was sampled by the weights of the step before.
            before = since - 1 if rule.each == "rollout" else since
        history = self.history
        fixes = history.changing(sign.fixes)
        return possible(fixes, history.saved(), before, history.slower()) if BACK in fixes else fixes

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

    def advice(self, code: str) -> Sign | None:
        """The sign of a rule that still holds, with cause and fixes from the newest record, which
        knows more of the run than the first."""
        (rule,) = (r for r in RULES if r.code == code)
        sign = rule.check(self.history)
        since = self._held[code].since
        return None if sign is None else replace(sign, fixes=self._possible(rule, sign, since))

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
