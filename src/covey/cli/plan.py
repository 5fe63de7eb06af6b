"""`covey plan [CONFIG.yaml] --option value ...`: what `covey train` would do, without weights and network."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from covey.cli.help import asks_for_help, help_text
from covey.cli.options import read
from covey.plan.batch import batch_plan
from covey.plan.checks import refuse_faults
from covey.plan.report import report_json, report_lines
from covey.plan.words import note_lines


def plan(argv: Sequence[str]) -> int:
    """Print the plan as text, or with --json as one object; ConfigError carries what is wrong."""
    if asks_for_help(argv):
        sys.stdout.write(help_text("plan"))
        return 0
    words = [word for word in argv if word != "--json"]
    verb = words.pop(0) if words[:1] in (["train"], ["rlhf"]) else "train"
    resolved, num_processes = read(verb, words)
    from covey.training.facts import survey

    with survey(resolved.config, num_processes, offline=True) as found:
        said = refuse_faults(resolved, found.facts)
        batch = batch_plan(resolved.config, num_processes, found.facts.num_prompts)
        if "--json" in argv:
            content = report_json(resolved.config, found.facts, batch, said)
            sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
            return 0
        lines = report_lines(resolved.config, found.facts, batch)
    for problem in said:
        lines += note_lines(problem)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
