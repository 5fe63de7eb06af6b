"""Every check, found in the files of `covey.checks`, in the order in which problems are printed."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

import covey.checks as package
from covey.checks.check import Check
from covey.codes import Code
from covey.modules import values_of

_OF_ALL = ("check", "check_list", "judge", "survey")
"""Files that have no subject of their own."""


def _judges() -> Iterator[str]:
    for info in pkgutil.iter_modules(package.__path__):
        if info.name not in _OF_ALL:
            yield f"{package.__name__}.{info.name}{'.judge' if info.ispkg else ''}"


CHECKS: tuple[Check, ...] = tuple(sorted(values_of(_judges(), Check), key=lambda check: check.place))

CODES_OF_CHECKS: tuple[Code, ...] = tuple(code for check in CHECKS for code in check.codes)
