"""`python slow_server_run.py REST_S WORDS…`: `covey rollout`, whose engine rests between two strides."""

from __future__ import annotations

import sys

from covey.cli.main import main
from covey.training import serve
from support.servers import SlowEngine

if __name__ == "__main__":
    SlowEngine.rest_s = float(sys.argv[1])
    serve.HeldEngine = SlowEngine  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
