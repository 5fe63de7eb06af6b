"""The engine of a run that samples on rollout servers."""

from __future__ import annotations

import os
import secrets
import socket
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from covey.activity import Activity
from covey.comm import Comm
from covey.models.lora import tied_names
from covey.models.policy import Policy
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.server_line import start_line
from covey.rollout.server.call import Caller, read_token
from covey.rollout.server.client import ServerEngine
from covey.rollout.server.group_send import GroupSender
from covey.rollout.server.remote import RolloutServer, Server
from covey.rollout.server.vllm_serve import VllmServe
from covey.texts import tr


def served_engine(
    config: Config, facts: Facts, policy: Policy, comm: Comm, tokenizer: Tokenizer
) -> ServerEngine:
    """An engine over the servers of a configuration, which all ranks share: the first one publishes to them.
    Collective."""
    # Servers of vLLM's may have none.
    token = "" if config.rollout_token_file is None else read_token(config.rollout_token_file)
    # All ranks are one run to a server, and another run than any that came before.
    run = comm.gather_json(secrets.token_hex(8))[0]
    name = tr(
        "{abspath} (process {getpid} on {gethostname})",
        abspath=os.path.abspath(config.output_dir),
        getpid=os.getpid(),
        gethostname=socket.gethostname(),
    )
    known = {server.address: server for server in facts.servers.asked or ()}

    def server_at(address: str) -> RolloutServer:
        caller = Caller(address=address, token=token, timeout_s=config.rollout_timeout, run=run)
        found = known.get(address)
        if found is None or found.vllm is None:
            return Server(caller, name, group=_group_of(config, caller))
        return VllmServe(
            caller,
            found.vllm,
            model=found.model,
            vocab=policy.vocab,
            max_len=found.max_len,
            dtype=found.dtype,
            tied=tied_names(policy),
            tokenizer=tokenizer,
        )

    servers = [server_at(address) for address in config.rollout_servers]
    alone = config.vllm_enable_lora
    return ServerEngine(
        servers,
        # A thread of its own samples ahead.
        Activity() if config.is_ahead else comm.activity,
        timeout_s=config.rollout_timeout,
        publishes=comm.rank == 0,
        noise_keys=all(server.noise_keys for server in facts.servers.asked or ()),
        start=start_line(config, config.rollout_servers[0], facts),
        tokenizer=tokenizer,
        adapter_rank=min((s.adapter_rank for s in facts.servers.asked or ()), default=0) if alone else 0,
    )


def _group_of(config: Config, caller: Caller) -> GroupSender | None:
    """What sends to a server through a process group; servers on one host have ports one after the other."""
    if config.vllm_server_group_port is None:
        return None
    hosts = [urlsplit(address).hostname for address in config.rollout_servers]
    own = config.rollout_servers.index(caller.address)
    return GroupSender(caller, config.vllm_server_group_port + hosts[:own].count(hosts[own]))
