"""Facts about the rollout servers of a run: each is asked how it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from covey.options.schema import Config
from covey.plan.facts import Facts, ServerFacts
from covey.rollout.server.call import FAULTS, Caller, Refused, address_fault, read_token, words_of
from covey.rollout.server.wire import WireError

_ASK_S = 15.0


def with_servers(facts: Facts, config: Config) -> Facts:
    """The facts with what each server says of itself; those of the token first."""
    if not config.rollout_servers:
        return facts
    token, problem = "", None
    if config.rollout_token_file is not None:
        try:
            token = read_token(config.rollout_token_file)
        except (OSError, WireError) as error:
            problem = f"{config.rollout_token_file}: {words_of(error)}"
    facts = replace(facts, token_problem=problem)
    if not token:
        return facts
    with ThreadPoolExecutor(len(config.rollout_servers)) as threads:
        limit = min(_ASK_S, config.rollout_timeout)
        found = threads.map(lambda address: _asked(address, token, limit), config.rollout_servers)
        return replace(facts, servers=tuple(found))


def _asked(address: str, token: str, limit_s: float) -> ServerFacts:
    if (fault := address_fault(address)) is not None:
        return ServerFacts(address=address, fault="address", said=fault)
    try:
        status = Caller(address=address, token=token, timeout_s=limit_s).status()
    except (*FAULTS, ValueError) as error:
        is_token = isinstance(error, Refused) and error.status == 401
        return ServerFacts(address=address, fault="token" if is_token else "silent", said=words_of(error))
    return ServerFacts(
        address=address,
        model=status.model,
        model_type=status.model_type,
        num_parameters=status.num_parameters,
        vocab=status.vocab,
        max_len=status.max_len,
        dtype=status.dtype,
        noise_keys=status.noise_keys,
        run=status.run,
        rows=status.rows,
        shares_files=status.directory_here() is not None,
    )
