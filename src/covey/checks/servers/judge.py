"""Finds faults in the rollout servers of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from covey.checks.check import Check
from covey.checks.servers.codes import CODES
from covey.checks.servers.vllm_serve import open_routes, vllm_serve_problems
from covey.config.quantization import quantization_of
from covey.options.schema import Config
from covey.plan.facts import Facts, PromptFacts, ServerFacts, ServersFacts
from covey.plan.layout import computes_low
from covey.plan.problem import problem, warning
from covey.plan.publish import is_here, takes_group
from covey.plan.server_line import start_line
from covey.texts import counted, joined, tr
from covey.types import Fix, Problem

_OPTION = "rollout_servers"
_HERE = Fix(text=tr("leave out --rollout_servers; then the training processes do the sampling"))


def server_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against sampling on these servers."""
    addresses = config.rollout_servers
    problems = _addresses(config, addresses)
    if not addresses:
        return problems
    servers = facts.servers.asked or ()
    has_no_token = config.rollout_token_file is None and not any(
        server.vllm is not None or server.fault == "other" for server in servers
    )
    if has_no_token or facts.servers.token_problem is not None:
        return [*problems, _no_token(config, facts.servers)]
    if quantization_of(config) is not None:
        problems.append(_quantized())
    for server in servers:
        problems += _of_one(config, facts, server)
    problems += _schedulers(config, servers)
    return [*problems, *open_routes(config, facts, servers), *_groups(config, servers)]


def _schedulers(config: Config, servers: Sequence[ServerFacts]) -> list[Problem]:
    """Return what stands against the schedulers of servers: a run that does not name one would make episodes
    of one turn, and one that names another would not know what makes its episodes."""
    own = {
        "multi_turn_scheduler": config.multi_turn_scheduler,
        "max_turns": config.max_turns,
        "gym_env": config.gym_env,
    }
    for server in servers:
        its = {name: server.scheduler.get(name) for name in own}
        if not server.scheduler or its == own:
            continue
        pairs = server.scheduler.items()
        shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in pairs}
        words = joined(" ", [f"--{name} {value}" for name, value in shown.items()])
        seen = tr(
            "{address} was started with {words}; the options of this run differ.",
            address=server.address,
            words=words,
        )
        edits = {**{name: None for name in own if own[name] is not None}, **server.scheduler}
        take = Fix(text=tr("use the scheduler of the server"), edits=edits)
        other = Fix(text=tr("start the server again without its scheduler"))
        return [problem("E436", "multi_turn_scheduler", seen, "", take, other)]
    return []


def _groups(config: Config, servers: Sequence[ServerFacts]) -> list[Problem]:
    """Return what is to be known of process groups, where they are asked for."""
    option = "vllm_server_group_port"
    if config.vllm_server_group_port is None:
        return []
    problems = []
    if away := [address for address in config.rollout_servers if not is_here(address)]:
        seen = tr(
            "{option} is given, and {away} can be on another machine.", option=option, away=joined(", ", away)
        )
        fix = Fix(
            text=tr(
                "on a network that others use, leave out --{option}; HTTP with TLS is encrypted",
                option=option,
            )
        )
        problems.append(warning("W182", option, seen, "", fix))
    if without := [s.address for s in servers if not s.fault and not takes_group(s)]:
        seen = tr("{without} does not support a process group.", without=joined(", ", without))
        cause = tr("It is `vllm serve`, or vLLM with several processes that applies adapters itself.")
        problems.append(
            warning("W183", option, seen, cause, Fix(text=tr("leave out --{option}", option=option)))
        )
    return problems


def _addresses(config: Config, addresses: Sequence[str]) -> list[Problem]:
    hosts, ports = config.vllm_server_host, config.vllm_server_port
    if len(hosts) > 1 and len(ports) > 1 and len(hosts) != len(ports):
        seen = tr(
            "vllm_server_host has {num_hosts} entries, but vllm_server_port has {num_ports}; give "
            "one port for each host.",
            num_hosts=len(hosts),
            num_ports=len(ports),
        )
        fix = Fix(text=tr("name each server: --rollout_servers http://HOST:PORT ..."))
        return [problem("E427", "vllm_server_port", seen, "", fix)]
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        seen = tr("{twice} is named twice.", twice=joined(", ", twice))
        once = Fix(text=tr("name each server once"), edits={_OPTION: list(dict.fromkeys(addresses))})
        return [problem("E427", _OPTION, seen, "", once)]
    return []


def _quantized() -> Problem:
    seen = tr(
        "quant_bits quantizes the base model of the run, but a server accepts only unquantized weights."
    )
    whole = Fix(text=tr("do not quantize the base"), edits={"quant_bits": None})
    return problem("E422", _OPTION, seen, "", whole, _HERE)


def _no_token(config: Config, servers: ServersFacts) -> Problem:
    if config.rollout_token_file is None:
        seen, cause = tr("rollout_servers is set, but rollout_token_file is not."), ""
    else:
        seen = tr(
            "rollout_token_file cannot be used: {token_problem}.",
            token_problem=servers.token_problem,
        )
        cause = tr("A server on another machine writes the file there; copy it to this machine.")
    path = Fix(
        text=tr("--rollout_token_file FILE; `covey rollout` prints the path of the file when it starts")
    )
    return problem("E421", "rollout_token_file", seen, cause, path, _HERE)


