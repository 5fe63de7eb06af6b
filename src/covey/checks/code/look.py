"""Facts about running the programs of completions: how they are shut off here, and what their tests are."""

from __future__ import annotations

from dataclasses import replace

from covey.checks.tasks.look import rows_of
from covey.data.prompts import fields_of
from covey.data.rows import PromptTable
from covey.options.schema import Config
from covey.plan.facts import Facts, GoldFacts, SandboxFacts
from covey.rewards.code_tests import check_tests
from covey.rewards.sandbox.host import bubblewrap
from covey.rewards.sandbox.layers import LAYERS, Unisolated, isolate

CODE_REWARD = "code_reward"
_SHOWN = 3


def with_code(facts: Facts, config: Config, prompts: PromptTable | None) -> Facts:
    """The facts with those that the reward code_reward needs, where it is asked for."""
    if CODE_REWARD not in config.reward_funcs:
        return facts
    lacks: tuple[str, ...]
    try:
        isolation = isolate(unsafe=config.unsafe_exec)
    except Unisolated as refused:
        lacks, reasons, notes = LAYERS, refused.reasons, facts.rewards.notes
    else:
        lacks, reasons = isolation.lacks, isolation.reasons
        notes = (*facts.rewards.notes, *isolation.words())
    sandbox = SandboxFacts(lacks=lacks, reasons=reasons, is_installed=bubblewrap() is not None)
    return replace(
        facts,
        rewards=replace(facts.rewards, sandbox=sandbox, notes=notes, code_tests=_tests(config, prompts)),
    )


def _tests(config: Config, prompts: PromptTable | None) -> GoldFacts | None:
    if prompts is None:
        return None
    prompts = rows_of(config, CODE_REWARD, prompts)
    columns = fields_of(prompts.entries, "columns")
    report = check_tests((row.get("verification_info"), row.get("test_cases")) for row in columns)
    return GoldFacts(
        num_checked=report.num_checked,
        num_bad=len(report.bad),
        examples=tuple((prompts.entries[i].id + 1, text, why) for i, text, why in report.bad[:_SHOWN]),
    )
