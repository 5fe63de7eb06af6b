"""The command that starts a rollout server for a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from covey.config.quickstart import BUILT_IN_NAMES
from covey.options.schema import Config
from covey.options.verbs import RolloutOptions
from covey.options.vllm import VllmOptions
from covey.plan.facts import Facts
from covey.plan.layout import WEIGHT_BYTES
from covey.plan.memory_vllm import largest_adapter_rank
from covey.plan.words import flags
from covey.texts import Whole

OF_BOTH: Mapping[str, str] = {
    **{name: name for name in RolloutOptions.model_fields if name in VllmOptions.model_fields},
    "vllm_max_num_seqs": "max_rows",
}
"""Options of vLLM in a run that `covey rollout` has too, and their names there."""

_MEMORY = "/dev/shm"


def start_line(config: Config, address: str = "", facts: Facts | None = None, **more: Any) -> str:
    """Return the line that starts a server for a run, with the options of vLLM that were typed for the run.

    `address` is where it is to listen, PORT where none is known; `more` are further options of vLLM.
    """
    directory = None if facts is None else facts.model.directory
    model = config.model if config.model in BUILT_IN_NAMES or directory is None else directory
    words = ["covey rollout --model", shlex.quote(model)]
    if config.torch_dtype in ("float32", "bfloat16"):
        words.append(f"--dtype {config.torch_dtype}")
    if config.use_vllm or more:
        words.append("--engine vllm")
        given = {own: getattr(config, name) for name, own in OF_BOTH.items()} | more
        room = largest_adapter_rank(config)
        given |= {"vllm_enable_lora": room > 0, "vllm_max_lora_rank": room or None}
        usual = {name: field.default for name, field in RolloutOptions.model_fields.items()}
        typed = {name: value for name, value in given.items() if value not in (None, usual[name])}
        words += [flags(typed)] if typed else []
    host, port = _listens(address)
    words += [f"--host {host}"] if host and not _is_here(host) else []
    return Whole(" ".join([*words, f"--port {port}"]))


def holding_line(config: Config, facts: Facts, address: str = "") -> str:
    """Return the line that starts a server for a run, over as many GPUs, as large as those of its layout, as
    hold the weights in half of their memory, where nobody typed how many."""
    model, num_bytes = facts.model.sizes, facts.layout.gpu_bytes
    if model is None or not num_bytes or not config.use_vllm or config.vllm_tensor_parallel_size > 1:
        return start_line(config, address, facts)
    spans = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    holds = (n for n in spans if 2 * WEIGHT_BYTES * model.parameters <= n * num_bytes)
    return start_line(config, address, facts, vllm_tensor_parallel_size=next(holds, spans[-1]))


def _listens(address: str) -> tuple[str, str]:
    """Host and port of an address; PORT where it has none."""
    try:
        parts = urlsplit(address)
        return parts.hostname or "", str(parts.port or "PORT")
    except ValueError:
        return "", "PORT"


def _is_here(host: str) -> bool:
    """Whether a host is this machine by an address that no other reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def weights_directory(config: Config, address: str) -> str | None:
    """Where files of weights lie for a server of vLLM's: memory where it is on this machine; None where
    nothing is known that both see."""
    if config.rollout_weights_directory is not None:
        return config.rollout_weights_directory
    return _MEMORY if _is_here(_listens(address)[0]) else None
