"""The engine of a run that samples on rollout servers."""

from __future__ import annotations

import os
import secrets
import socket

from covey.comm import Comm
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.server_line import start_line
from covey.rollout.server.call import Caller, read_token
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.remote import Server


def served_engine(config: Config, facts: Facts, comm: Comm) -> ServerEngine:
    """An engine over the servers of a configuration, which all ranks share: the first one publishes to them.
    Collective."""
    assert config.rollout_token_file is not None, "refused before weights are loaded"
    token = read_token(config.rollout_token_file)
    # All ranks are one run to a server, and another run than any that came before.
    run = comm.gather_json(secrets.token_hex(8))[0]
    name = f"{os.path.abspath(config.output_dir)} (process {os.getpid()} on {socket.gethostname()})"
    servers = [
        Server(Caller(address=address, token=token, timeout_s=config.rollout_timeout, run=run), name)
        for address in config.rollout_servers
    ]
    return ServerEngine(
        servers,
        comm.activity,
        timeout_s=config.rollout_timeout,
        publishes=comm.rank == 0,
        noise_keys=all(server.noise_keys for server in facts.servers or ()),
        start=start_line(config, config.rollout_servers[0], facts),
    )
