"""Facts about the rollout servers of a run: each is asked how it is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from covey.options.schema import Config
from covey.plan.facts import Facts, ServerFacts
from covey.plan.server_line import weights_directory
from covey.rollout.server.call import FAULTS, Caller, Refused, address_fault, read_token, words_of
from covey.rollout.server.values import WireError
from covey.rollout.server.vllm_routes import ask_vllm

_ASK_S = 15.0


def with_servers(facts: Facts, config: Config) -> Facts:
    """The facts with what each server says of itself; those of the token first."""
    if not config.rollout_servers:
        return facts
    # A server of vLLM's may have none; one of covey's then refuses.
    token, problem = "", None
    if config.rollout_token_file is not None:
        try:
            token = read_token(config.rollout_token_file)
        except (OSError, WireError) as error:
            problem = f"{config.rollout_token_file}: {words_of(error)}"
    facts = replace(facts, servers=replace(facts.servers, token_problem=problem))
    if problem is not None:
        return facts
    with ThreadPoolExecutor(len(config.rollout_servers)) as threads:
        limit = min(_ASK_S, config.rollout_timeout)
        found = threads.map(lambda address: _asked(config, address, token, limit), config.rollout_servers)
        return replace(facts, servers=replace(facts.servers, asked=tuple(found)))


def _asked(config: Config, address: str, token: str, limit_s: float) -> ServerFacts:
    if (fault := address_fault(address)) is not None:
        return ServerFacts(address=address, fault="address", said=fault)
    caller = Caller(address=address, token=token, timeout_s=limit_s)
    try:
        try:
            status = caller.status()
        except (Refused, WireError) as error:
            return ask_vllm(caller, weights_directory(config, address)) or _other(address, error)
    except (*FAULTS, ValueError) as error:
        is_token = isinstance(error, Refused) and error.status == 401
        return ServerFacts(address=address, fault="token" if is_token else "silent", said=words_of(error))
    return ServerFacts(
        address=address,
        engine=status.engine,
        model=status.model,
        model_type=status.model_type,
        num_parameters=status.num_parameters,
        vocab=status.vocab,
        max_len=status.max_len,
        dtype=status.dtype,
        noise_keys=status.noise_keys,
        adapter_rank=status.adapter_rank,
        run=status.run,
        rows=status.rows,
        group_device=status.group_device,
        images=status.images,
        scheduler=json.loads(status.scheduler) if status.scheduler else {},
        shares_files=status.directory_here() is not None,
    )


def _other(address: str, error: Exception) -> ServerFacts:
    """A server of covey's that refuses, or one that is neither covey's nor vLLM's."""
    is_token = isinstance(error, Refused) and error.status == 401
    return ServerFacts(address=address, fault="token" if is_token else "other", said=words_of(error))
