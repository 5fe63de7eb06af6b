"""Every guard, found in the files of `covey.health.guards`, in the order of their checks."""

from __future__ import annotations

import covey.health.guards as package
from covey.codes import Code
from covey.health.guard import Guard
from covey.modules import values_in

GUARDS: tuple[Guard, ...] = tuple(sorted(values_in(package, Guard), key=lambda guard: guard.place))

CODES_OF_GUARDS: tuple[Code, ...] = tuple(code for guard in GUARDS for code in guard.codes)
