"""Facts about a scheduler of ms-swift: it is started before the run."""

from __future__ import annotations

from covey.checks.model.look import model_dir
from covey.environments.environment_host import HostedEnvironments
from covey.environments.scheduler_room import SchedulerSettings
from covey.errors import CoveyError
from covey.options.schema import Config
from covey.plan.facts import Facts
from covey.rollout.server.call import Caller, read_token
from covey.rollout.server.scheduler_client import ServedRooms
from covey.types.turns import ToolFault


def started(config: Config, facts: Facts) -> tuple[HostedEnvironments | None, list[ToolFault]]:
    """Start the scheduler of a run, or ask those of its rollout servers where they have the same one; nothing
    is started where options stand against it."""
    # Runs without one do not wait for this.
    from covey.environments.scheduler_host import hosted, start_scheduler

    if config.tools or config.environment_factory or config.rollout_func:
        return None, []
    settings = settings_of(config)
    theirs = [server for server in facts.servers.asked or () if server.scheduler]
    if any(server.scheduler["multi_turn_scheduler"] != settings.name for server in theirs):
        return None, []
    if addresses := [server.address for server in theirs]:
        token = "" if config.rollout_token_file is None else read_token(config.rollout_token_file)
        callers = [Caller(address=a, token=token, timeout_s=config.rollout_timeout) for a in addresses]
        return hosted(ServedRooms(callers, settings.sampling), settings.name), []
    return start_scheduler(settings, timeout_s=config.tool_timeout_s)


def settings_of(config: Config) -> SchedulerSettings:
    """Return what the scheduler of a run is made with."""
    try:
        model = str(model_dir(config))
    except (CoveyError, OSError):
        model = ""
    return SchedulerSettings(
        name=config.multi_turn_scheduler or "",
        plugins=tuple(config.external_plugins),
        max_turns=config.max_turns,
        gym_env=config.gym_env,
        model=model,
        sampling={
            "max_tokens": config.max_completion_length,
            "temperature": config.temperature,
            "top_k": config.top_k or -1,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "repetition_penalty": 1.0,
            "stop": list(config.stop_words),
            "logprobs": True,
            "return_details": True,
        },
    )
