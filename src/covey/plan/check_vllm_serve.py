"""What stands against sampling on a server that `vllm serve` started, and which of its routes are open."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from covey.options.schema import Config
from covey.plan.facts import Facts, ServerFacts, VllmServeFacts
from covey.plan.problem import problem, warning
from covey.plan.server_line import start_line
from covey.types import Fix, Problem

_OPTION = "rollout_servers"
_UNTIED = """--load-format dummy --hf-overrides '{"tie_word_embeddings": false}'"""
_NAMED = 6


def vllm_serve_problems(
    config: Config, facts: Facts, server: ServerFacts, own: VllmServeFacts
) -> list[Problem]:
    """Return what stands against a server: each of it by itself would have the run sample from other weights,
    or learn from other log-probabilities."""
    is_tied = facts.model_sizes is not None and facts.model_sizes.tied
    # On a CPU vLLM multiplies with a packed copy of a tied head, which a reload leaves as it was.
    keeps_head = own.on_cpu and is_tied and not own.unties_head
    line = f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(server.model)}"
    line += f" --port {urlsplit(server.address).port} --logprobs-mode processed_logprobs"
    line += f" {_UNTIED}" if is_tied and (own.on_cpu or not own.takes_weights) else ""
    again = Fix(text=f"start the server again with `{line}`")
    fixes = (_front(config, facts, server), again)
    name = f"{server.address} (vLLM {own.version})"
    if not own.takes_weights:
        seen = f"{name} has no routes that replace its weights."
        return [problem("E429", _OPTION, seen, "It was started without VLLM_SERVER_DEV_MODE=1.", *fixes)]
    problems = []
    if own.logprobs != "processed_logprobs":
        seen = f"{name} returns {own.logprobs}: log-probabilities at another temperature than it samples at."
        problems.append(problem("E429", _OPTION, seen, "That is vLLM's default.", *fixes))
    if own.quantization:
        seen = f"{name} quantizes its weights ({own.quantization}), and samples from another policy."
        problems.append(problem("E429", _OPTION, seen, "", *fixes))
    if keeps_head:
        seen = f"{name} runs on a CPU, and the model's head is its embedding: its copy of the head would "
        seen += "stay as it is at every publish."
        problems.append(problem("E429", _OPTION, seen, "A fault of vLLM on CPUs.", *fixes))
    if not own.directory:
        given = config.rollout_weights_directory
        seen = f"{name} reads weights from files, and " + (
            f"there is no directory {given}." if given else "no directory is named that it and this run see."
        )
        fix = Fix(
            text="--rollout_weights_directory DIR, a shared directory that has the same path on both machines"
        )
        problems.append(problem("E429", "rollout_weights_directory", seen, "", fix, fixes[0]))
    return problems


def open_routes(config: Config, facts: Facts, servers: Sequence[ServerFacts]) -> list[Problem]:
    """Return one warning that names the routes of vLLM's servers that answer without a key."""
    found = [s for s in servers if s.vllm is not None and s.vllm.open_routes]
    if not found:
        return []
    routes = list(dict.fromkeys(r for s in found if s.vllm is not None for r in s.vllm.open_routes))
    more = f" and {len(routes) - _NAMED} more" if len(routes) > _NAMED else ""
    addresses = ", ".join(server.address for server in found)
    seen = f"{addresses}: {', '.join(routes[:_NAMED])}{more} answer without a token."
    cause = "`vllm serve` guards what begins with /v1 with its --api-key, where it has one, and little else."
    return [warning("W181", _OPTION, seen, cause, _front(config, facts, found[0]))]


def _front(config: Config, facts: Facts, server: ServerFacts) -> Fix:
    length = config.vllm_max_model_len or server.max_len or None
    line = start_line(config, server.address, facts, vllm_max_model_len=length)
    return Fix(text=f"start vLLM by covey, which asks for a token on every route: `{line}`")
