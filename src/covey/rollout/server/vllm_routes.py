"""What a server that `vllm serve` started says of itself, and which of its routes answer without its key.

Its `--api-key` guards what begins with /v1, /v2, /inference and /cohere. In developer mode
(VLLM_SERVER_DEV_MODE=1) it has routes beside those that replace its weights and call methods of its workers.
No torch, so that a check may ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import Any

from covey.plan.facts import ServerFacts, VllmServeFacts
from covey.rollout.server.call import Caller, Refused
from covey.rollout.server.values import WireError
from covey.texts import tr

_SETTINGS = "/server_info?config_format=json"
# It looks at its whole machine for this, the first time.
_SETTINGS_S = 60.0
_PUBLISH = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info")
# Reading one of these by GET changes nothing: those that do something take POST alone, and answer 405.
_LOOKED_AT = (
    *_PUBLISH,
    *(
        "/server_info",
        "/update_weights",
        "/init_weight_transfer_engine",
        "/pause",
        "/abort_requests",
        "/sleep",
    ),
    *("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter", "/inference/v1/generate"),
    *("/invocations", "/tokenize", "/metrics"),
)
_ABSENT, _GUARDED = 404, (401, 403)


def ask_vllm(caller: Caller, directory: str | None) -> ServerFacts | None:
    """What a server says that `vllm serve` started; None where it is another program.

    `directory` is where files of weights are to lie. Raises one of FAULTS where it does not answer in time;
    Refused with 401 where it refuses the key.
    """
    try:
        version = _text(caller.get("/version"), "version")
    except (Refused, WireError):
        return None
    try:
        models = _list(caller.get("/v1/models"), "data")
    except Refused as error:
        if error.status in _GUARDED:
            raise
        return None
    # Adapters have a parent.
    own = [m for m in models if m.get("owned_by") == "vllm" and not m.get("parent")]
    if not own:
        return None
    found = VllmServeFacts(version=version, open_routes=_open_routes(caller))
    server = ServerFacts(
        address=caller.address,
        model=_text(own[0], "id"),
        max_len=_number(own[0].get("max_model_len")),
        noise_keys=False,
        vllm=found,
    )
    statuses = [_status(caller, path) for path in _PUBLISH]
    if _ABSENT in statuses:
        return server
    try:
        settings = caller.get(_SETTINGS, _SETTINGS_S)
    except Refused:
        return server
    return _with_settings(server, found, settings, directory)


def _with_settings(
    server: ServerFacts, found: VllmServeFacts, settings: Any, directory: str | None
) -> ServerFacts:
    config = _mapping(settings, "vllm_config")
    model, device = _mapping(config, "model_config"), _mapping(config, "device_config")
    overrides = model.get("hf_overrides")
    has_own_head = isinstance(overrides, Mapping) and overrides.get("tie_word_embeddings") is False
    known = replace(
        found,
        takes_weights=True,
        on_cpu=str(device.get("device")) == "cpu",
        unties_head=has_own_head or model.get("word_embeddings_untied_by_checkpoint") is True,
        logprobs=str(model.get("logprobs_mode") or ""),
        quantization=str(model.get("quantization") or ""),
        max_num_seqs=max(1, _number(_mapping(config, "scheduler_config").get("max_num_seqs"))),
        directory=directory if directory is not None and isdir(Path(directory)) else "",
    )
    dtype = str(model.get("dtype") or "").removeprefix("torch.")
    return replace(server, dtype=dtype, rows=known.max_num_seqs, shares_files=True, vllm=known)


def _open_routes(caller: Caller) -> tuple[str, ...]:
    """The routes that are there and ask for no key."""
    stranger = replace(caller, token="")
    return tuple(path for path in _LOOKED_AT if _status(stranger, path) not in (_ABSENT, *_GUARDED))


def _status(caller: Caller, path: str) -> int:
    """What a GET of a path is answered with."""
    try:
        caller.open("GET", path, None).close()
    except Refused as error:
        return error.status
    return 200


def label(run: str, version: int) -> str:
    """What a server is told that its weights are."""
    return f"covey {run} {version}"


def asked_label(caller: Caller, timeout_s: float) -> str:
    """What a server says that its weights are."""
    return _text(caller.get("/weight_info", timeout_s), "weight_version")


def version_of(text: str, run: str) -> int | None:
    """The version of a run in a label; None where it is none of this run."""
    words = text.split(" ")
    is_own = len(words) == 3 and words[:2] == ["covey", run] and words[2].lstrip("-").isdigit()
    return int(words[2]) if is_own else None


def _mapping(body: Any, name: str) -> Mapping[str, Any]:
    value = body.get(name) if isinstance(body, Mapping) else None
    if not isinstance(value, Mapping):
        raise WireError(tr("its answer has no {name}", name=name))
    return value


def _list(body: Any, name: str) -> list[Mapping[str, Any]]:
    value = body.get(name) if isinstance(body, Mapping) else None
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _text(body: Any, name: str) -> str:
    value = body.get(name) if isinstance(body, Mapping) else None
    if not isinstance(value, str):
        raise WireError(tr("its answer has {name} {value!r:.60}", name=name, value=value))
    return value


def _number(value: Any) -> int:
    return value if type(value) is int else 0
