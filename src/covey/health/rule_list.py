"""Every rule over the records of a run, found in the files of `covey.health.signs`, in the order of codes."""

from __future__ import annotations

import covey.health.signs as package
from covey.health.rule import Rule
from covey.modules import values_in

RULES: tuple[Rule, ...] = tuple(sorted(values_in(package, Rule), key=lambda rule: rule.code))
