"""`covey rlhf`: ms-swift's command line with ms-swift's defaults where they decide the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.codes import CODES
from covey.config.adapters import is_adapter
from covey.config.take import Typed
from covey.options.schema import FACTS
from covey.texts import Text, joined, tr
from covey.types import Problem, Severity

MS_SWIFT: Mapping[str, Any] = {name: facts.rlhf for name, facts in FACTS.items() if facts.is_of_rlhf}
"""Defaults of `swift rlhf --rlhf_type grpo` (4.6) that `covey rlhf` shares; what is typed overrides them."""

LEARNING_RATE: Mapping[str, float] = {"lora": 1e-4, "full": 1e-5}
"""The same for learning_rate, which follows from tuner_type."""

SOURCE = tr("default of ms-swift")
_NOT_COPIED = tr(
    "Four defaults stay covey's: 8 completions per forward pass (not 1), float32 master weights (not "
    "bfloat16), no dropout in the adapters (dropout makes the probability ratio differ from 1), and only "
    "the two newest checkpoints kept (not all)."
)


def ms_swift_typed(typed: dict[str, Typed]) -> dict[str, Typed]:
    """Return what was typed over ms-swift's defaults."""
    below = dict(MS_SWIFT)
    tuner = typed["tuner_type"].value if "tuner_type" in typed else MS_SWIFT["tuner_type"]
    below["learning_rate"] = LEARNING_RATE[tuner]
    # ms-swift takes the divergence off the reward where advantages are not GRPO's.
    estimator = typed["advantage_estimator"].value if "advantage_estimator" in typed else "grpo"
    below["kl_in_reward"] = estimator != "grpo"
    if "epsilon_high" in typed:
        del below["epsilon"]
    return {name: Typed(value, SOURCE) for name, value in below.items()} | typed


def dialect_note(typed: Mapping[str, Typed]) -> Problem:
    """Return the note, said once, on which defaults hold and which of ms-swift's do not."""
    names: tuple[str, ...] = (*MS_SWIFT, "learning_rate")
    has_adapter = "adapters" in typed or ("model" in typed and is_adapter(str(typed["model"].value)))
    if has_adapter or ("tuner_type" in typed and typed["tuner_type"].value == "full"):
        names = tuple(name for name in names if not name.startswith("lora_"))
    if not has_adapter:
        names = tuple(name for name in names if name != "ref_adapters")
    if has_adapter or "tuner_type" not in typed or typed["tuner_type"].value == "lora":
        # Of adapters covey's own defaults are the same.
        names = tuple(name for name in names if not name.startswith("freeze_"))
    taken = sorted(name for name in names if name not in typed)
    return Problem(
        code="W113",
        option="rlhf",
        seen=tr(
            "The defaults of ms-swift are used for {taken}.",
            taken=joined(", ", taken) or tr("none of them: you have set each one"),
        ),
        why=tr("{why} {not_copied}", why=Text(CODES["W113"].why), not_copied=_NOT_COPIED),
        severity=Severity.NOTE,
    )
