"""The server that a run starts for itself on this machine, where it samples ahead and names no server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from covey.config.write import OWN_SAMPLER
from covey.errors import ConfigError
from covey.options.schema import Config
from covey.plan.ahead import cores_of
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.plan.server_line import start_line
from covey.rollout.server.token import ENDS_WITH_INPUT
from covey.texts import tr
from covey.types import Fix

_LOOK_S = 0.05
# How long a server may take to end after its run has.
_END_S = 10.0
_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@contextmanager
def sampler_apart(config: Config, facts: Facts) -> Iterator[dict[str, object]]:
    """Start a server beside this process; gives the options that name it. It ends with this process, however
    that ends. ConfigError (E426) where it does not start."""
    processes = facts.launch.num_processes
    own = {**os.environ, OWN_SAMPLER: "1", ENDS_WITH_INPUT: "1"}
    if facts.machine.cuda:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = list(map(str, range(processes + 1))) if visible is None else visible.split(",")
        own["CUDA_VISIBLE_DEVICES"] = devices[processes]
    else:
        here, there = cores_of(processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(here))
        own.setdefault("OMP_NUM_THREADS", str(there))
    os.environ[OWN_SAMPLER] = "1"
    with tempfile.TemporaryDirectory(prefix="covey-sampler-") as folder:
        said, token = Path(folder) / "said", Path(folder) / "token"
        words = shlex.split(
            str(start_line(config, "http://127.0.0.1", facts)).replace("--port PORT", "--port 0")
        )
        words += ["--token_file", str(token), "--publish_directory", folder, "--end_with_run", "true"]
        with said.open("wb") as out:
            server = subprocess.Popen(
                [sys.executable, "-m", "covey", *words[1:]],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=own,
                start_new_session=True,
            )
        try:
            address = _address(server, said)
            yield {"rollout_servers": [address], "rollout_token_file": str(token)}
        finally:
            os.environ.pop(OWN_SAMPLER, None)
            _end(server)


def _address(server: subprocess.Popen[bytes], said: Path) -> str:
    """Wait until the server listens, and return where."""
    while True:
        is_over = server.poll() is not None
        text = said.read_text(errors="replace")
        if found := _ADDRESS.search(text):
            return found.group()
        if is_over:
            last = " ".join(text.split())[-300:]
            seen = tr("The process that is to sample ended before it was ready: {last}", last=last)
            fix = Fix(text=tr("start a server by hand, and name it with --rollout_servers"))
            raise ConfigError([problem("E426", "max_staleness", seen, "", fix)])
        time.sleep(_LOOK_S)


def _end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    with suppress(OSError):
        server.stdin.close()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
