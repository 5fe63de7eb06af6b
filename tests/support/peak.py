"""A run in a process of its own that says how much memory each of its phases took:
`python peak.py OPTIONS.json RESULT.json`.

Every completion runs to max_completion_length, since the end token is not looked at. A phase's peak is the
kernel's high-water mark, which is set back before each; the baseline is what the imports take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def spread(completions: Any, **kwargs: Any) -> list[float]:
    """A reward that differs within every group, so that every row has a gradient."""
    return [float(i) for i, _ in enumerate(completions)]


def _bytes(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(options: dict[str, Any], output: Path) -> dict[str, Any]:
    """Train, and return the forecast and the measured bytes above the baseline by phase, and both peaks."""
    import importlib
    from dataclasses import replace

    from covey.environment import settle

    settle()
    import peft  # noqa: F401
    import torch

    from covey.checks.survey import survey
    from covey.config.resolve import from_dict
    from covey.learner import update
    from covey.learner.backends.single import SingleBackend
    from covey.training import build_source, loop
    from covey.training import run as wiring
    from covey.training.saving import Saver
    from covey.training.source import LiveSource

    torch.set_num_threads(1)
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    sampling = build_source.sampling
    build_source.sampling = lambda *arguments: replace(sampling(*arguments), stop_token_ids=())  # type: ignore[assignment]
    measured: dict[str, int] = {}
    resolved = from_dict({**options, "reward_funcs": [f"{__file__}:spread"], "output_dir": str(output)})
    with survey(resolved.config, 1) as found:
        base = _bytes("VmRSS")

        def watched(phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def watch(*arguments: Any, **named: Any) -> Any:
                _CLEAR.write_text("5")
                try:
                    return work(*arguments, **named)
                finally:
                    measured[phase] = max(measured.get(phase, 0), _bytes("VmHWM") - base)

            return watch

        for owner, name, phase in (
            (wiring, "build_job", "load"),
            (LiveSource, "next", "rollout"),
            (loop, "annotate_and_credit", "annotate"),
            (update, "accumulate", "update"),
            (SingleBackend, "step", "step"),
            (Saver, "save", "save"),
        ):
            setattr(owner, name, watched(phase, getattr(owner, name)))
        wiring.train(resolved, found)
        return {"measured": measured, "forecast": _forecast(resolved.config, found.facts)}


def _forecast(config: Any, facts: Any) -> dict[str, int]:
    from covey.plan.memory import memory_plan

    return {phase.name: phase.num_bytes for phase in memory_plan(config, facts).phases}


if __name__ == "__main__":
    told = Path(sys.argv[2])
    told.write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()), told.with_suffix(".run"))))
