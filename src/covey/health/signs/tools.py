"""Signs of tools: none is called (F234), or most calls fail (F235)."""

from __future__ import annotations

from covey.health.history import History
from covey.health.rule import LASTING, Rule, pct
from covey.health.sign import Sign
from covey.health.thresholds import limit
from covey.texts import tr
from covey.types import Fix

_CALLS, _FAILED = "tools/call_frequency", "tools/failure_frequency"


def no_calls(h: History) -> Sign | None:
    """F234: the run has tools, and no episode of a rollout calls one."""
    if not h.options.get("tools") or h.value(_CALLS) != 0.0:
        return None
    return Sign(
        seen=tr("no episode of the rollout calls a tool"),
        cause=tr("The model was not trained to call tools, or the prompts do not ask for it."),
        fixes=(
            Fix(text=tr("look at what it writes instead: `text` in rollouts/*.jsonl")),
            Fix(text=tr("show it some calls first, by supervised training on conversations with tools")),
            Fix(text=tr("ask for the tool in the prompt: --system")),
        ),
        badness=1.0,
    )


def failing_calls(h: History) -> Sign | None:
    """F235: more than half of the calls of a rollout fail."""
    share, calls = h.value(_FAILED), h.value(_CALLS)
    if share is None or not calls or share <= limit("failed_calls"):
        return None
    return Sign(
        seen=tr("{share:.0%} of the calls of tools fail", share=share),
        cause=tr("The model writes calls that do not fit, or the tool itself fails."),
        fixes=(
            Fix(text=tr("look at why: `results` of `turns` in rollouts/*.jsonl have `failure` and the text")),
            Fix(text=tr("try the tools without the model: `covey rehearse` with the options of the run")),
        ),
        badness=share / limit("failed_calls"),
    )


F234 = Rule(
    code="F234",
    title="No tool is called",
    why="GRPO learns only from what the model samples. While it samples no tool call, it does not learn to "
    "use its tools.",
    check=no_calls,
    streak=LASTING,
    when=f"the run has tools, and in {LASTING} rollouts in a row no episode calls one",
)

F235 = Rule(
    code="F235",
    title="Most calls of tools fail",
    why="A failed call gives the model an error message and no result, so it learns to answer without tools.",
    check=failing_calls,
    streak=LASTING,
    when=f"in {LASTING} rollouts in a row more than {pct('failed_calls')} of the calls of tools fail",
)
