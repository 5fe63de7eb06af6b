"""Facts about the rewards that are no functions: models that score, and the judge behind a service."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

from covey.checks.rewards.apart import judge_problems, reward_model_problems
from covey.data.errors import ModelError
from covey.data.hub import fetch_weights, locate_model
from covey.data.model_files import classifier_problem, model_context, read_json
from covey.errors import ConfigError
from covey.models.adapter_shapes import read_shapes
from covey.models.fit import CLASSIFIER, fit_of
from covey.options.schema import Config
from covey.plan.facts import (
    DataFacts,
    Facts,
    JudgeFacts,
    MachineFacts,
    PromptFacts,
    RewardFacts,
    RewardModelFacts,
)
from covey.rewards.apart import ModelEntry
from covey.rewards.builtin import IN_WORKERS, JUDGE, built_in_name
from covey.rewards.judge_text import BadPattern, placeholders, reward_pattern, template_text
from covey.rewards.targets import is_model, model_name
from covey.texts import tr
from covey.weight_files import stored_tensors

_OF_A_ROW = ("prompt", "completion")
_USUAL_MLP = 4


def with_reward_models(facts: Facts, config: Config, *, offline: bool) -> Facts:
    """The facts with those of each reward model; of a hub only the small files are fetched."""
    found = [_described(entry, revision, config, offline) for entry, revision in _entries(config)]
    return replace(facts, rewards=replace(facts.rewards, models=tuple(found)))


def with_judge(facts: Facts, config: Config) -> Facts:
    """The facts with those of the reward judge, which the run asks for."""
    prompt_problem, names = _prompt(config)
    known = {*_OF_A_ROW, *(facts.data.columns or ())}
    unknown = [n for n in names if n not in known] if facts.data.columns is not None else []
    try:
        reward_pattern(config.judge_regex)
    except BadPattern as error:
        regex_problem: str | None = str(error)
    else:
        regex_problem = None
    judge = JudgeFacts(prompt_problem=prompt_problem, regex_problem=regex_problem, unknown=tuple(unknown))
    missing = [] if importlib.util.find_spec("openai") is not None else [("reward_funcs", "openai")]
    return replace(
        facts,
        rewards=replace(facts.rewards, judge=judge),
        machine=replace(facts.machine, missing_packages=(*facts.machine.missing_packages, *missing)),
    )


def usable_models(config: Config, prompts: PromptFacts, rewards: RewardFacts) -> dict[str, ModelEntry]:
    """The reward models that nothing is wrong with, by what was typed."""
    if reward_model_problems(config, prompts, rewards):
        return {}
    return {m.entry: ModelEntry(entry=m.entry, name=m.name, directory=m.directory) for m in rewards.models}


def is_judge_usable(config: Config, data: DataFacts, rewards: RewardFacts, machine: MachineFacts) -> bool:
    """Whether nothing is wrong with what the judge is told."""
    numbers = config.judge_concurrency >= 1 and config.judge_retries >= 0 and config.judge_timeout_s > 0
    is_there = ("reward_funcs", "openai") not in machine.missing_packages
    return numbers and is_there and not judge_problems(config, data, rewards)


def fetch_reward_models(config: Config) -> None:
    """Bring the weights of a hub's reward models to this machine; ConfigError says why they cannot be had."""
    for entry, revision in _entries(config):
        try:
            fetch_weights(entry, revision=revision, use_hf=config.use_hf)
        except ModelError as error:
            name = model_name(entry)
            lost = RewardModelFacts(entry=entry, name=name, problem=str(error), fault="hub")
            rewards = RewardFacts(models=(lost,))
            raise ConfigError(reward_model_problems(config, PromptFacts(), rewards)) from error


def _entries(config: Config) -> list[tuple[str, str | None]]:
    """Every reward model as it was typed, with its revision."""
    revisions: list[str | None] = [*config.reward_model_revision] or [None] * len(config.reward_model)
    among = [
        n for n in config.reward_funcs if built_in_name(n) is None and n not in IN_WORKERS and n != JUDGE
    ]
    typed: list[tuple[str, str | None]] = [(name, None) for name in among if is_model(name)]
    # Of another number nobody knows which is whose, and that is a problem of its own.
    pairs = list(zip(config.reward_model, revisions, strict=False))
    typed += pairs if len(pairs) == len(config.reward_model) else [(n, None) for n in config.reward_model]
    return list(dict(typed).items())


def _described(entry: str, revision: str | None, config: Config, offline: bool) -> RewardModelFacts:
    facts = RewardModelFacts(entry=entry, name=model_name(entry))
    try:
        files = locate_model(entry, revision=revision, use_hf=config.use_hf, offline=offline)
    except ModelError as error:
        return replace(facts, problem=str(error), fault="file" if error.kind == "file" else "hub")
    directory = files.directory
    problem = classifier_problem(directory, with_weights=files.revision is None)
    if problem is not None:
        return replace(facts, problem=str(problem), fault=problem.kind)
    facts = replace(facts, directory=str(directory), context=model_context(directory))
    facts = replace(facts, has_template=_has_template(directory))
    try:
        shapes = read_shapes(directory).tensors
    except ValueError as error:
        return replace(
            facts,
            problem=tr("a file of {directory} is damaged: {error}", directory=directory, error=error),
            fault="missing_shards",
        )
    if not shapes:
        return replace(facts, is_here=False, file_bytes=files.weights_bytes or 0)
    if not any(shape and shape[0] == 1 for shape in shapes.values()):
        words = tr(
            "config.json of {directory} says classifier, but its weights have no head with one output",
            directory=directory,
        )
        return replace(facts, problem=words, fault="causal")
    config_json = read_json(directory / "config.json")
    unfit = fit_of(directory, config_json, stored_tensors(directory), auto=CLASSIFIER).problem
    if unfit is not None:
        return replace(
            facts, problem=tr("{directory}: {unfit}", directory=directory, unfit=unfit), fault="weights"
        )
    hidden = config_json.get("hidden_size") or 0
    return replace(
        facts,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        file_bytes=sum(f.stat().st_size for f in directory.glob("*.safetensors")),
        hidden=hidden,
        intermediate=config_json.get("intermediate_size") or _USUAL_MLP * hidden,
    )


def _has_template(directory: Path) -> bool:
    said = read_json(directory / "tokenizer_config.json").get("chat_template")
    return bool(said) or any(directory.glob("chat_template*"))


def _prompt(config: Config) -> tuple[str | None, list[str]]:
    """Why `judge_prompt` asks nothing of a completion, or None; and the names in it."""
    value = config.judge_prompt
    if not value:
        return None, []
    try:
        text = template_text(value)
    except (OSError, UnicodeDecodeError) as error:
        return tr(
            "judge_prompt names a file, {value}, that cannot be read: {error}", value=value, error=error
        ), []
    if text == value and value.endswith((".txt", ".md")) and len(value.split()) == 1:
        return tr("judge_prompt names a file, {value}, which does not exist", value=value), []
    names = placeholders(text)
    if "completion" not in names:
        return tr("judge_prompt has no {{completion}}: {text!r}", text=text[:80]), names
    return None, names
