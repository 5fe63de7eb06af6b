"""`python covey_run.py WORDS…`: `covey`, as a program that a fork can run."""

from __future__ import annotations

import sys

from covey.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
