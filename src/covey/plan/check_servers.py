"""What is wrong with the rollout servers of a run."""

from __future__ import annotations

from collections.abc import Sequence

from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.check_vllm_serve import open_routes, vllm_serve_problems
from covey.plan.facts import Facts, ServerFacts
from covey.plan.layout import computes_low
from covey.plan.problem import problem, warning
from covey.plan.publish import is_here, takes_group
from covey.plan.server_line import start_line
from covey.plan.shape import counted
from covey.types import Fix, Problem

_OPTION = "rollout_servers"
_HERE = Fix(text="leave out --rollout_servers; then the training processes sample")


def server_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against sampling on these servers."""
    addresses = config.rollout_servers
    problems = _addresses(config, addresses)
    if not addresses:
        return problems
    servers = facts.servers or ()
    has_no_token = config.rollout_token_file is None and not any(
        server.vllm is not None or server.fault == "other" for server in servers
    )
    if has_no_token or facts.token_problem is not None:
        return [*problems, _no_token(config, facts)]
    if quantization_of(config) is not None:
        problems.append(_quantized())
    for server in servers:
        problems += _of_one(config, facts, server)
    return [*problems, *open_routes(config, facts, servers), *_groups(config, servers)]


def _groups(config: Config, servers: Sequence[ServerFacts]) -> list[Problem]:
    """Return what is to be known of process groups, where they are asked for."""
    option = "vllm_server_group_port"
    if config.vllm_server_group_port is None:
        return []
    problems = []
    if away := [address for address in config.rollout_servers if not is_here(address)]:
        seen = f"{option} is given, and {', '.join(away)} can be on another machine."
        fix = Fix(text=f"on a network that others use leave out --{option}; HTTP with TLS is encrypted")
        problems.append(warning("W182", option, seen, "", fix))
    if without := [s.address for s in servers if not s.fault and not takes_group(s)]:
        seen = f"{', '.join(without)} takes no process group."
        cause = "`vllm serve`, or vLLM with several processes."
        problems.append(warning("W183", option, seen, cause, Fix(text=f"leave out --{option}")))
    return problems


def _addresses(config: Config, addresses: Sequence[str]) -> list[Problem]:
    hosts, ports = config.vllm_server_host, config.vllm_server_port
    if len(hosts) > 1 and len(ports) > 1 and len(hosts) != len(ports):
        seen = f"vllm_server_host has {len(hosts)} and vllm_server_port {len(ports)}; each host has its port."
        fix = Fix(text="name each server: --rollout_servers http://HOST:PORT ...")
        return [problem("E427", "vllm_server_port", seen, "A host that was added or taken away.", fix)]
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        seen = f"{', '.join(twice)} is named twice."
        once = Fix(text="each once", edits={_OPTION: list(dict.fromkeys(addresses))})
        return [problem("E427", _OPTION, seen, "A line that was copied.", once)]
    return []


def _quantized() -> Problem:
    seen = "quant_bits quantizes the base of the run, and a server takes only weights that are not quantized."
    whole = Fix(text="do not quantize the base", edits={"quant_bits": None})
    return problem("E422", _OPTION, seen, "", whole, _HERE)


def _no_token(config: Config, facts: Facts) -> Problem:
    if config.rollout_token_file is None:
        seen, cause = "rollout_servers are named, and rollout_token_file is not.", ""
    else:
        seen = f"rollout_token_file cannot be used: {facts.token_problem}."
        cause = "A misspelt path, or a server on another machine, whose file was not copied here."
    path = Fix(text="--rollout_token_file FILE; `covey rollout` prints the path of the file when it starts")
    return problem("E421", "rollout_token_file", seen, cause, path, _HERE)


def _of_one(config: Config, facts: Facts, server: ServerFacts) -> list[Problem]:
    match server.fault:
        case "address":
            fix = Fix(text="write the address as in --rollout_servers http://127.0.0.1:8000")
            return [problem("E427", _OPTION, f"{server.address!r}: {server.said}.", "", fix)]
        case "silent":
            cause = "The server was not started or has ended, or another program has its port."
            line = start_line(config, server.address, facts)
            start = Fix(text=f"start the server with `{line}`; it prints its address when it is ready")
            return [problem("E420", _OPTION, f"{server.address}: {server.said}.", cause, start, _HERE)]
        case "token":
            cause = "The token of another server, or of one that was started anew with another file."
            fix = Fix(text="--rollout_token_file FILE, as this server printed it when it started")
            seen = f"{server.address} refuses the token of {config.rollout_token_file}."
            if config.rollout_token_file is None:
                seen = f"{server.address} asks for a token, and rollout_token_file is not given."
            return [problem("E421", "rollout_token_file", seen, cause, fix)]
        case "other":
            cause = "A server of `trl vllm-serve`, `swift rollout` or SGLang, or another program on its port."
            start = Fix(
                text=f"start a server of covey instead: `{start_line(config, server.address, facts)}`"
            )
            seen = f"{server.address} answers, and is neither covey's server nor vLLM's: {server.said}."
            return [problem("E428", _OPTION, seen, cause, start, _HERE)]
    if server.run:
        seen = f"{server.address} is used by the run {server.run}."
        other = start_line(config, "", facts)
        wait = Fix(text=f"wait until that run has ended, or start another server: `{other}`")
        return [problem("E424", _OPTION, seen, "", wait)]
    if server.vllm is not None and (problems := vllm_serve_problems(config, facts, server, server.vllm)):
        return problems
    return [*_other_model(config, facts, server), *_too_long(config, facts, server)]


def _other_model(config: Config, facts: Facts, server: ServerFacts) -> list[Problem]:
    low = computes_low(config, cuda=bool(facts.cuda)) and facts.has_bfloat16 is not False
    pairs = (
        ("family", facts.model_type, server.model_type),
        ("number of parameters", facts.num_parameters, server.num_parameters),
        ("vocabulary", facts.embedding_rows, server.vocab),
        ("dtype", "bfloat16" if low else "float32", server.dtype),
    )
    # What a server does not say is empty or 0.
    differ = [(name, own, its) for name, own, its in pairs if own is not None and its and own != its]
    if not differ:
        return []
    words = ", ".join(f"{name} {its} (the run: {own})" for name, own, its in differ)
    line = start_line(config, server.address, facts)
    if differ[-1][0] == "dtype" and "--dtype" not in line:
        line += f" --dtype {differ[-1][1]}"
    start = Fix(text=f"start the server again with the model that the run trains: `{line}`")
    seen = f"{server.address} has {server.model}: {words}."
    return [problem("E422", _OPTION, seen, "A server that was started for another run.", start)]


def _too_long(config: Config, facts: Facts, server: ServerFacts) -> list[Problem]:
    if not server.max_len or facts.longest_prompt is None:
        return []
    longest = facts.longest_prompt + config.max_completion_length
    if longest <= server.max_len:
        return []
    seen = (
        f"{server.address} takes {counted(server.max_len, 'token')}, and the longest prompt "
        f"({facts.longest_prompt}) with a completion of {config.max_completion_length} has {longest}."
    )
    fits = server.max_len - facts.longest_prompt
    shorter = Fix(text="shorter completions", edits={"max_completion_length": fits})
    other = Fix(text="a server whose model has more positions")
    return [problem("E423", _OPTION, seen, "", *([shorter] if fits > 0 else []), other)]
