"""Hands the results of the rewards' trial from a launcher to the ranks that it starts.

A reward model takes minutes to load, and each question to a judge costs money, so rewards are tried once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

from covey.options.schema import Config
from covey.plan.facts.rewards import RewardFacts
from covey.types import BlindReward

TRIAL = "COVEY_TRIAL"
"""The environment variable with the results, as JSON."""


def handed(config: Config, passed: RewardFacts) -> dict[str, str]:
    """Return the environment of the ranks of a run whose rewards have passed their trial here; it is empty
    where not all were tried, because the weights of a model are still on a hub."""
    if not config.reward_trial or not all(model.is_here for model in passed.models):
        return {}
    told = {"run": _run(config, passed), "process": passed.process, "reads_steps": passed.reads_steps}
    return {TRIAL: json.dumps({**told, "blind": [asdict(reward) for reward in passed.blind]})}


def taken(config: Config, known: RewardFacts, environment: Mapping[str, str]) -> RewardFacts | None:
    """Return the facts of the rewards with the results of the launcher's trial; None where there was none, or
    it was of another configuration or of other functions."""
    told: dict[str, Any] = json.loads(environment.get(TRIAL, "{}"))
    if told.get("run") != _run(config, known):
        return None
    return replace(
        known,
        blind=tuple(BlindReward(**fields) for fields in told["blind"]),
        process=tuple(told["process"]),
        reads_steps=told["reads_steps"],
    )


def _run(config: Config, known: RewardFacts) -> str:
    """Return a digest of all that a trial depends on and that may change until the ranks start."""
    told = json.dumps([config.model_dump(mode="json"), known.texts])
    return blake2b(told.encode(), digest_size=16).hexdigest()
