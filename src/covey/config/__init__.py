"""What a run is told to do: the schema, the flags and files that fill it, and the rules for what was not
typed."""

from covey.config.flags import Parsed, Typed, parse
from covey.config.resolve import Resolved, from_dict, resolve
from covey.config.write import to_yaml
from covey.options.schema import Config

__all__ = ["Config", "Parsed", "Resolved", "Typed", "from_dict", "parse", "resolve", "to_yaml"]
