"""Sampling while the model trains: where it cannot be, and what a loss of earlier weights needs."""

from __future__ import annotations

from covey.checks.check import Check
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.plan.problem import problem
from covey.plan.server_line import start_line
from covey.texts import Text, tr
from covey.types import Fix, Problem

_IN_TURN = Fix(
    text=tr("sample a rollout, then train on it"), edits={"async_generate": False, "max_staleness": 0}
)


def ahead_problems(config: Config, facts: Facts) -> list[Problem]:
    """Return what stands against rollouts that are begun ahead."""
    found = []
    name = "max_staleness" if config.max_staleness and not config.async_generate else "async_generate"
    cause = _without_servers(config, facts) if config.is_ahead and not config.rollout_servers else ""
    if cause:
        seen = tr("{name} is set, but no rollout servers are named.", name=name)
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


def _without_servers(config: Config, facts: Facts) -> Text | str:
    """Return why nothing can sample while the model trains; empty where something can: a server that this
    machine does not know, or one that the run starts for itself."""
    launch, machine, layout = facts.launch, facts.machine, facts.layout
    if layout.engine == "server" and not layout.is_here:
        return ""
    if config.use_vllm:
        return tr("vLLM in the training processes cannot sample while they train.")
    is_apart = launch.num_processes_here not in (None, launch.num_processes)
    if launch.is_rank or is_apart or launch.objects or config.launcher == "ray":
        return tr(
            "covey can start the process that samples only on one machine, with its own launcher, and with "
            "a model in files."
        )
    if machine.cuda and (machine.nproc_available or 0) <= launch.num_processes:
        return tr("Every GPU of this machine trains, and none is left to sample.")
    return ""


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
