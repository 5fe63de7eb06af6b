"""config.yaml: the resolved configuration, grouped, each value with a comment that says where it came
from."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any

import yaml

from covey.config.resolve import Resolved
from covey.options.schema import GROUPS, OPTIONS, default_of, group_of
from covey.texts import tr

OWN_SAMPLER = "COVEY_OWN_SAMPLER"
"""The environment variable of the processes of a run that has started a server for itself."""

_HEAD = "# The resolved configuration of a run. `covey train THIS_FILE` reads it again; flags override it.\n"
# What YAML takes for something else in quoted text.
_SPECIAL = re.compile(r"[^\x20-\x7e\u00a1-\u1fff\u3000-\ud7ff]")
# Text that YAML takes for itself without quotes, unless the whole of it looks like another type.
_BARE = re.compile(r"[A-Za-z_./][\w./+-]*")


def to_yaml(resolved: Resolved) -> str:
    """Return the text of config.yaml; the parser that reads flags makes an equal Config of it."""
    lines = [_HEAD]
    for group in GROUPS:
        lines.append(f"{group}:\n")
        for name in (name for name in OPTIONS if group_of(name) == group):
            value = getattr(resolved.config, name)
            lines.append(f"  {name}: {_value(value)}  # {_comment(resolved.sources[name])}\n")
    return "".join(lines)


def without_start_options(resolved: Resolved) -> Resolved:
    """Return the configuration without what is meant for one start: used again, its file must not delete or
    resume."""
    # The server that a run starts for itself ends with it.
    own = ("rollout_servers", "rollout_token_file") if OWN_SAMPLER in os.environ else ()
    once = (*own, "overwrite_output_dir", "resume_from_checkpoint", "allow_changes", "stop_after_steps")
    defaults = {name: default_of(name) for name in once}
    sources = {
        **resolved.sources,
        **dict.fromkeys(once, tr("default (the value given to this start is not kept)")),
    }
    return replace(resolved, config=resolved.config.model_copy(update=defaults), sources=sources)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        # JSON is YAML, and fits on the line, once characters that YAML reads otherwise are escaped.
        return _SPECIAL.sub(lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str) and not _BARE.fullmatch(value):
        text: str = yaml.safe_dump(value, default_style='"', width=float("inf"))
        return text.rstrip("\n")
    dumped: str = yaml.safe_dump(value, width=float("inf"))
    return dumped.removesuffix("...\n").rstrip("\n")


def _comment(source: str) -> str:
    return re.sub(r"[^\x20-\x7e\u00a0-\ud7ff]", "?", source)
