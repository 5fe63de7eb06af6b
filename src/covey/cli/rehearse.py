"""`covey rehearse --option value ...`: scripted policies play a run's tools, environment and rewards."""

from __future__ import annotations

from collections.abc import Sequence

from covey.checks.judge import refuse_faults
from covey.cli.options import read
from covey.errors import ConfigError
from covey.plan.facts import Rehearsal, RehearsedPolicy
from covey.plan.words import note_lines
from covey.texts import Text, joined, padded, tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.types import Fix, Problem

_WIDTHS = (18, 8, 16, 6, 6, 7, 10)


def rehearse(argv: Sequence[str]) -> int:
    """Print what each policy did and got, and one episode; ConfigError carries what is wrong."""
    resolved, num_processes = read("train", argv)
    from covey.checks.survey import survey

    config = resolved.config.model_copy(update={"reward_trial": True})
    with survey(config, num_processes) as surveyed:
        played = surveyed.facts.tools.rehearsal
        lines = [] if played is None else [spoken(line) for line in rehearsal_lines(played)]
        if lines:
            say("\n".join(lines))
        said = refuse_faults(resolved, surveyed.facts)
    if played is None:
        raise ConfigError([_nothing_to_play()])
    for problem in said:
        say("\n".join(map(spoken, note_lines(problem))))
    return 0


def rehearsal_lines(played: Rehearsal) -> list[str]:
    """Return the policies as a table, what it shows, and the sample with its trained turns marked."""
    names = tr("policy"), tr("reward"), tr("end"), tr("turns"), tr("calls"), tr("failed"), tr("sequences")
    lines = [_row((*names, tr("seconds"))), *(_row(_cells(policy)) for policy in played.policies), ""]
    if played.starts_alike is not None:
        alike = (
            tr("the episodes of a group begin with the same prompt")
            if played.starts_alike
            else tr("the episodes of a group begin with DIFFERENT prompts")
        )
        lines.append(alike)
    if played.rewritten:
        lines.append(
            tr(
                "the chat template writes earlier turns in another way than the model did, so each turn of "
                "{policies} begins a new sequence",
                policies=joined(", ", played.rewritten),
            )
        )
    return [*lines, "", tr("one episode; what is between ⟦ and ⟧ is trained:"), Text(played.sample)]


def _cells(policy: RehearsedPolicy) -> tuple[str, ...]:
    return (
        policy.name,
        "–" if policy.reward is None else f"{policy.reward:.3g}",
        policy.outcome,
        str(policy.num_turns),
        str(policy.num_calls),
        str(policy.num_failed_calls),
        str(policy.num_sequences),
        f"{policy.seconds:.1f}",
    )


def _row(cells: Sequence[str]) -> str:
    *front, last = cells
    return joined("", [*(padded(cell, width) for cell, width in zip(front, _WIDTHS, strict=True)), last])


def _nothing_to_play() -> Problem:
    return Problem(
        code="E105",
        option="tools",
        seen=tr("There are no tools and no environment to rehearse."),
        why=tr("A rehearsal plays scripted turns against them."),
        fixes=(Fix(text=tr("name them: --tools FILE.py:NAME or --environment_factory FILE.py:CLASS")),),
    )