def _of_one(config: Config, facts: Facts, server: ServerFacts) -> list[Problem]:
    match server.fault:
        case "address":
            fix = Fix(text=tr("write the address like this: --rollout_servers http://127.0.0.1:8000"))
            seen = tr("{address!r}: {said}.", address=server.address, said=server.said)
            return [problem("E427", _OPTION, seen, "", fix)]
        case "silent":
            cause = tr("The server was not started or has ended, or another program uses its port.")
            line = start_line(config, server.address, facts)
            start = Fix(
                text=tr("start the server with `{line}`; it prints its address when it is ready", line=line)
            )
            seen = tr("{address}: {said}.", address=server.address, said=server.said)
            return [problem("E420", _OPTION, seen, cause, start, _HERE)]
        case "token":
            cause = tr("The token belongs to another server, or the server was restarted with another file.")
            fix = Fix(text=tr("--rollout_token_file FILE, the path that this server printed when it started"))
            if len(config.rollout_servers) > 1:
                file = config.rollout_token_file or "FILE"
                fix = Fix(
                    text=tr(
                        "all servers of a run share one token: start each with --token_file {file}", file=file
                    )
                )
            seen = tr(
                "{address} refuses the token of {rollout_token_file}.",
                address=server.address,
                rollout_token_file=config.rollout_token_file,
            )
            if config.rollout_token_file is None:
                seen = tr(
                    "{address} requires a token, but rollout_token_file is not set.", address=server.address
                )
            return [problem("E421", "rollout_token_file", seen, cause, fix)]
        case "other":
            cause = tr(
                "It may be a server of `trl vllm-serve`, `swift rollout` or SGLang, or another program."
            )
            start = Fix(
                text=tr(
                    "start a server of covey instead: `{start_line}`",
                    start_line=start_line(config, server.address, facts),
                )
            )
            seen = tr(
                "{address} answers, but is neither a covey server nor a vLLM server: {said}.",
                address=server.address,
                said=server.said,
            )
            return [problem("E428", _OPTION, seen, cause, start, _HERE)]
    if server.run:
        seen = tr("{address} is used by the run {run}.", address=server.address, run=server.run)
        other = start_line(config, "", facts)
        wait = Fix(text=tr("wait until that run has ended, or start another server: `{other}`", other=other))
        return [problem("E424", _OPTION, seen, "", wait)]
    if server.vllm is not None and (problems := vllm_serve_problems(config, facts, server, server.vllm)):
        return problems
    differ = _other_model(config, facts, server) or _no_images(config, facts, server)
    return [*differ, *_too_long(config, facts.prompts, server)]


def _other_model(config: Config, facts: Facts, server: ServerFacts) -> list[Problem]:
    low = computes_low(config, cuda=bool(facts.machine.cuda)) and facts.machine.has_bfloat16 is not False
    pairs = (
        ("family", facts.model.type, server.model_type),
        (tr("number of parameters"), facts.model.num_parameters, server.num_parameters),
        ("vocabulary", facts.model.embedding_rows, server.vocab),
        (tr("image processor"), *_preparations(facts.model.image_processor, server.images)),
        ("dtype", "bfloat16" if low else "float32", server.dtype),
    )
    # What a server does not say is empty or 0.
    differ = [(name, own, its) for name, own, its in pairs if own is not None and its and own != its]
    if not differ:
        return []
    words = joined(
        ", ", [tr("{name} {its} (the run: {own})", name=name, its=its, own=own) for name, own, its in differ]
    )
    line = start_line(config, server.address, facts)
    if differ[-1][0] == "dtype" and "--dtype" not in line:
        line += tr(" --dtype {differ}", differ=differ[-1][1])
    start = Fix(text=tr("start the server again with the model that the run trains: `{line}`", line=line))
    seen = tr("{address} has {model}: {words}.", address=server.address, model=server.model, words=words)
    return [problem("E422", _OPTION, seen, tr("The server was started for another run."), start)]


def _preparations(own: str, its: str) -> tuple[str | None, str]:
    """Return how the run and a server prepare images, without what both do; nothing where one takes none."""
    if not (own and its):
        return None, ""
    ours, theirs = own.split(", "), its.split(", ")
    pairs = ((ours, theirs), (theirs, ours))
    differ = [", ".join(word for word in one if word not in other) for one, other in pairs]
    return differ[0], differ[1]


def _no_images(config: Config, facts: Facts, server: ServerFacts) -> list[Problem]:
    if not facts.prompts.has_images or server.images:
        return []
    seen = tr("{address} takes no images, but prompts of the run have images.", address=server.address)
    line = start_line(config, server.address, facts)
    if server.vllm is not None:
        cause = tr("covey sends `vllm serve` only token ids.")
        start = Fix(text=tr("start a server of covey instead: `{start_line}`", start_line=line))
    else:
        cause = tr(
            "Its model directory has no preprocessor_config.json, or vLLM found no tokenizer.json there."
        )
        start = Fix(text=tr("start the server again with the model that the run trains: `{line}`", line=line))
    return [problem("E422", _OPTION, seen, cause, start, _HERE)]


def _too_long(config: Config, prompts: PromptFacts, server: ServerFacts) -> list[Problem]:
    if not server.max_len or prompts.longest is None:
        return []
    longest = prompts.longest + config.max_completion_length
    if longest <= server.max_len:
        return []
    seen = tr(
        "{address} accepts at most {tokens}, but the longest prompt ({longest_prompt}) plus a "
        "completion of {max_completion_length} is {longest}.",
        address=server.address,
        tokens=counted(server.max_len, "token"),
        longest_prompt=prompts.longest,
        max_completion_length=config.max_completion_length,
        longest=longest,
    )
    fits = server.max_len - prompts.longest
    shorter = Fix(text=tr("allow only shorter completions"), edits={"max_completion_length": fits})
    other = Fix(text=tr("a server whose model has a longer context"))
    return [problem("E423", _OPTION, seen, "", *([shorter] if fits > 0 else []), other)]


CHECK = Check(place=110, judge=lambda config, facts, _: server_problems(config, facts), codes=CODES)
