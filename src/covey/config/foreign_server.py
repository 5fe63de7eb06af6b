"""Command lines of other tools for a rollout server, `swift rollout` and `trl vllm-serve`, and covey's line
for the same."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from covey.codes import CODES
from covey.config.argv import Flag
from covey.options.declare import fields_of
from covey.options.verbs import RolloutOptions
from covey.texts import joined, plural, tr
from covey.types import Fix, Problem

# What their servers take and covey's does not.
_THEIRS = (
    *("infer_backend", "use_async_engine", "max_length", "template", "system", "revision"),
    *("tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "max_model_len", "log_level"),
    *("enable_prefix_caching", "enforce_eager", "kv_cache_dtype", "trust_remote_code", "model_type"),
    *("adapters", "enable_thinking"),
    *("distributed_executor_backend", "speculative_config", "served_model_name", "quantization"),
)
_KEPT = ("vllm_", "max_", "multi_turn_", "gym_", "use_gym_", "external_")
_NAMES = {"model": "DIR", "host": "", "port": "8000"}
# What covey has under another name.
_OURS = {
    **{n: f"vllm_{n}" for n in ("tensor_parallel_size", "max_model_len", "enforce_eager")},
    **{"gpu_memory_utilization": "vllm_gpu_memory_utilization", "max_num_seqs": "max_rows"},
    **{"vllm_max_num_seqs": "max_rows", "vllm_max_model_length": "vllm_max_model_len"},
}


def answer(verb: str, flags: Sequence[Flag]) -> Problem | None:
    """Return the problem of a command of ms-swift or TRL, with covey's own line; None where it is covey's.

    `verb` is rollout, swift for ms-swift's by its full name, or vllm-serve for TRL's.
    """
    own = fields_of(RolloutOptions)
    ours = own if verb == "rollout" else {}
    theirs = [
        f.name for f in flags if f.name in _THEIRS or (f.name.startswith("vllm_") and f.name not in ours)
    ]
    if verb == "rollout" and not theirs:
        return None
    # Their servers are vLLM, which goes on as it was typed where covey has the option.
    kept = [(_OURS.get(f.name, f.name), f.words) for f in flags if f.name not in _NAMES]
    kept = [(name, words) for name, words in kept if name in own and name.startswith(_KEPT)]
    options = "".join(f" --{name} {shlex.join(words) or 'true'}" for name, words in kept)
    typed = {flag.name: " ".join(flag.words) for flag in flags if flag.name in _NAMES}
    given = {name: typed.get(name) or default for name, default in _NAMES.items()}
    host = tr(" --host {host}", host=given["host"]) if given["host"] else ""
    line = f"covey rollout --model {given['model']} --engine vllm{options}{host} --port {given['port']}"
    run = tr("--rollout_servers http://127.0.0.1:{port}", port=given["port"])
    run += tr(" --rollout_token_file rollout-{port}.token", port=given["port"])
    code = "E102" if verb == "rollout" else "E112"
    tool = "trl vllm-serve" if verb == "vllm-serve" else "swift rollout"
    return Problem(
        code=code,
        option=verb,
        seen=plural(
            len(theirs),
            "{names} is an option of `{tool}`, not of `covey rollout`.",
            "{names} are options of `{tool}`, not of `covey rollout`.",
            names=joined(", ", theirs),
            tool=tool,
        )
        if verb == "rollout"
        else tr("`{tool}` is a command of another tool; the command of covey is `covey rollout`.", tool=tool),
        why=CODES[code].why,
        cause="",
        fixes=(Fix(text=f"`{line}`"), Fix(text=tr("the training run needs {run}", run=run))),
    )
