"""Finds what forbids sampling on a server that `vllm serve` started, and which of its routes are open."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from covey.options.schema import Config
from covey.plan.facts import Facts, ServerFacts, VllmServeFacts
from covey.plan.problem import problem, warning
from covey.plan.server_line import start_line
from covey.texts import joined, tr
from covey.types import Fix, Problem

_OPTION = "rollout_servers"
_UNTIED = tr("--load-format dummy --hf-overrides '{\"tie_word_embeddings\": false}'")
_NAMED = 6


def vllm_serve_problems(
    config: Config, facts: Facts, server: ServerFacts, own: VllmServeFacts
) -> list[Problem]:
    """Return what stands against a server: each of it by itself would have the run sample from other weights,
    or learn from other log-probabilities."""
    is_tied = facts.model.sizes is not None and facts.model.sizes.tied
    # On a CPU vLLM multiplies with a packed copy of a tied head, which a reload leaves as it was.
    keeps_head = own.on_cpu and is_tied and not own.unties_head
    line = tr("VLLM_SERVER_DEV_MODE=1 vllm serve {quote}", quote=shlex.quote(server.model))
    line += tr(" --port {port} --logprobs-mode processed_logprobs", port=urlsplit(server.address).port)
    line += f" {_UNTIED}" if is_tied and (own.on_cpu or not own.takes_weights) else ""
    again = Fix(text=tr("start the server again with `{line}`", line=line))
    fixes = (_front(config, facts, server), again)
    name = f"{server.address} (vLLM {own.version})"
    if not own.takes_weights:
        seen = tr("{name} has no routes that replace its weights.", name=name)
        return [problem("E429", _OPTION, seen, tr("It was started without VLLM_SERVER_DEV_MODE=1."), *fixes)]
    problems = []
    if own.logprobs != "processed_logprobs":
        seen = tr(
            "{name} returns {logprobs}: log-probabilities at another temperature than the sampling "
            "temperature.",
            name=name,
            logprobs=own.logprobs,
        )
        problems.append(problem("E429", _OPTION, seen, tr("That is vLLM's default."), *fixes))
    if own.quantization:
        seen = tr(
            "{name} quantizes its weights ({quantization}), so it samples from another policy.",
            name=name,
            quantization=own.quantization,
        )
        problems.append(problem("E429", _OPTION, seen, "", *fixes))
    if keeps_head:
        seen = tr(
            "{name} runs on a CPU and the model ties head and embedding: vLLM's copy of the head would not "
            "be updated by a publish.",
            name=name,
        )
        problems.append(problem("E429", _OPTION, seen, tr("This is a bug of vLLM on CPUs."), *fixes))
    if not own.directory:
        given = config.rollout_weights_directory
        seen = (
            tr(
                "{name} reads weights from files, but the directory {directory} does not exist.",
                name=name,
                directory=given,
            )
            if given
            else tr("{name} reads weights from files, but rollout_weights_directory is not set.", name=name)
        )
        fix = Fix(
            text=tr(
                "--rollout_weights_directory DIR, a shared directory that has the same path on both machines"
            )
        )
        problems.append(problem("E429", "rollout_weights_directory", seen, "", fix, fixes[0]))
    return problems


def open_routes(config: Config, facts: Facts, servers: Sequence[ServerFacts]) -> list[Problem]:
    """Return one warning that names the routes of vLLM's servers that answer without a key."""
    found = [s for s in servers if s.vllm is not None and s.vllm.open_routes]
    if not found:
        return []
    routes = list(dict.fromkeys(r for s in found if s.vllm is not None for r in s.vllm.open_routes))
    more = tr(" and {num_routes} more", num_routes=len(routes) - _NAMED) if len(routes) > _NAMED else ""
    addresses = ", ".join(server.address for server in found)
    seen = tr(
        "{addresses}: {routes}{more} answer without a token.",
        addresses=addresses,
        routes=joined(", ", routes[:_NAMED]),
        more=more,
    )
    cause = tr(
        "`vllm serve` protects only routes under /v1 with --api-key (if one is set); most other "
        "routes are open."
    )
    return [warning("W181", _OPTION, seen, cause, _front(config, facts, found[0]))]


def _front(config: Config, facts: Facts, server: ServerFacts) -> Fix:
    length = config.vllm_max_model_len or server.max_len or None
    line = start_line(config, server.address, facts, vllm_max_model_len=length)
    return Fix(
        text=tr(
            "start vLLM through covey, which requires a token on every route but /health: `{line}`", line=line
        )
    )
