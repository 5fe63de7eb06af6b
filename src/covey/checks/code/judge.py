"""Finds faults in running the programs that a model writes: no isolation, or tests that cannot be run."""

from __future__ import annotations

from covey.checks.check import Check
from covey.checks.code.codes import CODES
from covey.options.schema import Config
from covey.plan.facts import GoldFacts, RewardFacts, SandboxFacts
from covey.plan.problem import problem, warning
from covey.texts import joined, tr
from covey.types import Fix, Problem

_INSTALL = tr(
    "install bubblewrap: `apt install bubblewrap`, `dnf install bubblewrap` or "
    "`conda install -c conda-forge bubblewrap`"
)
_ALLOW = tr(
    "allow bubblewrap to make namespaces: on Ubuntu `sudo sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`; for a container see docs/code-reward.md"
)


def code_problems(config: Config, rewards: RewardFacts) -> list[Problem]:
    """Return what the facts say against the reward code_reward."""
    return [*_sandbox(config, rewards.sandbox), *_tests(config, rewards.code_tests)]


def _sandbox(config: Config, sandbox: SandboxFacts | None) -> list[Problem]:
    if sandbox is None or not sandbox.lacks:
        return []
    seen = tr(
        "No sandbox works on this machine, so code_reward cannot run programs safely. Tried: {reasons}.",
        reasons=joined("; ", sandbox.reasons),
    )
    mend = Fix(text=_ALLOW if sandbox.is_installed else _INSTALL)
    if not config.unsafe_exec:
        cause = (
            tr("bubblewrap is installed, but a container, the kernel or AppArmor may forbid new namespaces.")
            if sandbox.is_installed
            else tr("code_reward runs programs under bubblewrap alone.")
        )
        unsafe = Fix(
            text=tr(
                "run without a sandbox, on a machine whose files, accounts and network you can afford to lose"
            ),
            edits={"unsafe_exec": True},
        )
        return [problem("E328", "reward_funcs", seen, cause, mend, unsafe)]
    return [
        warning(
            "W121",
            "unsafe_exec",
            tr(
                "Programs that the model writes run without: {lacks}. {seen}",
                lacks=joined(", ", sandbox.lacks),
                seen=seen,
            ),
            tr("--unsafe_exec is set, and no sandbox works on this machine."),
            mend,
        )
    ]


def _tests(config: Config, tests: GoldFacts | None) -> list[Problem]:
    if tests is None or not tests.num_bad:
        return []
    share = tests.num_bad / tests.num_checked
    too_many = share > config.max_bad_gold
    shown = joined("; ", [tr("row {row}: {why}", row=row, why=why) for row, _, why in tests.examples])
    fixes = [Fix(text=tr("correct these rows; docs/code-reward.md shows the accepted forms"))]
    if too_many and share < 1:
        # Rounded up, so that the option typed is enough.
        enough = min(1.0, int(share * 100 + 1) / 100)
        fixes.append(Fix(text=tr("train only on the other rows"), edits={"max_bad_gold": enough}))
    say = problem if too_many else warning
    seen = tr(
        "The tests of {num_bad:,} of {num_checked:,} rows cannot be run ({share:.1%}). {shown}.",
        num_bad=tests.num_bad,
        num_checked=tests.num_checked,
        share=share,
        shown=shown,
    )
    cause = tr("Another column holds the tests, or they are in another language or form.")
    return [say("E329" if too_many else "W111", "max_bad_gold", seen, cause, *fixes)]


CHECK = Check(place=150, judge=lambda config, facts, _: code_problems(config, facts.rewards), codes=CODES)
