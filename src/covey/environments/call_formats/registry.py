"""Every format of tool calls by its name, found in the files of this package."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import covey.environments.call_formats as package
from covey.environments.call_format import CallFormat
from covey.modules import values_in


def _declared() -> dict[str, CallFormat]:
    found = values_in(package, CallFormat)
    formats = {each.name: each for each in found}
    assert len(formats) == len(found), "two formats have the same name"
    return formats


CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType(_declared())
"""Every format by its name."""
