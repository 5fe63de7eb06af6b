"""Facts about a scheduler of ms-swift: it is started before the run."""

from __future__ import annotations

from covey.checks.model.look import model_dir
from covey.environments.environment_host import HostedEnvironments
from covey.environments.scheduler_room import SchedulerSettings
from covey.errors import CoveyError
from covey.options.schema import Config
from covey.types.turns import ToolFault


def started(config: Config) -> tuple[HostedEnvironments | None, list[ToolFault]]:
    """Start the scheduler of a run; nothing is started where options stand against it."""
    # Runs without one do not wait for this.
    from covey.environments.scheduler_host import start_scheduler

    if config.tools or config.environment_factory or config.rollout_func:
        return None, []
    return start_scheduler(settings_of(config), timeout_s=config.tool_timeout_s)


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
