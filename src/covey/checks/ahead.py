"""Sampling while the model trains: where it cannot be, and what a loss of earlier weights needs."""

from __future__ import annotations

from covey.checks.check import Check
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.plan.server_line import start_line
from covey.texts import tr
from covey.types import Fix, Problem

_IN_TURN = Fix(
    text=tr("sample a rollout, then train on it"), edits={"async_generate": False, "max_staleness": 0}
)


def ahead_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against rollouts that are begun ahead."""
    found = []
    name = "max_staleness" if config.max_staleness and not config.async_generate else "async_generate"
    is_named = bool(config.rollout_servers) or (facts.layout.engine == "server" and not facts.layout.is_here)
    if config.is_ahead and not is_named:
        seen = tr("{name} is set, but no rollout servers are named.", name=name)
        cause = tr("The training processes cannot sample while they train.")
        line = start_line(config, "http://127.0.0.1:8000", facts)
        served = Fix(
            text=tr(
                "start a server with `{line}`, and add to this command: --rollout_servers "
                "http://127.0.0.1:8000 --rollout_token_file rollout-8000.token",
                line=line,
            )
        )
        found.append(problem("E115", name, seen, cause, served, _IN_TURN))
    if config.is_ahead and config.use_vllm and config.vllm_enable_lora:
        seen = tr("{name} is set, but vllm_enable_lora has vLLM apply the adapter itself.", name=name)
        cause = tr("vLLM does not change an adapter while completions run.")
        whole = Fix(text=tr("send merged weights"), edits={"vllm_enable_lora": False})
        found.append(problem("E111", name, seen, cause, whole, _IN_TURN))
    return [*found, *_decoupled(config)]


def _decoupled(config: Config) -> list[Problem]:
    modes = (config.rollout_importance_sampling_mode, config.vllm_importance_sampling_mode)
    if not config.use_decoupled_loss or any(modes):
        return []
    seen = tr("use_decoupled_loss is true, but rollout_importance_sampling_mode is not set.")
    cause = tr("Nothing would weigh how far the weights that sampled are from those that train.")
    weigh = Fix(
        text=tr("weigh each token, at most by the threshold"),
        edits={"rollout_importance_sampling_mode": "token_truncate"},
    )
    return [problem("E115", "use_decoupled_loss", seen, cause, weigh)]


CHECK = Check(place=115, judge=lambda config, facts, typed: ahead_problems(config, facts))
