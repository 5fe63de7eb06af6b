"""torchrun as `covey train` starts it: it ends on a signal without a report.

The ranks say themselves how they end. torchrun would add a warning for each of them and a traceback.
"""

from __future__ import annotations

import logging
import sys

_OF_SIGNALS = ("death signal", "closing signal")


def main() -> int:
    """Run torchrun on the words of this process and return its exit code."""
    from torch.distributed.elastic.agent.server.api import SignalException, logger
    from torch.distributed.run import main as torchrun

    # What stops and what signals the ranks have loggers of their own.
    for each in (logger, logging.getLogger(SignalException.__module__)):
        each.addFilter(_is_report)
    try:
        torchrun()
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


def _is_report(record: logging.LogRecord) -> bool:
    return not any(words in str(record.msg) for words in _OF_SIGNALS)


if __name__ == "__main__":
    sys.exit(main())
