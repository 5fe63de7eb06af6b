"""Part 7: families whose attention has windows, soft caps, sinks or experts, as part 2 does Qwen 3."""

from __future__ import annotations

from on_gpu.gradients import compare
from on_gpu.lines import Lines


def run(lines: Lines) -> None:
    """Write a line for every way to compute each family in bfloat16."""
    for family in ("mistral", "gemma2", "gpt_oss"):
        compare(lines, family, thorough=False)
